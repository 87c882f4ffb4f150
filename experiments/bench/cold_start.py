"""From a command to the first step: how long the wait is, and what it is spent on.

    python -m experiments.bench.cold_start [--repeat 3] [--experiment experiments/NAME.py]

Two starts of a :tiny run, each a process of its own: ``cold`` with an empty compilation cache,
``warm`` with the cache that the first one left. One JSON line each; seconds are wall clock from the
start of the process, medians over the repeats:

    list        python, the packages that --list needs, all runs checked
    import      until the trainer's packages are there
    parts       until task, tokenizer, model and the first weights are
    first_step  until the first step's numbers are on the host
    compile     of all that, seconds in the compiler
    processor   of all that, seconds of processor time, which other work on the machine changes less
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Runs the launcher with clocks around what the loop goes through; nothing is changed but that it
# ends after the first step.
TIMED = """
import json, sys, time
import jaxrl.launch as launch
from absl import flags
told = {}
def mark(name):
    told.setdefault(name, time.time() - START)
START = float(sys.argv.pop(1))
def start(config, workdir, swept=None):
    from jaxrl.train import loop, rounds
    mark("import")
    begin = rounds.begin
    def began(*words, **more):
        state = begin(*words, **more)
        mark("parts")
        return state
    def logged(*words):
        mark("first_step")
        told["compile"] = loop.COMPILATION.seconds
        told["processor"] = time.process_time()
        print("TOLD " + json.dumps(told), flush=True)
        import os
        os._exit(0)
    rounds.begin, loop.log = began, logged
    rounds.run(config, workdir)
launch._start = start
flags.FLAGS(sys.argv)
launch.main(sys.argv[:1])
"""


def timed(words: list[str], cache: Path) -> dict[str, float]:
    """Seconds of one start until its first step."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    ran = subprocess.run(
        [sys.executable, "-c", TIMED, str(time.time()), *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    line = next((x for x in ran.stdout.splitlines() if x.startswith("TOLD ")), None)
    if line is None:
        raise RuntimeError(ran.stderr[-2000:])
    return json.loads(line.removeprefix("TOLD "))


def listed(words: list[str]) -> float:
    """Seconds of --list."""
    began = time.monotonic()
    command = [sys.executable, "-m", "jaxrl.launch", *words, "--list"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.monotonic() - began


def main() -> None:
    """Measure, print."""
    asked = argparse.ArgumentParser(description="time from a command to the first step")
    asked.add_argument("--repeat", type=int, default=3)
    asked.add_argument("--experiment", default="experiments/quickstart_rates.py")
    told = asked.parse_args()
    words = ["--experiment", told.experiment, "--tiny"]
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    lists = []
    for _ in range(told.repeat):
        with tempfile.TemporaryDirectory() as folder:
            lists.append(listed(words))
            for kind in found:
                run = [*words, "--index", "0", "--workdir", str(Path(folder, kind))]
                found[kind].append(timed(run, Path(folder, "cache")))
    print(json.dumps({"start": "list", "list": round(statistics.median(lists), 2)}))
    for kind, rows in found.items():
        medians = {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
        print(json.dumps({"start": kind, "repeat": told.repeat, **medians}))


if __name__ == "__main__":
    main()
