"""The crash matrix: whoever is killed, wherever, every group is trained on once."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl.pool.ledger_sqlite import SqliteLedger
from tests.pool.crashes import TRAINER_POINTS, WORKER_POINTS, check, manifest

ROOT = pathlib.Path(__file__).parents[2]


def run(*plans: dict) -> list[dict]:
    """Run plans in one process of their own; what happened in each."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.pool.crashes", json.dumps(plans)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert not any(one["failed"] for one in told), ran.stderr[-3000:]
    return told


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_a_trainer_that_is_killed_at_any_point_trains_on_the_same(tmp_path, every):
    """Before and after each of reserve, compute, checkpoint and commit; with a checkpoint each
    step, and with steps that a rollback replays."""
    names = ["", *TRAINER_POINTS]
    plans = [
        dict(
            folder=str(tmp_path / f"{place}"),
            steps=4,
            every=every,
            trainer_point=name,
            trainer_step=1 if every == 1 or name.endswith(("checkpoint", "commit")) else 2,
        )
        for place, name in enumerate(names)
    ]
    told = run(*plans)
    assert [one["kills"]["trainer"] for one in told] == [0] + [1] * len(TRAINER_POINTS)
    expected = manifest(tmp_path / "0")
    assert [step for step, _ in expected] == list(range(4))
    for place in range(len(names)):
        assert manifest(tmp_path / f"{place}") == expected, names[place]
        check(tmp_path / f"{place}", 4, 3, 2, 0)


@pytest.mark.slow
def test_a_worker_that_is_killed_at_any_point_changes_nothing(tmp_path):
    names = ["", *WORKER_POINTS]
    plans = [
        dict(folder=str(tmp_path / f"{place}"), steps=3, worker_point=name)
        for place, name in enumerate(names)
    ]
    told = run(*plans)
    assert [one["kills"]["worker"] for one in told] == [0] + [1] * len(WORKER_POINTS)
    for place in range(len(names)):
        assert manifest(tmp_path / f"{place}") == manifest(tmp_path / "0"), names[place]
        check(tmp_path / f"{place}", 3, 3, 2, 0)


@pytest.mark.slow
def test_bad_seals_and_jumping_clocks_change_nothing(tmp_path):
    """Duplicate, late, truncated, flipped, failed and cancelled seals, full disks, clocks an hour
    off."""
    plans = [
        dict(folder=str(tmp_path / "good"), steps=8, groups=4),
        dict(folder=str(tmp_path / "bad"), steps=8, groups=4, mischief=0.5, jumps=1.0),
    ]
    run(*plans)
    assert manifest(tmp_path / "bad") == manifest(tmp_path / "good")
    check(tmp_path / "bad", 8, 4, 2, 0)
    ledger = SqliteLedger(str(tmp_path / "bad" / "ledger.sqlite"), "run")
    counts = ledger.counts()
    ledger.close()
    tried = {name for name in counts if name.startswith("tried_")}
    # fewer where another worker sealed the new attempt before the old one came: then it is `sealed`
    assert 1 <= counts["refused_cancelled"] <= counts["cancelled_pressure"]
    assert len(tried) >= 5 and counts["refused_sealed"] + counts.get("refused_expired", 0) >= 1
    assert counts["reopened"] >= 1


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_and_double_nothing(tmp_path):
    plan = dict(
        folder=str(tmp_path),
        steps=60,
        groups=4,
        samples=4,
        staleness=2,
        over_age="wait",  # so that no group is ever dropped
        every=2,
        workers=3,
        death=0.04,
        kills=0.25,
        mischief=0.1,
        jumps=0.1,
        lease_s=1.0,
        seconds=200.0,
    )
    (told,) = run(plan)
    assert sum(told["kills"].values()) >= 100, told
    assert told["kills"]["trainer"] >= 3, told
    check(tmp_path, 60, 4, 4, staleness=2)
