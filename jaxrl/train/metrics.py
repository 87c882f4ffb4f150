"""Numbers -> TensorBoard (without TensorFlow), the same numbers as JSON lines, and a progress line.

Names are ``area/quantity``. What is not finite is dropped and counted, never written. Everything is
written in the caller's thread: tensorboardX's own writer has a thread that dies silently on a full
disk, and then the run waits on its queue for ever.
"""

import dataclasses
import errno
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from etils import epath
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import directory_check

from jaxrl.train import spread

# Message classes are made when these modules are imported; a type checker cannot see them.
_EVENTS: Any = event_pb2
_SUMMARIES: Any = summary_pb2

NONFINITE = "log/nonfinite"

# The first screen: is it learning, is it still itself, is the machine busy. Regular expressions.
HEALTH: Mapping[str, Mapping[str, Sequence[str]]] = {
    "1. Is it learning?": {
        "held-out accuracy": [r"eval/.*"],
        "reward": [r"reward/mean"],
        "groups with a signal": [r"credit/.*", r"batch/.*frac"],
    },
    "2. Is it still itself?": {
        "response length": [r"response/length_mean", r"response/length_max"],
        "truncated": [r"response/truncated_frac"],
        "distance from where it started": [r"loss/(kl|residual|implicit_reward).*"],
        "entropy": [r".*entropy.*"],
    },
    "3. Is the step sound?": {
        "gradient norm": [r"optim/grad_norm"],
        "loss": [r"loss/total", r"loss/.*loss.*"],
        "ratio and clipping": [r"loss/(ratio|clipped|dual_clipped).*"],
        "sampler against trainer": [r"sampler/gap_.*"],
        "what dropping old groups shifts": [r"pool/drop_.*"],
        "staleness (steps)": [r"sampler/staleness_.*"],
        "skipped, empty, not finite": [r"optim/skipped", r"batch/empty", r".*/nonfinite"],
    },
    "4. Is the machine busy?": {
        "tokens a second": [r".*/.*tokens_per_s"],
        "share of the peak, share of the time that trained": [r"throughput/mfu", r"goodput/frac"],
        "seconds": [r"time/.*"],
        "slowest and fastest host": [r"hosts/\w+_s_(max|min)"],
    },
}

_NAME = re.compile(r"[A-Za-z0-9_@.\-]+(/[A-Za-z0-9_@.\-]+)+")
_FLUSH_S = 1.0  # a flush waits for the disk: 5 ms here, more on a network's
_BUCKET_FLUSH_S = 60.0  # a bucket writes a whole file anew at each flush
_HISTOGRAM_BINS = 64
_SPECIAL = re.compile(r"[^\w\s.,:;=?%$'/]|_")  # what Markdown or HTML may read as a mark


def _check(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"metric name {name!r}; allowed: area/quantity in letters, digits, _ . @ -"
        )
    return name


def read_lines(path: epath.PathLike) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a line torn by a kill is left out."""
    path = epath.Path(path)
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # torn: its step is after the checkpoint that the run resumes from
    return records


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line: marks as entities, line ends as breaks."""
    whole = text.encode("utf-8", "replace").decode()
    marked = _SPECIAL.sub(lambda mark: f"&#{ord(mark[0])};", whole)
    return marked.replace("\r\n", "\n").replace("\n", "<br>").replace("\r", "<br>")


def samples_table(
    rows: Sequence[Mapping[str, Any]],
    runs: Sequence[Sequence[tuple[str, str]] | None] | None = None,
) -> str:
    """Generated samples as a Markdown table.

    Each row has prompt, response, reward, correct and stop_reason; texts are escaped. ``runs`` are
    the responses cut into (mark, text), None where they are not known.
    """
    lines = [
        "| prompt | response | reward | correct | stop |",
        "|:--|:--|--:|:-:|:--|",
    ]
    for row, run in zip(rows, runs or [None] * len(rows), strict=True):
        pieces = " ".join(mark + escape(text) for mark, text in run or ())
        correct = "yes" if row["correct"] else "no"
        cells = [
            escape(row["prompt"]),
            pieces or escape(row["response"]),
            "" if row["reward"] is None else f"{row['reward']:.3g}",
            correct if row["correct"] is not None else "",
            escape(str(row["stop_reason"])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Logger:
    """Curves of one run: ``<directory>/tb`` for TensorBoard, ``<directory>/metrics.jsonl`` to plot.

    directory: the workdir, a folder or a bucket.  start_step: the step that is about to run. What
    an earlier process wrote at this step or later is purged: those steps run again. Only process 0
    writes. Raises OSError naming the directory when it cannot be written.
    """

    def __init__(self, directory: epath.PathLike, *, start_step: int):
        self.nonfinite = 0  # numbers dropped since this process started
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self._events_path = epath.Path(directory) / "tb"
        self._lines_path = epath.Path(directory) / "metrics.jsonl"
        self._lines: list[str] = []  # not yet written
        self._flush_s = _BUCKET_FLUSH_S if "://" in str(directory) else _FLUSH_S
        self._flushed = time.monotonic()
        self._purge_lines(start_step)
        directory_check(str(self._events_path))
        # tensorboardX names files by the second: two starts within one would share, and truncate, a
        # file. TensorBoard reads files in order of name, so the suffix counts upwards.
        earlier = len(list(self._events_path.glob("events.out.tfevents.*")))
        self._events = EventsWriter(str(self._events_path / "events"), f".{earlier:05d}")
        start = _EVENTS.SessionLog(status=_EVENTS.SessionLog.START)
        self._event(_EVENTS.Event(step=start_step, session_log=start))
        self._summary(start_step, self._layout())
        self.flush()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers: names ``area/quantity``, values of one element each.

        Numbers that are not finite (in float32, as TensorBoard keeps them) are dropped and their
        count is written as ``log/nonfinite``.
        """
        numbers = {_check(name): _number(name, value) for name, value in values.items()}
        if not self._writes:
            return
        finite = {name: x for name, x in numbers.items() if _is_finite(x)}
        if len(finite) < len(numbers):
            self.nonfinite += len(numbers) - len(finite)
            finite[NONFINITE] = finite.get(NONFINITE, 0) + len(numbers) - len(finite)
        values_ = [_SUMMARIES.Summary.Value(tag=n, simple_value=x) for n, x in finite.items()]
        self._summary(step, _SUMMARIES.Summary(value=values_))
        self._lines.append(json.dumps({"step": step, "time": round(time.time(), 3), **finite}))
        self._flush_if_due()

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Write Markdown under a tag ``area/quantity``, for example ``samples_table(rows)``."""
        _check(tag)
        if self._writes:
            self._summary(step, summary.text(tag, markdown))
            self._flush_if_due()

    def histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """Write distributions: names ``area/quantity``, arrays of any shape.

        Elements that are not finite are dropped and counted; an array with none left is left out.
        """
        dropped = 0
        for name, x in values.items():
            array = np.asarray(x, np.float64).ravel()
            finite = array[np.isfinite(array)]
            dropped += array.size - finite.size
            if finite.size and self._writes:
                self._summary(step, summary.histogram(_check(name), finite, _HISTOGRAM_BINS))
        if dropped:
            self.scalars(step, {NONFINITE: dropped})
            self.nonfinite += dropped

    def counted(self, step: int, name: str, counts: np.ndarray) -> None:
        """Write a distribution that was counted in the bins of ``spread.py``."""
        bins = np.asarray(counts, np.float64)
        filled = np.flatnonzero(bins)
        if not self._writes or not filled.size:
            return
        limits = spread.limits(bins)
        first, last = max(filled[0] - 1, 0), filled[-1] + 1  # an empty bin shows where it begins
        middles = (limits + np.append(2 * limits[0] - limits[1], limits[:-1])) / 2
        told = summary.histogram_raw(
            name=_check(name),
            min=float(limits[first]),
            max=float(limits[last - 1]),
            num=float(bins.sum()),
            sum=float((bins * middles).sum()),
            sum_squares=float((bins * middles**2).sum()),
            bucket_limits=limits[first:last].tolist(),
            bucket_counts=bins[first:last].tolist(),
        )
        self._summary(step, told)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Write a picture, uint8 [height, width, 3]."""
        _check(name)
        if self._writes:
            self._summary(step, summary.image(name, pixels, dataformats="HWC"))

    def hparams(self, swept: Mapping[str, Any], k: int) -> None:
        """Tell TensorBoard's HParams page in which fields this run of a sweep was set, and which
        curves count; ``k`` is that of avg@k. A run that is no sweep's is not listed."""
        if not swept or not self._writes:
            return
        plain = {n: v if isinstance(v, int | float | str) else str(v) for n, v in swept.items()}
        curves = (f"eval/avg_at_{k}", "eval/greedy", "reward/mean", "response/length_mean")
        # The page asks for the end of a session too; a run that stopped is seen by its curves.
        for part in summary.hparams(plain, dict.fromkeys(curves)):
            self._summary(0, part)
        self.flush()

    def flush(self) -> None:
        """Put on disk what is pending; due before a checkpoint, whose steps are not run again."""
        if not self._writes:
            return
        try:
            self._events.flush()
            if self._lines:
                with self._lines_path.open("a") as file:
                    file.write("".join(line + "\n" for line in self._lines))
        except OSError as error:
            raise _named(error, self._events_path.parent) from error
        self._lines.clear()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is pending and close the files; a second call does nothing."""
        if self._writes:
            self.flush()
            self._events.close()
            self._writes = False

    @staticmethod
    def _layout() -> Any:
        charts = {
            category: {title: ["Multiline", list(tags)] for title, tags in charts.items()}
            for category, charts in HEALTH.items()
        }
        return summary.custom_scalars(charts)

    def _purge_lines(self, start_step: int) -> None:
        if not self._lines_path.exists():
            self._lines_path.parent.mkdir(parents=True, exist_ok=True)
            return
        kept = [line for line in read_lines(self._lines_path) if line["step"] < start_step]
        temporary = self._lines_path.with_name(self._lines_path.name + ".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(self._lines_path)

    def _summary(self, step: int, content: Any) -> None:
        self._event(_EVENTS.Event(step=step, summary=content))

    def _event(self, event: Any) -> None:
        event.wall_time = time.time()
        try:
            self._events.write_event(event)
        except OSError as error:
            raise _named(error, self._events_path) from error

    def _flush_if_due(self) -> None:
        if time.monotonic() - self._flushed > self._flush_s:
            self.flush()


def _number(name: str, value: Any) -> float:
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(f"metric {name!r} has shape {array.shape}; allowed: one number")
    return float(array.reshape(()))


def _is_finite(x: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float32(x)))


def _named(error: OSError, path: epath.Path) -> OSError:
    what = error.strerror or str(error)
    return OSError(error.errno or errno.EIO, f"curves could not be written: {what}", str(path))


@dataclasses.dataclass
class Progress:
    """One line a step: where the run stands, how fast it is, how long it will take.

    total_steps: of the whole run.  stream: a terminal gets the line in place, anything else a line
    each time. The remaining time is the remaining steps times a moving average of the seconds of a
    step without compilation; the average starts anew with another label (phase), so that before the
    last phase it is a guess.
    """

    total_steps: int
    stream: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
    decay: float = 0.9  # of the moving averages
    _began: float = dataclasses.field(default_factory=time.monotonic)
    _label: str = ""
    _seconds: float | None = None
    _tokens_per_s: float | None = None
    _width: int = 0  # of the line that stands on the terminal

    def update(
        self,
        done: int,
        values: Mapping[str, float],
        *,
        tokens: int,
        seconds: float,
        compile_seconds: float = 0.0,
        label: str = "",
    ) -> str:
        """Print and return the line after ``done`` steps.

        values: shown as they are named, in order (loss, reward).  tokens: trained in this step.
        seconds: of this step, ``compile_seconds`` of them spent on compiling.
        """
        if label != self._label:
            self._label, self._seconds, self._tokens_per_s = label, None, None
        working = max(seconds - compile_seconds, 1e-9)
        self._seconds = self._average(self._seconds, working)
        self._tokens_per_s = self._average(self._tokens_per_s, tokens / working)
        shown = [f"{name} {value:.4g}" for name, value in values.items()]
        line = "  ".join(
            [
                f"{label} step {done}/{self.total_steps}".strip(),
                *shown,
                f"{self._tokens_per_s:,.0f} tokens/s",
                f"{duration(time.monotonic() - self._began)} elapsed",
                f"ETA {duration(max(self.total_steps - done, 0) * self._seconds)}",
            ]
        )
        self._print(line)
        return line

    def note(self, text: str) -> None:
        """Print a line of its own without tearing the one that stands on the terminal."""
        self.close()
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """End the line that stands on the terminal."""
        if self._width:
            print(file=self.stream, flush=True)
            self._width = 0

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else self.decay * old + (1 - self.decay) * new

    def _print(self, line: str) -> None:
        if not self.stream.isatty():
            print(line, file=self.stream, flush=True)
            return
        print("\r" + line.ljust(self._width), end="", file=self.stream, flush=True)
        self._width = len(line)


def duration(seconds: float) -> str:
    """42 -> "42s", 90 -> "1m30s", 3700 -> "1h01m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
