"""Every claim's script builds its claim, and says how to run it and what it found."""

import importlib
import re
from pathlib import Path

import pytest

from experiments.claims.protocol import Claim

CLAIMS = Path(__file__).parents[2] / "experiments" / "claims"
NAMES = sorted(path.stem for kind in ("x[0-9]*", "agents_*") for path in CLAIMS.glob(f"{kind}.py"))


@pytest.mark.parametrize("name", NAMES)
def test_it_builds_and_explains_itself(name):
    script = importlib.import_module(f"experiments.claims.{name}")
    whole, quick = script.claim(False), script.claim(True)
    assert isinstance(whole, Claim) and whole.name == quick.name == name
    assert whole.seeds >= 5 and set(quick.arms) <= set(whole.arms)
    told = script.__doc__ or ""
    assert f"python -m experiments.claims.{name} --workdir" in told
    assert re.search(r"\bResult:", told)
