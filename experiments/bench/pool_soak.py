"""Kill a trainer and its workers for so many minutes, and check the accounts after every run.

    python -m experiments.bench.pool_soak [--minutes 30] [--seed 0]

Each run is 60 steps of 4 groups of 4 as in ``tests/pool/test_crashes.py``, with the next seed,
bound of staleness (0, 1, 2, 4) and policy (drop, wait, continue): processes are killed at their
points and at any time, seals are doubled, late, damaged or fail, the clock jumps. After each run
every group must have been trained on once, none lost, none older than K. Prints a JSON line for
each run and one for all; ends with an error at the first run that does not hold.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.pool.crashes import check

RUNS = list(itertools.product((0, 1, 2, 4), ("drop", "wait", "continue")))
STEPS, GROUPS, SAMPLES = 60, 4, 4


def one(seed: int) -> dict:
    """A run and its check."""
    staleness, policy = RUNS[seed % len(RUNS)]
    with tempfile.TemporaryDirectory() as folder:
        plan = dict(
            folder=folder,
            steps=STEPS,
            groups=GROUPS,
            samples=SAMPLES,
            staleness=staleness,
            over_age=policy,
            every=1 + seed % 3,
            workers=3,
            seed=seed,
            death=0.04,
            kills=0.25,
            mischief=0.1,
            jumps=0.1,
            lease_s=1.0,
            seconds=1800.0,
        )
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.pool.crashes", json.dumps([plan])],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        (told,) = json.loads(ran.stdout.splitlines()[-1])
        if told["failed"]:
            raise RuntimeError(f"seed {seed}: {told['failed']} processes ended with an error")
        check(Path(folder), STEPS, GROUPS, SAMPLES, staleness, dropping=policy != "wait")
    return {"seed": seed, "staleness": staleness, "over_age": policy, **told}


def main() -> None:
    """Run until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    given = parser.parse_args()
    began, runs = time.monotonic(), []
    while time.monotonic() - began < 60 * given.minutes:
        runs.append(one(given.seed + len(runs)))
        print(json.dumps(runs[-1]), flush=True)
    kills = {who: sum(run["kills"][who] for run in runs) for who in ("trainer", "worker")}
    total = {"runs": len(runs), "groups": len(runs) * STEPS * GROUPS, "kills": kills}
    print(json.dumps({**total, "minutes": round((time.monotonic() - began) / 60, 1)}))


if __name__ == "__main__":
    main()
