r"""Runs side by side: a table, a picture, CSV and Markdown for a paper's draft.

    python -m jaxrl.compare WORKDIR... [--to DIR] [--metrics REGEX] [--baseline ARM] [--level 0.95]

A WORKDIR is a run or a folder of runs, such as a sweep's. Runs whose configs differ in the seed
alone are one arm; an arm is named by the fields in which arms differ. Means and t intervals are
over seeds. The difference to the first arm (or ``--baseline``) is paired by seed where both have
the same seeds, and left empty where they do not. Unfinished runs are counted, not compared.
"""

import csv
import dataclasses
import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from etils import epath
from matplotlib.figure import Figure

from jaxrl import evaluate
from jaxrl.train.metrics import read_lines
from jaxrl.train.report import series

_TO = flags.DEFINE_string(
    "to", "", "folder of compare.{md,csv,png}; empty: the first WORKDIR", allow_override=True
)
_METRICS = flags.DEFINE_string(
    "metrics", r"reward/mean|response/length_mean|eval/avg_at_\d+", "curves that are drawn"
)
_BASELINE = flags.DEFINE_string("baseline", "", "the arm that others are compared with")
_LEVEL = flags.DEFINE_float("level", 0.95, "of the intervals", 0.5, 0.999)

# Fields that are no part of what an arm is: the seed, and how and where a run was watched.
SEED = "seed"
WATCHED = ("seed", "eval", "checkpoint", "log", "mesh", "pool.local_dir", "pool.watchdog_s")


@dataclasses.dataclass(frozen=True)
class Finished:
    """One run that has a summary."""

    path: epath.Path
    seed: int
    fields: Mapping[str, Any]  # the config, dotted
    summary: Mapping[str, Any]

    def results(self) -> dict[str, float]:
        """What the table says of a run."""
        held = self.summary["held_out"]
        k = held["after"]["k"]
        names = {f"avg@{k}": f"avg_at_{k}", f"pass@{k}": f"pass_at_{k}", "greedy": "greedy"}
        gain = held["after"][f"avg_at_{k}"] - held["before"][f"avg_at_{k}"]
        return {title: held["after"][name] for title, name in names.items()} | {
            f"gain in avg@{k}": gain
        }


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested record by dotted names."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def read(workdirs: Sequence[str]) -> tuple[list[Finished], list[str]]:
    """The finished runs, and the folders of those that are not. ValueError for a folder without a
    run, one that cannot be read, another number of samples, and where none is finished."""
    finished, unfinished = [], []
    for workdir in workdirs:
        root = epath.Path(workdir)
        runs = [root] if (root / "config.json").exists() else sorted(root.glob("*/config.json"))
        if not runs:
            raise ValueError(f"{root} holds no run: config.json is missing there and one below")
        for found in runs:
            path = found.parent if found.name == "config.json" else found
            if not (path / "summary.json").exists():
                unfinished.append(str(path))
                continue
            finished.append(_finished(path))
    if not finished:
        raise ValueError(f"none of {len(unfinished)} runs is finished; allowed: one or more")
    first = finished[0]
    if other := next((run for run in finished if [*run.results()] != [*first.results()]), None):
        raise ValueError(
            f"{first.path} has {', '.join(first.results())}, but {other.path} has "
            f"{', '.join(other.results())}; allowed: one eval.samples"
        )
    return finished, unfinished


def _finished(path: epath.Path) -> Finished:
    try:
        config = json.loads((path / "config.json").read_text())
        summary = json.loads((path / "summary.json").read_text())
        run = Finished(path, config[SEED], flat(config), summary)
        results = run.results()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not all(map(math.isfinite, results.values())):
        raise ValueError(f"{path}: {results}; allowed: finite numbers")
    return run


def arms(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    """Runs by what they are, seeds together, in the order in which they were given. ValueError for
    two runs of one arm with the same seed: neither can be told from the other."""

    def own(run: Finished) -> dict[str, Any]:
        return {
            name: value
            for name, value in run.fields.items()
            if not any(name == w or name.startswith(w + ".") for w in WATCHED)
        }

    fields = [own(run) for run in runs]
    names = list(dict.fromkeys(name for each in fields for name in each))
    differing = [n for n in names if len({json.dumps(each.get(n)) for each in fields}) > 1]
    shown = _telling(differing, fields)
    found: dict[str, list[Finished]] = {}
    for run, each in zip(runs, fields, strict=True):
        parts = [f"{n.rsplit('.', 1)[-1]}={each[n]}" for n in shown if n in each]
        found.setdefault(", ".join(parts) or "all runs", []).append(run)
    for name, members in found.items():
        seeds = [run.seed for run in members]
        if len(set(seeds)) < len(seeds):
            twice = next(str(r.path) for r in members if seeds.count(r.seed) > 1)
            raise ValueError(f"arm {name!r} has a seed twice, {twice}; allowed: each seed once")
    return found


def _telling(differing: Sequence[str], fields: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the fields that differ as few as tell all arms apart: a method brings a dozen along."""

    def classes(names: Sequence[str]) -> int:
        return len({json.dumps([each.get(n) for n in names]) for each in fields})

    # What most say most with comes first: the method's name, then what splits its arms.
    order = sorted(differing, key=lambda n: (n != "algorithm.name", differing.index(n)))
    chosen: list[str] = []
    for name in order:
        if classes([*chosen, name]) > classes(chosen):
            chosen.append(name)
    return chosen


def rows(found: Mapping[str, Sequence[Finished]], baseline: str, level: float) -> list[dict]:
    """A record for each arm and result: mean, interval over seeds, difference to the baseline."""
    if baseline not in found:
        raise ValueError(f"--baseline={baseline!r} is no arm; allowed: {'; '.join(found)}")
    table = []
    for arm, members in found.items():
        for result in members[0].results():
            values = {run.seed: run.results()[result] for run in members}
            base = {run.seed: run.results()[result] for run in found[baseline]}
            row = {"arm": arm, "result": result, "seeds": " ".join(map(str, sorted(values)))}
            over = evaluate.interval([values[s] for s in sorted(values)], "t", level=level)
            row |= {"mean": over.mean, "low": over.low, "high": over.high}
            row |= {"difference": None, "difference_low": None, "difference_high": None}
            if arm != baseline and set(values) == set(base):
                d = evaluate.paired(base, values, level=level)
                row |= {"difference": d.mean, "difference_low": d.low, "difference_high": d.high}
            table.append(row)
    return table


def _percent(mean: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    if mean is None:
        return ""
    around = "" if low is None or high is None else f" [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{100 * mean:{sign}.1f}{around}"


def markdown(table: Sequence[Mapping[str, Any]], baseline: str, level: float) -> str:
    """The table: an arm a line, in percent; brackets are intervals over seeds."""
    results = list(dict.fromkeys(row["result"] for row in table))
    last = f"{results[-1]}, over the first"
    lines = ["| " + " | ".join(["arm", "seeds", *results, last]) + " |"]
    lines.append("|---|---|" + "--:|" * (len(results) + 1))
    for arm in dict.fromkeys(row["arm"] for row in table):
        own = {row["result"]: row for row in table if row["arm"] == arm}
        cells = [_percent(own[r]["mean"], own[r]["low"], own[r]["high"]) for r in results]
        end = own[results[-1]]
        apart = _percent(end["difference"], end["difference_low"], end["difference_high"], sign="+")
        seeds = own[results[0]]["seeds"]
        lines.append("| " + " | ".join([arm.replace("|", "\\|"), seeds, *cells, apart]) + " |")
    return "\n".join(
        [
            *lines,
            "",
            f"Percent; brackets: {100 * level:g} % t intervals over seeds. The first is "
            f"{baseline!r}; differences are paired by seed.",
        ]
    )


def as_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """All numbers, a line for each arm and result, fractions in 0..1."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]))
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def picture(found: Mapping[str, Sequence[Finished]], metrics: str, level: float) -> Figure:
    """A panel for each metric, a line for each arm: the mean over seeds and its t interval at the
    steps that all seeds have. ValueError if no run has such a metric."""
    lines: dict[str, dict[str, dict[int, list[float]]]] = {}
    for arm, members in found.items():
        for run in members:
            for name, points in series(read_lines(run.path / "metrics.jsonl"), metrics).items():
                steps = lines.setdefault(name, {}).setdefault(arm, {})
                for step, value in points:
                    if math.isfinite(value):
                        steps.setdefault(step, []).append(value)
    if not lines:
        raise ValueError(f"--metrics={metrics!r} matches no curve")
    columns = min(3, len(lines))
    height = -(-len(lines) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * height), dpi=120, layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False).ravel()
    for axes, (name, by_arm) in zip(grid, sorted(lines.items()), strict=False):
        for arm, steps in by_arm.items():
            whole = sorted(s for s, values in steps.items() if len(values) == len(found[arm]))
            over = [evaluate.interval(steps[s], "t", level=level) for s in whole]
            (line,) = axes.plot(whole, [i.mean for i in over], "-o", ms=2, lw=1, label=arm)
            low, high = (
                [i.mean if x is None else x for i, x in zip(over, side, strict=True)]
                for side in ([i.low for i in over], [i.high for i in over])
            )
            axes.fill_between(whole, low, high, color=line.get_color(), alpha=0.15, lw=0)
            drawn = [v for values in steps.values() for v in values]
            margin = max(np.ptp(drawn), 1e-3)  # an interval of two seeds is wider than the page
            axes.set_ylim(min(drawn) - margin, max(drawn) + margin)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    grid[0].legend(fontsize=6)
    for axes in grid[len(lines) :]:
        axes.remove()
    return figure


def compare(workdirs: Sequence[str], to: str, *, metrics: str, baseline: str, level: float) -> str:
    """Write ``compare.md``, ``compare.csv`` and ``compare.png`` to ``to``; returns the table."""
    runs, unfinished = read(workdirs)
    found = arms(runs)
    first = baseline or next(iter(found))
    table = rows(found, first, level)
    text = markdown(table, first, level)
    if unfinished:
        text += f"\n\nNot finished, left out: {len(unfinished)} ({', '.join(unfinished)})."
    image = io.BytesIO()
    picture(found, metrics, level).savefig(image, format="png")
    folder = epath.Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text(text + "\n")
    (folder / "compare.csv").write_text(as_csv(table))
    (folder / "compare.png").write_bytes(image.getvalue())
    return text


def main(argv: list[str]) -> None:
    """Compare. What was refused ends with one message and exit code 1."""
    workdirs = argv[1:]
    if not workdirs:
        raise app.UsageError("allowed: one WORKDIR or more")
    to = _TO.value or workdirs[0]
    try:
        re.compile(_METRICS.value)
        asked = {"metrics": _METRICS.value, "baseline": _BASELINE.value, "level": _LEVEL.value}
        print(compare(workdirs, to, **asked))
    except (ValueError, KeyError, OSError, re.error) as error:
        sys.exit(f"jaxrl.compare: {type(error).__name__}: {error}")
    print(f"\n{Path(to) / 'compare.png'}, compare.csv and compare.md beside it")


if __name__ == "__main__":
    app.run(main)
