"""What a run leaves for its reader: where it started, the final table, the curves, the summary.

``config.json`` and ``versions.json`` are written before step 0; ``summary.json`` and
``plots/curves.png`` at the end. Every file appears whole or not at all.
"""

import dataclasses
import importlib.metadata
import io
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from jaxrl.train.accounts import Account
from jaxrl.train.metrics import read_lines
from jaxrl.train.workdir import write_json

if TYPE_CHECKING:  # slow to load, and asked for at the end alone
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1  # of summary.json

CHECKOUT = Path(__file__).resolve().parents[2]  # or site-packages, where jaxrl is installed

# Panels of the picture, in reading order: title and the names that it shows.
PANELS: Mapping[str, str] = {
    "held-out accuracy": r"eval/(avg_at_\d+|pass_at_\d+|greedy)",
    "reward": r"reward/mean",
    "response length (tokens)": r"response/length_(mean|max)",
    "truncated responses (share)": r"response/truncated_frac",
    "entropy (nats)": r".*entropy_mean",
    "distance from the reference (nats)": r"loss/((anchor_|reference_)?kl)_mean",
    "GVPO residual": r"loss/residual_max",
    "clipped tokens (share)": r"loss/(dual_)?clipped_mean",
    "gradient norm": r"optim/grad_norm",
    "loss": r"loss/total",
    "sampler against trainer (nats)": r"sampler/gap_(mean|max)",
    "tokens a second": r".*/.*tokens_per_s",
}
_COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out accuracy of one set of weights, each number in 0..1.

    avg_at_k: mean over prompts of the share of right samples.  pass_at_k: probability that one of
    k samples is right.  interval: of avg_at_k, found by ``method``.
    """

    k: int
    prompts: int
    temperature: float
    avg_at_k: float
    pass_at_k: float
    greedy: float
    interval: tuple[float | None, float | None]  # None: one prompt has no interval
    method: str

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> "HeldOut":
        """From what ``evaluate.EvalResult.to_json`` holds."""
        fields = {field.name: measured[field.name] for field in dataclasses.fields(cls)[:-2]}
        around = measured["interval"]
        return cls(**fields, interval=(around["low"], around["high"]), method=around["method"])

    def to_json(self) -> dict[str, Any]:
        """The fields, with k in the names: ``avg_at_4``, ``pass_at_4``."""
        record = dataclasses.asdict(self)
        for name in ("avg", "pass"):
            record[f"{name}_at_{self.k}"] = record.pop(f"{name}_at_k")
        return record


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run has to say for itself.

    accounts: what each phase has cost, by name, in order; rates are those of the last.
    compilations: how often each jitted function was compiled, by name.
    seen: before and after on questions of the train split; empty if none were asked.
    """

    before: HeldOut
    after: HeldOut
    steps: int
    accounts: Mapping[str, Account]
    compilations: Mapping[str, int]
    seed: int
    seen: tuple[HeldOut, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What ``summary.json`` holds; tokens a second are over wall clock without compilation."""
        last = [Account(), *self.accounts.values()][-1]
        seen = dict(zip(("before", "after"), (x.to_json() for x in self.seen), strict=False))
        return {
            "schema_version": SCHEMA_VERSION,
            "held_out": {"before": self.before.to_json(), "after": self.after.to_json()},
            "steps": self.steps,
            "tokens_per_s": last.trained_tokens / max(last.running_s, 1e-9),
            "generation_tokens_per_s": last.sampled_tokens / max(last.take_s, 1e-9),
            "phases": [{"phase": n} | dataclasses.asdict(x) for n, x in self.accounts.items()],
            "peak_rss_bytes": peak_rss_bytes(),
            "compilations": dict(self.compilations),
            "seed": self.seed,
            "commit": commit(),
            "machine": machine(),
        } | ({"seen": seen} if seen else {})


def peak_rss_bytes() -> int:
    """The most memory that this process has held; not that of its children."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage there starts from what the parent held when it forked
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        return int(peak) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere


def commit(root: Path = CHECKOUT) -> str:
    """The commit of the checkout at ``root``; "+dirty" if the code differs; "unknown" elsewhere."""

    def git(*words: str) -> str:
        ran = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=True
        )
        return ran.stdout.strip()

    try:
        # An installed package may lie below another project's checkout, whose commit is not ours.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "unknown"
        changed = git("status", "--porcelain", "--", "jaxrl", "configs", "pyproject.toml")
        return git("rev-parse", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """The kind of machine, not its name: processor, cores, memory, devices."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def versions() -> dict[str, Any]:
    """Everything that decides the bits besides the config: packages, Python, machine, commit."""
    packages = {
        found["Name"]: found["Version"]
        for found in (one.metadata for one in importlib.metadata.distributions())
        if found["Name"]
    }
    return {
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "machine": machine(),
        "commit": commit(),
    }


def write_start(workdir: epath.PathLike, config: Mapping[str, Any]) -> None:
    """Write ``config.json`` (the resolved config) and ``versions.json``, before step 0.

    A run that continues overwrites both: they tell of the process that wrote last. Only process 0
    writes.
    """
    if jax.process_index() == 0:
        write_json(epath.Path(workdir) / "config.json", config)
        write_json(epath.Path(workdir) / "versions.json", versions())


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, its columns aligned for a terminal: the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "| " + " | ".join([row[0].ljust(widths[0]), *rest]) + " |"

    marks = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [line(rows[0]), "|" + "|".join(marks) + "|", *(line(row) for row in rows[1:])]


def _percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def table(summary: Mapping[str, Any], workdir: epath.PathLike) -> str:
    """The final table of a summary: Markdown whose columns also line up in a terminal."""
    before, after = summary["held_out"]["before"], summary["held_out"]["after"]
    k = after["k"]
    accuracy = [["held-out accuracy", "before", "after", "change"]]
    for title, name in ((f"avg@{k}", f"avg_at_{k}"), (f"pass@{k}", f"pass_at_{k}")):
        accuracy.append([title, *_change(before, after, name)])
    accuracy.append(["greedy", *_change(before, after, "greedy")])
    if "seen" in summary:
        for title, name in ((f"avg@{k}", f"avg_at_{k}"), ("greedy", "greedy")):
            change = _change(summary["seen"]["before"], summary["seen"]["after"], name)
            accuracy.append([f"{title}, train split", *change])
    low, high = ("none" if x is None else _percent(x) for x in after["interval"])
    compiled = ", ".join(f"{name} {n}" for name, n in sorted(summary["compilations"].items()))
    facts = [
        ["quantity", "value"],
        ["steps", f"{summary['steps']:,}"],
        ["trained tokens a second", f"{summary['tokens_per_s']:,.0f}"],
        ["generated tokens a second", f"{summary['generation_tokens_per_s']:,.0f}"],
        ["peak memory", f"{summary['peak_rss_bytes'] / 2**20:,.0f} MiB"],
        ["compilations", compiled or "none"],
        ["seed", str(summary["seed"])],
        ["commit", re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", summary["commit"])],
    ]
    notes = [
        f"{after['prompts']} held-out prompts, {k} samples each at temperature "
        f"{after['temperature']:g}; avg@{k} after: {low} to {high} ({after['method']}).",
        f"Curves: tensorboard --logdir {epath.Path(workdir) / 'tb'}",
        f"Picture: {epath.Path(workdir) / 'plots' / 'curves.png'}",
        f"Summary: {epath.Path(workdir) / 'summary.json'}",
    ]
    costs = _costs(summary["phases"])
    return "\n".join([*_rows(accuracy), "", *_rows(facts), "", *costs, *notes])


def _costs(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each phase has cost, where there are several."""
    rows = [["phase", "rollouts", "updates", "trained tokens", "seconds", "of that, in takes"]]
    for account in phases:
        counts = [f"{account[field]:,}" for field in ("rollouts", "updates", "trained_tokens")]
        times = [f"{account[field]:,.1f}" for field in ("running_s", "take_s")]
        rows.append([account["phase"], *counts, *times])
    return [*_rows(rows), ""] if len(phases) > 1 else []


def _change(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> list[str]:
    points = 100 * (after[name] - before[name])
    return [_percent(before[name]), _percent(after[name]), f"{points:+.1f} points"]


def series(
    records: Sequence[Mapping[str, Any]], pattern: str
) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every name that ``pattern`` matches whole, in order of steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if "/" in name and re.fullmatch(pattern, name):
                found.setdefault(name, []).append((record["step"], value))
    return {name: sorted(points) for name, points in sorted(found.items())}


def _draw(axes: "Axes", title: str, lines: Mapping[str, list[tuple[int, float]]]) -> None:
    for name, points in lines.items():
        steps, values = zip(*points, strict=True)
        mark = "o" if len(points) <= 20 else ""
        axes.plot(steps, values, label=name, linewidth=1, marker=mark, markersize=3)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def curves(records: Sequence[Mapping[str, Any]], phases: Mapping[str, int]) -> "Figure":
    """The picture of a run: one panel for each entry of PANELS that has numbers.

    records: lines of metrics.jsonl.  phases: name -> first step; borders are drawn in each panel.
    Raises ValueError if no panel has numbers.
    """
    from matplotlib.figure import Figure

    panels = {title: series(records, pattern) for title, pattern in PANELS.items()}
    panels = {title: lines for title, lines in panels.items() if lines}
    if not panels:
        raise ValueError(
            f"{len(records)} records hold nothing to draw; panels: {', '.join(PANELS)}"
        )
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width, height = 4.2 * columns, 2.6 * rows
    figure = Figure(figsize=(width, height), dpi=120)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    # In inches: a layout that looks for them itself draws everything twice.
    figure.subplots_adjust(
        left=0.55 / width,
        right=1 - 0.1 / width,
        bottom=0.45 / height,
        top=1 - 0.3 / height,
        wspace=0.16,
        hspace=0.36,
    )
    for axes, (title, lines) in zip(grid, panels.items(), strict=False):
        _draw(axes, title, lines)
        for name, first in phases.items():
            axes.axvline(first, color="grey", linewidth=0.8, linestyle="--")
            place = axes.get_xaxis_transform()  # steps across, share of the panel upwards
            axes.text(first, 0.02, f" {name}", fontsize=6, color="grey", transform=place)
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure


def write_curves(workdir: epath.PathLike, phases: Mapping[str, int]) -> epath.Path:
    """Draw ``metrics.jsonl`` into ``plots/curves.png`` and return where it is."""
    path = epath.Path(workdir) / "plots" / "curves.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    image = io.BytesIO()
    curves(read_lines(epath.Path(workdir) / "metrics.jsonl"), phases).savefig(image, format="png")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(image.getvalue())
    temporary.replace(path)
    return path


def finish(workdir: epath.PathLike, outcome: Outcome, phases: Mapping[str, int]) -> dict[str, Any]:
    """Write the picture and ``summary.json``, print the table, return the summary.

    phases: name -> first step. Only process 0 writes and prints.
    """
    summary = outcome.to_json()
    if jax.process_index() == 0:
        write_curves(workdir, phases)
        write_json(epath.Path(workdir) / "summary.json", summary)
        print(table(summary, workdir), flush=True)
    return summary
