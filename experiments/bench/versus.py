"""Those who do the same work, a process each, in turns, and what that says of them.

All sit down first: each prepares, compiles and runs once. Then turn follows turn, one process at a
time, so that a busy machine slows all alike. A ratio is the median over turns of that inside one
turn: in CPU seconds of all threads (waiting does not count), or, with two cores that nobody else
uses, in the seconds that passed.

An environment for each peer (about 4 GB together), here below $PEERS:

    python3.12 -m venv $PEERS/tunix && $PEERS/tunix/bin/pip install jax==0.12.0.1 \\
        google-tunix==0.1.7 optax
    python3.11 -m venv $PEERS/torch && $PEERS/torch/bin/pip install torch==2.13.0 trl==1.16.0

whose pythons are told by --peers tunix=$PEERS/tunix/bin/python torch=$PEERS/torch/bin/python. Plain
JAX and jaxrl run in the environment that runs the bench; who has no environment is left out, and
what would have compared with it says «unmeasured».
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

Row = dict[str, Any]
Given = argparse.Namespace
HOME = {"tunix": "tunix", "torch": "torch", "trl": "torch"}  # who lives in which environment


class Seat:
    """A process that does the work, for its turns."""

    def __init__(self, who: str, python: str, command: Sequence[str], cores: Sequence[int]) -> None:
        module = "ours" if who in ("jaxrl", "residual", "floor") else "rivals"
        calm = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        calm |= {"OMP_WAIT_POLICY": "PASSIVE", "TRANSFORMERS_VERBOSITY": "error"}
        question, *rest = command
        self.who = who
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", f"experiments.bench.{module}", question, who, *rest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("LOUD") else None,
            text=True,
            env={**os.environ, **calm},
            preexec_fn=lambda: os.sched_setaffinity(0, set(cores)),
        )
        self.first = self._heard()
        self.turns: list[Row] = []

    def _heard(self) -> Row:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.who} ended with {self.process.wait()}; LOUD=1 shows why")
        return json.loads(line)

    def turn(self) -> None:
        """Once more."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        self.turns.append(self._heard())

    def leave(self) -> None:
        """The process ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def values(self, what: str) -> list[float]:
        """Of each turn: ``cpu`` or ``wall`` seconds, ``peak`` MiB."""
        return [turn[what] for turn in self.turns]

    @property
    def peak(self) -> float:
        """MiB at most, preparation and compilation included."""
        return max([self.first["peak"], *self.values("peak")])


class Party:
    """Who takes part in one case, as a context: all leave at its end."""

    def __init__(self, given: Given, bench: str, case: str) -> None:
        self.given, self.bench, self.case = given, bench, case
        self.seats: dict[str, Seat] = {}
        self.unit = "cpu" if given.cores == 1 else "wall"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for seat in self.seats.values():
            seat.leave()

    def sit(self, name: str, who: str, *command: str) -> None:
        """Seat somebody under a name, if there is an environment for them."""
        home, pythons = HOME.get(who), dict(pair.split("=", 1) for pair in self.given.peers)
        python = sys.executable if home is None else pythons.get(home)
        if python is None:
            return
        cores = sorted(os.sched_getaffinity(0))[-self.given.cores :]
        self.seats[name] = Seat(who, python, command, cores)

    def play(self) -> None:
        """All turns."""
        for turn in range(self.given.turns):
            names = list(self.seats)
            for name in names if turn % 2 == 0 else names[::-1]:
                self.seats[name].turn()

    def ratio(self, above: str, below: str, what: str = "") -> float | None:
        """Median over turns; None where one of the two took no part."""
        if above not in self.seats or below not in self.seats:
            return None
        pairs = zip(
            self.seats[above].values(what or self.unit),
            self.seats[below].values(what or self.unit),
            strict=True,
        )
        return statistics.median(a / b for a, b in pairs)

    def row(self, who: str, value: float | None, unit: str, to: str = "") -> Row:
        """A line of the bench."""
        shown = None if value is None else float(f"{value:.4g}")
        named = {"bench": self.bench, "case": self.case, "who": who, "value": shown}
        return {**named, "unit": unit, "ratio_to": to}

    def rows(self, work: float, unit: str, against: str) -> Iterable[Row]:
        """Of each: seconds and rate, how much faster ``against`` is, peak memory, first run."""
        for name, seat in self.seats.items():
            if name == "floor":
                continue
            seconds = statistics.median(seat.values(self.unit))
            yield self.row(name, 1e3 * seconds, f"{self.unit} ms, median")
            yield self.row(name, work / seconds, f"{unit}/{self.unit} s")
            yield self.row(name, seat.peak, "MiB, peak")
            yield self.row(name, seat.first[self.unit], f"{self.unit} s, first run")
        for name in self.seats:
            if name not in (against, "floor"):
                yield self.row(against, self.ratio(name, against), "x as fast", name)

    def told(self) -> dict[str, Mapping[str, float]]:
        """The numbers that each told of its first run."""
        return {name: seat.first["told"] for name, seat in self.seats.items()}

    def agree(self, name: str, within: float) -> Row:
        """A row of the widest relative difference in a number; SystemExit where it is too wide."""
        values = {who: told[name] for who, told in self.told().items() if name in told}
        widest = (max(values.values()) - min(values.values())) / abs(max(values.values()))
        if widest > within:
            raise SystemExit(f"{self.bench} {self.case}: {name} differs: {values}")
        return self.row(", ".join(values), widest, f"widest relative difference of {name}")


def asked(doc: str | None) -> argparse.ArgumentParser:
    """What every bench of this kind is asked."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--cores", type=int, choices=(1, 2), default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--case", nargs="*", default=[], help="some of them; else all")
    return parser


def told(given: Given, cases: Mapping[str, Callable[[], Iterable[Row]]]) -> list[Row]:
    """Run the cases; JSON lines to stdout, a table to stderr."""
    rows = []
    for name in given.case or cases:
        for row in cases[name]():
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows), file=sys.stderr)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| case | who | value | unit | to |", "|---|---|--:|---|---|"]
    for row in rows:
        value = "unmeasured" if row["value"] is None else f"{row['value']:g}"
        lines.append(
            f"| {row['case']} | {row['who']} | {value} | {row['unit']} | {row['ratio_to']} |"
        )
    return "\n".join(lines)
