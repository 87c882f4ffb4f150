"""MACE: memory units in combinations, and a coupler that learns pairs of (combination, form).

For an operation (role, stage, text) candidates are grown greedily by
s(u) = a1 rel(u) + a2 sum support - a3 sum conflict - a4 risk(u) + a5 U(u) over the units selected
so far, among units of that role and stage, under a budget of units and tokens; a repair link brings
its partner along. What is shown is a patch: a combination c in a form f. Feedback reaches what was
*used*: U <- (1 - eta) U + eta R, links of pairs used together likewise, and Q(role, stage, c, f)
becomes the mean of R over what was shown. All reads of a round are of the memory frozen at its
start.

``coupler``: ``joint`` takes the pair (c, f) with the largest Q + kappa / sqrt(n), and where a pair
is new its estimate from the averages; ``separate`` the best c and the best f by their averages;
``fixed`` one (place of the combination, form) for all stages. ``returns``: R is the trace's common
one, as published, or each stage's own.

The source accepts units without a test. Ours: a last trial of the coupler's choice against the
``separate`` one on fresh tasks, through a gate that asks for more than ``noise``.

Source: MACE, by notes on it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.agents.artefacts import label
from jaxrl.agents.journal import Json, digest
from jaxrl.agents.port import Role
from jaxrl.agents.retrieval import cosine
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.worlds import HELD_OUT, within

_KIND: Json = {
    "type": "object",
    "properties": {"kind": {"enum": ["support", "conflict", "repair", "none"]}},
    "required": ["kind"],
}
_BODY: Json = {
    "type": "object",
    "properties": {
        "role": {"type": "string"},
        "stage": {"type": "string"},
        "risk": {"type": "number", "minimum": 0},
        "tokens": {"type": "integer", "minimum": 1},
    },
    "required": ["role", "stage", "risk", "tokens"],
}
_UNITS: Json = {
    "type": "object",
    "properties": {
        "units": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "trigger": {"type": "string"},
                    "text": {"type": "string"},
                    "body": _BODY,
                },
                "required": ["name", "trigger", "text", "body"],
            },
        }
    },
    "required": ["units"],
}
ROLES = {
    "relate": Role("judge", _KIND, "Do these two memories support, conflict with or repair one?"),
    "extract": Role("propose", _UNITS, "Turn this episode into memory units."),
}
Cell = tuple[str, str, str, str]  # role, stage, combination, form


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of the parts of a unit's score."""

    relevance: float
    support: float
    conflict: float
    risk: float
    utility: float


@dataclasses.dataclass(frozen=True)
class Link:
    """How two units stand to each other."""

    kind: str
    weight: float = 1.0
    count: int = 0


def combination(units: Sequence[str]) -> str:
    """Names a set of units, whatever their order."""
    return digest(sorted(units))[:16]


@dataclasses.dataclass
class Mace:
    """Fields are those of configs/agents/mace.py."""

    coupler: Literal["joint", "fixed", "separate"]
    returns: Literal["common", "stage"]
    forms: tuple[str, ...]
    units: int  # of a patch
    tokens: int  # of a patch
    combinations: int  # candidates of an operation
    weights: Weights
    conflicting: float  # weight from which a conflict keeps units apart
    eta: float
    kappa: float
    calibration: int  # tasks of round 0, each under every cell; 0: none
    tasks: int  # of a later round
    extracted: int  # episodes of a round that become units
    trial: int  # tasks of the last trial
    noise: float
    rounds: int  # as the run's
    held_out: int

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        for field, allowed in (
            ("coupler", ("joint", "fixed", "separate")),
            ("returns", ("common", "stage")),
        ):
            if vars(self)[field] not in allowed:
                raise ValueError(f"system.{field}={vars(self)[field]!r}; allowed: {allowed}")
        within("system", self, 1, math.inf, "units", "tokens", "combinations")
        within("system", self, 1, math.inf, "tasks", "rounds", "held_out")
        zero = ("conflicting", "kappa", "calibration", "extracted", "trial", "noise")
        within("system", self, 0, math.inf, *zero)
        if not 0 < self.eta <= 1:
            raise ValueError(f"system.eta={self.eta!r}; allowed: above 0, at most 1")
        self.utility: dict[str, float] = {}
        self.seen: dict[str, int] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.cells: dict[Cell, tuple[float, int]] = {}  # Q, n
        self.frozen = ""  # names the memory that is read now
        self.grown: dict[tuple[str, str, str], list[tuple[str, ...]]] = {}  # candidates in it

    # What is shown.

    def candidates(self, run: Run, operation: Json) -> list[tuple[str, ...]]:
        """Combinations, each grown from another first unit; sorted. Of the frozen memory."""
        where = (operation["role"], operation["stage"], operation["text"])
        if where not in self.grown:
            self.grown[where] = self._candidates(run, operation)
        return self.grown[where]

    def _candidates(self, run: Run, operation: Json) -> list[tuple[str, ...]]:
        fit = self._fitting(run, operation)
        found: list[tuple[str, ...]] = []
        for first in sorted(fit, key=lambda name: (-self._score(run, operation, name, ()), name)):
            grown = tuple(sorted(self._grown(run, operation, fit, first)))
            if grown and grown not in found:
                found.append(grown)
        return sorted(found[: self.combinations])

    def _fitting(self, run: Run, operation: Json) -> list[str]:
        bodies = {n: run.shelf.get((n, v)).body for n, v in run.shelf.active().items()}
        where = (operation["role"], operation["stage"])
        return [n for n, body in bodies.items() if (body["role"], body["stage"]) == where]

    def _score(self, run: Run, operation: Json, name: str, chosen: Sequence[str]) -> float:
        unit = run.shelf.get((name, run.shelf.active()[name]))
        a = self.weights
        score = a.relevance * cosine(unit.trigger, operation["text"])
        score += a.support * sum(self._link(name, other, "support") for other in chosen)
        score -= a.conflict * sum(self._link(name, other, "conflict") for other in chosen)
        return score - a.risk * unit.body["risk"] + a.utility * self.utility.get(name, 0.0)

    def _link(self, one: str, other: str, kind: str) -> float:
        link = self.links.get((min(one, other), max(one, other)))
        return link.weight if link is not None and link.kind == kind else 0.0

    def _grown(self, run: Run, operation: Json, fit: Sequence[str], first: str) -> list[str]:
        """Greedily, while something is worth more than nothing and fits."""
        active, chosen, queue = run.shelf.active(), [], [first]
        left = self.tokens
        while queue and len(chosen) < self.units:
            name = queue.pop(0)
            size = run.shelf.get((name, active[name])).body["tokens"]
            if size <= left and self._apart(name, chosen):
                chosen.append(name)
                left -= size
                repairs = [n for n in fit if n not in chosen and self._link(n, name, "repair")]
                queue = repairs + queue
            if not queue:
                more = {n: self._score(run, operation, n, chosen) for n in fit if n not in chosen}
                fine = [n for n in more if more[n] > 0 and self._apart(n, chosen)]
                sizes = {n: run.shelf.get((n, active[n])).body["tokens"] for n in fine}
                queue = sorted((n for n in fine if sizes[n] <= left), key=lambda n: (-more[n], n))[
                    :1
                ]
        return chosen

    def _apart(self, name: str, chosen: Sequence[str]) -> bool:
        return all(self._link(name, other, "conflict") < self.conflicting for other in chosen)

    # The coupler.

    def _cell(self, operation: Json, units: Sequence[str], form: str) -> Cell:
        return (operation["role"], operation["stage"], combination(units), form)

    def value(self, operation: Json, found: Sequence[tuple[str, ...]], c: int, f: int) -> float:
        """Q of a pair; of a new one, what the averages of its combination and form make it."""
        q, n = self.cells.get(self._cell(operation, found[c], self.forms[f]), (0.0, 0))
        return q if n else self._averages(operation, found, c, f)

    def _known(
        self, operation: Json, found: Sequence[tuple[str, ...]], c: int | None, f: int | None
    ) -> float:
        """Mean Q over the known pairs of a combination, of a form, or of all (None); else 0."""
        rows = range(len(found)) if c is None else [c]
        columns = range(len(self.forms)) if f is None else [f]
        cells = [self._cell(operation, found[i], self.forms[j]) for i in rows for j in columns]
        known = [self.cells[cell][0] for cell in cells if cell in self.cells]
        return float(np.mean(known)) if known else 0.0

    def _averages(self, operation: Json, found: Sequence[tuple[str, ...]], c: int, f: int) -> float:
        whole = self._known(operation, found, None, None)
        return (
            (self._known(operation, found, c, None) or whole)
            + (self._known(operation, found, None, f) or whole)
            - whole
        )

    def choose(
        self, run: Run, operations: Sequence[Json], coupler: str, kappa: float
    ) -> list[Json]:
        """A patch for each operation."""
        found = [self.candidates(run, operation) for operation in operations]
        if coupler == "fixed":
            size = min(map(len, found))
            pairs = itertools.product(range(size), range(len(self.forms)))
            worth = {
                pair: sum(
                    self.value(operation, rows, *pair)
                    for operation, rows in zip(operations, found, strict=True)
                )
                for pair in pairs
            }
            picks = [max(worth, key=lambda pair: (worth[pair], (-pair[0], -pair[1])))] * len(found)
        elif coupler == "separate":
            picks = [self._separate(*pair) for pair in zip(operations, found, strict=True)]
        else:
            picks = [self._joint(*pair, kappa) for pair in zip(operations, found, strict=True)]
        return [
            self._patch(run, operation, rows[c], self.forms[f])
            for operation, rows, (c, f) in zip(operations, found, picks, strict=True)
        ]

    def _separate(self, operation: Json, found: Sequence[tuple[str, ...]]) -> tuple[int, int]:
        rows = [self._known(operation, found, c, None) for c in range(len(found))]
        columns = [self._known(operation, found, None, f) for f in range(len(self.forms))]
        return int(np.argmax(rows)), int(np.argmax(columns))

    def _joint(
        self, operation: Json, found: Sequence[tuple[str, ...]], kappa: float
    ) -> tuple[int, int]:
        def worth(pair: tuple[int, int]) -> float:
            cell = self._cell(operation, found[pair[0]], self.forms[pair[1]])
            n = self.cells[cell][1] if cell in self.cells else 1
            return self.value(operation, found, *pair) + kappa / n**0.5

        return max(itertools.product(range(len(found)), range(len(self.forms))), key=worth)

    def _patch(self, run: Run, operation: Json, units: Sequence[str], form: str) -> Json:
        bodies = [run.shelf.get((name, run.shelf.active()[name])).body for name in units]
        return {
            "role": operation["role"],
            "stage": operation["stage"],
            "units": list(units),
            "combination": combination(units),
            "form": form,
            "tokens": sum(body["tokens"] for body in bodies),
        }

    # Rounds.

    def freeze(self, run: Run) -> None:
        """From here on the memory is read as it is now."""
        self.frozen, self.grown = self._snapshot(run), {}

    def _snapshot(self, run: Run) -> str:
        table = [[*key, *value] for key, value in sorted(self.cells.items())]
        links = [[*key, *dataclasses.astuple(link)] for key, link in sorted(self.links.items())]
        return digest([run.shelf.active(), sorted(self.utility.items()), links, table])[:16]

    def _episode(self, run: Run, task: str, patches: Sequence[Json], moment: str) -> Episode:
        active = run.shelf.active()
        names = sorted({name for patch in patches for name in patch["units"]})
        how = {"patches": list(patches), "snapshot": self.frozen}
        return Episode(task, tuple((name, active[name]) for name in names), moment, how=how)

    def propose(self, run: Run, round: int) -> list[Episode]:
        """Tasks under the coupler's patches; at first, each task under every cell."""
        if not round:
            self._remember(run, run.world.units(), 0)
        calibrates = not round and self.calibration
        count = self.calibration if calibrates else self.tasks
        tasks = run.draws("tasks", round).choice(run.splits["train"], count, replace=False)
        moment, plan = f"round-{round}", []
        self.freeze(run)
        for number, task in enumerate(tasks.tolist()):
            operations = run.world.operations(run.world.task(task))
            if not calibrates:
                plan.append(
                    self._episode(
                        run, task, self.choose(run, operations, self.coupler, self.kappa), moment
                    )
                )
                continue
            found = [self.candidates(run, operation) for operation in operations]
            cells = list(itertools.product(range(min(map(len, found))), range(len(self.forms))))
            for shift in range(len(cells)):
                # Every stage goes through all cells on each task; which meet changes from task to
                # task, so that no stage's cell is tied to another's.
                picks = [
                    cells[(shift + stage * number) % len(cells)] for stage in range(len(found))
                ]
                patches = [
                    self._patch(run, operation, rows[c], self.forms[f])
                    for operation, rows, (c, f) in zip(operations, found, picks, strict=True)
                ]
                plan.append(self._episode(run, task, patches, moment))
        return plan

    def act(self, run: Run, round: int, plan: list[Episode]) -> list[Json]:
        """Run them."""
        return run.act(f"round-{round}", plan)

    def learn(self, run: Run, round: int, plan: list[Episode], outcomes: list[Json]) -> None:
        """Feedback to what was used; new units; measures; after the last round, the trial."""
        credited = []
        for place, (episode, trace) in enumerate(zip(plan, outcomes, strict=True)):
            pins = dict(episode.artefacts)
            for stage, patch in enumerate(episode.how["patches"]):
                gain = trace["score"] if self.returns == "common" else trace["stages"][stage]
                used = trace["used"][stage]
                self._feedback(patch, used, gain)
                credited += [(f"round-{round}", place, (name, pins[name])) for name in used]
        names = sorted(self.utility)
        run.learn(
            f"feedback-{round}",
            [f"round-{round}"],
            credited,
            U=np.array([self.utility[name] for name in names]),
            n=np.array([self.seen[name] for name in names], np.int64),
            Q=np.array([self.cells[cell] for cell in sorted(self.cells)]).reshape(-1, 2),
        )
        for number in range(self.extracted):
            payload = {"number": round * self.extracted + number, "trace": outcomes[number]}
            reply = run.call("extract", payload, f"extract-{round}-{number}")
            self._remember(run, reply["units"], round)
        self._measure(run, round)

    def _feedback(self, patch: Json, used: Sequence[str], gain: float) -> None:
        for name in used:
            self.utility[name] = (1 - self.eta) * self.utility.get(name, 0.0) + self.eta * gain
            self.seen[name] = self.seen.get(name, 0) + 1
        for pair in itertools.combinations(sorted(used), 2):
            if pair in self.links:
                link = self.links[pair]
                weight = (1 - self.eta) * link.weight + self.eta * gain
                self.links[pair] = Link(link.kind, weight, link.count + 1)
        cell = (patch["role"], patch["stage"], patch["combination"], patch["form"])
        q, n = self.cells.get(cell, (0.0, 0))
        self.cells[cell] = (q + (gain - q) / (n + 1), n + 1)

    def _remember(self, run: Run, units: Sequence[Json], round: int) -> None:
        """New units, related to those of their role and stage."""
        for unit in units:
            where = {"role": unit["body"]["role"], "stage": unit["body"]["stage"]}
            old = self._fitting(run, where)
            words: Any = {"operator": "remember", "round": round, "trigger": unit["trigger"]}
            pin = run.offer(unit["name"], unit.get("text", ""), unit["body"], **words)
            if pin is None:
                continue
            run.try_in(pin, "ungated", {}, {})
            for other in old:
                one = {"text": unit.get("text", ""), "body": unit["body"]}
                known = run.shelf.get((other, run.shelf.active()[other]))
                payload = {"one": one, "other": {"text": known.text, "body": known.body}}
                kind = run.call("relate", payload, f"{label(pin)}/{other}")["kind"]
                if kind != "none" and other != pin[0]:
                    self.links[min(pin[0], other), max(pin[0], other)] = Link(kind)

    def _measure(self, run: Run, round: int) -> None:
        tasks, world = run.splits[HELD_OUT][: self.held_out], run.world
        self.freeze(run)
        plan = []
        for task in tasks:
            operations = world.operations(world.task(task))
            patches = self.choose(run, operations, self.coupler, 0.0)
            plan.append(self._episode(run, task, patches, f"held-{round}"))
        traces = run.act(f"held-{round}", plan)
        numbers = {
            "held_out/score": float(np.mean([trace["score"] for trace in traces])),
            "memory/units": len(run.shelf.active()),
            "memory/cells": len(self.cells),
        }
        run.records["links.json"] = [
            [*key, *dataclasses.astuple(link)] for key, link in sorted(self.links.items())
        ]
        if round == self.rounds - 1 and self.trial:
            numbers["trial/claimed"] = float(self._trial(run))
        run.measure(round, numbers)

    def _trial(self, run: Run) -> bool:
        """The coupler's choice against the separate one, on the same fresh tasks."""
        tasks = run.draws("trial").choice(run.splits["train"], self.trial, replace=False).tolist()
        plan = []
        for coupler in ("separate", self.coupler):
            for task in tasks:
                operations = run.world.operations(run.world.task(task))
                patches = self.choose(run, operations, coupler, 0.0)
                plan.append(self._episode(run, task, patches, "trial"))
        scores = [trace["score"] for trace in run.act("trial", plan)]
        evidence = {"old": scores[: self.trial], "new": scores[self.trial :]}
        name = f"{self.coupler}-over-separate"
        parameters = {"noise": self.noise}
        return run.gate(name, "calibrated_mean", evidence, parameters, operator="trial").accepted
