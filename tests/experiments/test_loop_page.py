"""Every command of experiments/LOOP.md does what the page says: as :tiny, and without a cloud."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "experiments" / "LOOP.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of the page: its runs tiny, one of a sweep for all, its folders here."""
    line = line.replace("/tmp/", f"{folder}/").replace("quickstart.py ", "quickstart.py:tiny ")
    line = re.sub(r"\b(BUCKET|PROJECT|ZONE|IMAGE|QUEUE)\b", lambda word: word[0].lower(), line)
    words = [word.replace("--all", "--index=4") for word in shlex.split(line)]
    if words[2] == "jaxrl.launch" and "--experiment" in words:
        words.append("--tiny")
    assert words[0] == "python"
    return subprocess.run(
        [sys.executable, *words[1:]],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_commands_in_their_order(tmp_path):
    said = {}
    for line in (line for line in COMMANDS if "--list" not in line):
        ran = run(line, tmp_path)
        assert ran.returncode == 0, f"{line}\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}"
        said[re.sub(r"^python -m ", "", line)] = ran.stdout
    whole = {name.split()[0]: text for name, text in said.items()}
    assert set(whole) == {f"jaxrl.{verb}" for verb in VERBS}
    (finished,) = tmp_path.glob("rates/*/summary.json")
    assert "quickstart_grpo" in str(finished) and (tmp_path / "rates" / "compare.png").exists()
    assert list(tmp_path.glob("one/tb/plugins/profile/*/*.xplane.pb"))
    assert list(tmp_path.glob("one/samples/*.html")) and list(tmp_path.glob("one/measured/v=*"))
    assert (tmp_path / "exported" / "model.safetensors").exists()


VERBS = ("launch", "compare", "measure", "export", "pod")


def test_the_list_takes_seconds_and_no_run():
    ran = run(next(line for line in COMMANDS if "--list" in line), Path("/tmp"))
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 8 and "configs/quickstart.py:tiny_grpo" in ran.stdout


def test_the_commands_for_a_pod_are_what_a_cloud_gets():
    script, manifest = (line for line in COMMANDS if "jaxrl.pod" in line)
    ran = run(script, Path("/tmp"))
    assert ran.returncode == 0 and "--topology=2x2" in ran.stdout, ran.stderr
    assert subprocess.run(["bash", "-n"], input=ran.stdout, text=True).returncode == 0
    ran = run(manifest, Path("/tmp"))
    assert [one["kind"] for one in yaml.safe_load_all(ran.stdout)] == ["JobSet"], ran.stderr
