"""How a claim is measured: each arm at its own best learning rate, then on fresh seeds.

A script says what its arms are and how one run goes; this file does the rest:

    def claim(quick: bool) -> Claim:
        return Claim(
            name="x03_staleness",
            arms=("clipped", "no correction"),
            run=lambda arm, rate, seed: {"accuracy": 0.9, "curve": [0.1, 0.5, 0.9]},
            rates=(1e-3, 3e-3),
            choose="accuracy",
            larger=True,
            shown=("accuracy",),
            drawn=("curve",),
            against="clipped",
            seeds=2 if quick else 5,
        )

    if __name__ == "__main__":
        main(claim, __doc__)

1. Every arm runs with every learning rate on one development seed; the rate with the best
   ``choose`` is kept (no grid: one rate; no learning rate at all: ``rates=(0.0,)``).
2. Every arm runs with its rate on the fresh seeds 0 to ``seeds`` - 1. Only these are reported.
3. stdout and ``<workdir>/<name>.md`` get a table of means with 95 % t intervals over seeds, and of
   the differences to the arm ``against``, paired by seed; ``<workdir>/<name>.png`` the curves with
   the same intervals as bands, or points with bars where a number is drawn.

A run that has ended is a line of ``<workdir>/<name>.jsonl`` with its arm, rate, seed, commit and
seconds. What was measured with the same sources (a digest over the loaded modules of jaxrl and
experiments, so that commits elsewhere do not count) is not measured again, so that a script cut off
goes on where it was. ``--arms`` runs some arms only: two processes may share a workdir.

Set XLA_FLAGS="--xla_cpu_multi_thread_eigen=false" and OMP_NUM_THREADS=1 in long runs on shared
cores.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from jaxrl.evaluate import interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 (after the choice of a backend without a display)

ROOT = Path(__file__).parents[2]
DEVELOPMENT_SEED = 1000  # no fresh seed reaches it

Outcome = Mapping[str, float | Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A question: arms that differ in one thing, and what is looked at."""

    name: str
    arms: Sequence[str]
    run: Callable[[str, float, int], Outcome]  # (arm, rate, seed) -> numbers and curves, by name
    rates: Sequence[float]
    choose: str  # the number that picks an arm's rate on the development seed
    larger: bool  # is a larger one better?
    shown: Sequence[str]  # numbers of the table
    drawn: Sequence[str]  # numbers or curves of the picture
    against: str  # the arm that differences are taken to; "": none
    seeds: int

    def __post_init__(self) -> None:
        if self.against and self.against not in self.arms:
            raise ValueError(f"against={self.against!r}; allowed: {tuple(self.arms)}")
        if not (self.rates and 0 < self.seeds <= DEVELOPMENT_SEED):
            raise ValueError(f"rates={self.rates!r}, seeds={self.seeds!r}; allowed: one or more")


@dataclasses.dataclass(frozen=True)
class Result:
    """One run that has ended; the fields of a line of the JSON lines."""

    arm: str
    rate: float
    seed: int
    quick: bool
    sources: str
    commit: str
    seconds: float
    outcome: dict[str, Any]

    @property
    def key(self) -> tuple[str, float, int, bool, str]:
        """What makes two runs the same."""
        return self.arm, self.rate, self.seed, self.quick, self.sources


def sources() -> str:
    """Digest of the files of all loaded modules of jaxrl and experiments."""
    named = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {Path(name).resolve() for name in named if name and name.endswith(".py")}
    rooms = [ROOT / room for room in ("jaxrl", "experiments")]
    own = sorted(file for file in files if any(file.is_relative_to(room) for room in rooms))
    digest = hashlib.sha256()
    for file in own:
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def commit() -> str:
    """Short hash of the checkout, with a + where a tracked file of jaxrl or experiments differs."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", "jaxrl", "experiments")
    return (git("rev-parse", "--short", "HEAD") or "none") + ("+" if changed else "")


class Book:
    """The runs that have ended, as JSON lines."""

    def __init__(self, path: Path, quick: bool):
        self.path, self.quick, self.sources = path, quick, sources()

    def results(self) -> dict[tuple, Result]:
        """By key; a line that was cut off is left out."""
        found = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                result = Result(**json.loads(line))
            except json.JSONDecodeError:
                continue
            found[result.key] = result
        return found

    def get(self, arm: str, rate: float, seed: int) -> Result | None:
        """Read anew each time: another process may have added it."""
        key = (arm, float(rate), seed, self.quick, self.sources)
        return self.results()[key] if key in self.results() else None

    def add(self, arm: str, rate: float, seed: int, outcome: Outcome, seconds: float) -> None:
        """One line, whole or not at all for a reader."""
        plain = {name: np.asarray(x, np.float64).tolist() for name, x in outcome.items()}
        result = Result(arm, float(rate), seed, self.quick, self.sources, commit(), seconds, plain)
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            # A line that was cut off must not swallow this one.
            file.write("\n" * cut + json.dumps(dataclasses.asdict(result)) + "\n")


def best_rate(claim: Claim, found: Sequence[Result]) -> float:
    """The rate whose development run has the best ``choose``; the smallest of equals."""

    def worth(result: Result) -> tuple[float, float]:
        value = result.outcome[claim.choose]
        value = value if claim.larger else -value
        return (value if math.isfinite(value) else -math.inf, -result.rate)

    return max(found, key=worth).rate


def measure(claim: Claim, book: Book, arms: Sequence[str]) -> dict[str, list[Result]]:
    """Run what is missing; per arm, the results on fresh seeds at its best rate."""
    grid = len(claim.rates) if len(claim.rates) > 1 else 0
    left = {arm: grid + claim.seeds for arm in arms}  # runs to come
    clock: dict[str, list[float]] = {arm: [] for arm in arms}

    def one(arm: str, rate: float, seed: int) -> Result:
        known = book.get(arm, rate, seed)
        if known is None:
            began = time.monotonic()
            outcome = claim.run(arm, rate, seed)
            book.add(arm, rate, seed, outcome, time.monotonic() - began)
            known = book.get(arm, rate, seed)
            assert known is not None
        left[arm] -= 1
        clock[arm].append(known.seconds)
        every = [second for seconds in clock.values() for second in seconds]
        ahead = sum(left[arm] * float(np.mean(clock[arm] or every)) for arm in arms)
        told = ", ".join(f"{name} {known.outcome[name]:.4g}" for name in claim.shown)
        print(
            f"{claim.name}: {arm}, rate {rate:g}, seed {seed}: {told} ({known.seconds:.1f} s; "
            f"{sum(left.values())} runs left, about {ahead / 60:.1f} min)",
            file=sys.stderr,
            flush=True,
        )
        return known

    found = {}
    for arm in arms:
        rate = claim.rates[0]
        if grid:
            rate = best_rate(claim, [one(arm, rate, DEVELOPMENT_SEED) for rate in claim.rates])
        found[arm] = [one(arm, rate, seed) for seed in range(claim.seeds)]
    return found


def cell(values: Sequence[float]) -> str:
    """Mean and 95 % t interval over seeds."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values):
        return f"not finite in {len(values) - len(finite)} of {len(values)}"
    about = interval(values, "t")
    around = "" if about.low is None else f" [{about.low:.4g}, {about.high:.4g}]"
    return f"{about.mean:.4g}{around}"


def table(claim: Claim, found: Mapping[str, Sequence[Result]]) -> str:
    """Markdown: numbers of each arm, then differences to ``against``, paired by seed."""
    lines = [
        "| arm | rate | " + " | ".join(claim.shown) + " | seconds a run |",
        "|---" * (len(claim.shown) + 3) + "|",
    ]
    edges = {min(claim.rates), max(claim.rates)} if len(claim.rates) > 2 else set()
    for arm, results in found.items():
        rate = results[0].rate
        cells = [arm, f"{rate:g}" + (" (edge of the grid)" if rate in edges else "")]
        cells += [cell([r.outcome[name] for r in results]) for name in claim.shown]
        cells += [f"{np.mean([r.seconds for r in results]):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if claim.against in found:
        base = found[claim.against]
        for arm, results in found.items():
            if arm == claim.against:
                continue
            pairs = [(a.outcome, b.outcome) for a, b in zip(results, base, strict=True)]
            cells = [f"{arm} - {claim.against}", ""]
            cells += [cell([a[name] - b[name] for a, b in pairs]) for name in claim.shown]
            lines.append("| " + " | ".join([*cells, ""]) + " |")
    made = sorted({result.commit for results in found.values() for result in results})
    lines += ["", f"Means and 95 % t intervals over {claim.seeds} seeds; commit {', '.join(made)}."]
    return "\n".join(lines)


def draw(claim: Claim, found: Mapping[str, Sequence[Result]], path: Path) -> None:
    """One panel a drawn name: curves with bands, or points with bars; intervals as in the table."""
    figure, axes = plt.subplots(
        1, len(claim.drawn), figsize=(6 * len(claim.drawn), 4), squeeze=False, layout="constrained"
    )
    for panel, name in zip(axes[0], claim.drawn, strict=True):
        for place, (arm, results) in enumerate(found.items()):
            values = np.stack([np.atleast_1d(r.outcome[name]) for r in results])  # [seed, point]
            values = np.where(np.isfinite(values), values, np.nan)
            mean, half = np.nanmean(values, 0), np.zeros(values.shape[1])
            for point in range(values.shape[1]):
                column = values[:, point]
                if len(column) > 1 and np.isfinite(column).all():
                    about = interval(column.tolist(), "t")
                    assert about.high is not None
                    half[point] = about.high - about.mean
            if values.shape[1] == 1:
                panel.errorbar([place], mean, yerr=half, fmt="o", capsize=4, label=arm)
                panel.set_xticks([])
            else:
                panel.plot(mean, label=arm)
                panel.fill_between(np.arange(len(mean)), mean - half, mean + half, alpha=0.2)
        panel.set_title(name)
        panel.legend(fontsize="small")
    figure.suptitle(f"{claim.name}: mean and 95 % t interval, {claim.seeds} seeds")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(claim: Claim, workdir: Path, quick: bool, arms: Sequence[str]) -> str:
    """Measure, write table and picture under ``workdir``; the table."""
    unknown = sorted(set(arms) - set(claim.arms))
    if unknown:
        raise ValueError(f"arms={unknown}; allowed: {tuple(claim.arms)}")
    workdir.mkdir(parents=True, exist_ok=True)
    found = measure(claim, Book(workdir / f"{claim.name}.jsonl", quick), arms or claim.arms)
    text = table(claim, found)
    (workdir / f"{claim.name}.md").write_text(text + "\n")
    if claim.drawn:
        draw(claim, found, workdir / f"{claim.name}.png")
    return text


def main(build: Callable[[bool], Claim], doc: str | None) -> None:
    """The command line of a claim's script."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs")
    parser.add_argument("--arms", nargs="*", default=[], help="these arms only")
    arguments = parser.parse_args()
    print(report(build(arguments.quick), arguments.workdir, arguments.quick, arguments.arms))
