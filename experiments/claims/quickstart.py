"""Does the main job learn by reinforcement, and what do others reach after the same warm start?

python -m experiments.claims.quickstart --workdir /tmp/claim --seeds 3

Runs ``configs/quickstart.py`` with GVPO, with GRPO and with more supervised training for each seed,
one after another, and prints the table of the README; all numbers are in ``<workdir>/claim.json``.
Runs that have finished are read back.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxrl.evaluate import interval

ROOT = Path(__file__).parents[2]
METHODS = {"": "GVPO", "grpo": "GRPO", "sft": "more supervised training"}


def run(variant: str, seed: int, workdir: Path) -> dict[str, Any]:
    """One run's summary, with its wall clock in seconds, start to end."""
    folder = workdir / f"{variant or 'gvpo'}-{seed}"
    clock = folder / "seconds.json"
    if not clock.exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a run cut off, whose seconds nobody knows
        config = "configs/quickstart.py" + (f":{variant}" if variant else "")
        words = ["--config", config, f"--config.seed={seed}", "--workdir", str(folder)]
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "jaxrl.launch", *words], cwd=ROOT, check=True)
        clock.write_text(json.dumps(time.monotonic() - began))
    summary = json.loads((folder / "summary.json").read_text())
    return summary | {"seconds": json.loads(clock.read_text())}


def cell(values: list[float], scale: float = 100) -> str:
    """Mean and 95 % t interval over seeds."""
    found = interval([scale * value for value in values], "t")
    around = "" if found.low is None else f" [{found.low:.1f}, {found.high:.1f}]"
    return f"{found.mean:.1f}{around}"


def row(name: str, summaries: list[dict[str, Any]]) -> str:
    """A row of the README's table."""
    before, after = ([s["held_out"][when] for s in summaries] for when in ("before", "after"))
    gain = [b["avg_at_4"] - a["avg_at_4"] for a, b in zip(before, after, strict=True)]
    cells = [cell([a["avg_at_4"] for a in before]), cell([b["avg_at_4"] for b in after])]
    cells += [cell(gain)]
    for number in ("pass_at_4", "greedy"):
        pairs = [[one[number] for one in side] for side in (before, after)]
        cells.append(" to ".join(f"{100 * sum(side) / len(side):.1f}" for side in pairs))
    cells.append(cell([s["seconds"] / 60 for s in summaries], scale=1))
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Run what is missing, print the table, write claim.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS.values()}
    for seed in range(arguments.seeds):
        for variant, name in METHODS.items():
            found[name].append(run(variant, seed, arguments.workdir))
            (arguments.workdir / "claim.json").write_text(json.dumps(found, indent=2) + "\n")
    print("| run | avg@4 before | avg@4 after | gain | pass@4 | greedy | minutes |")
    print("|---|---|---|---|---|---|---|")
    for name, summaries in found.items():
        print(row(name, summaries))


if __name__ == "__main__":
    main()
