"""ArenaFlow's memory: skills earn utility where a judge says that they decided a comparison.

All rollouts of a query have the same skills in context. A tournament ranks them; each comparison
names the winner's decisive steps and the skills it used there. With c_h the times that skill h was
named, z_h = (c_h - mean c) / sd c over the skills in context (0 where they do not differ), n_h += 1
and U_h += (z_h - U_h) / n_h. Retrieval adds w U_h to the similarity. The champion's lessons become
a skill: a new version of the nearest one if that is near, else a new one.

z is centred inside the context, so somebody always falls below zero: pruning by U_h < 0, as it is
published, empties a library of *identical* skills. Here U_h + ``margin`` x standard error < 0 is
asked (margin 0: the published rule), and the library has a least size. Ours too: a new version
starts with its parent's U as if it had been seen twice.

Source: ArenaFlow, arXiv 2609.21378, by notes on it. Departs: a pair is asked in both orders
(jaxrl/tasks/arena.py), so a group of 16 takes 60 calls instead of 30.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents.artefacts import Pin, label
from jaxrl.agents.journal import Json
from jaxrl.agents.port import Role
from jaxrl.agents.retrieval import nearest
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.worlds import HELD_OUT, within
from jaxrl.tasks import arena

INHERITED = 2.0  # how often a new version counts as seen, with its parent's utility

_NUMBERS: Json = {"type": "array", "items": {"type": "number"}}
_PLACES: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
COMPARED: Json = {
    "type": "object",
    "properties": {
        "scores": {**_NUMBERS, "minItems": 2, "maxItems": 2},
        "pivotal": _PLACES,
        "used": _PLACES,
        "lesson": {"type": "string"},
    },
    "required": ["scores", "pivotal", "used", "lesson"],
}
MERGED: Json = {
    "type": "object",
    "properties": {
        "trigger": {"type": "string"},
        "text": {"type": "string"},
        "body": {"type": "object"},
    },
    "required": ["trigger", "text", "body"],
}
ROLES = {
    "compare": Role(
        "judge",
        COMPARED,
        "Score both; name the winner's decisive steps and the skills (by place) it used in them.",
    ),
    "merge": Role("propose", MERGED, "Make one skill of these lessons."),
}


@dataclasses.dataclass
class Utility:
    """What is known of one version: its readings of z, and what it inherited (count, mean)."""

    readings: list[float] = dataclasses.field(default_factory=list)
    prior: tuple[float, float] = (0.0, 0.0)

    @property
    def mean(self) -> float:
        """U: 0 before anything is known."""
        count, mean = self.prior
        whole = len(self.readings) + count
        return (sum(self.readings) + count * mean) / whole if whole else 0.0


def centred(counts: Sequence[float]) -> np.ndarray:
    """z over the skills in context: the mean taken off, in standard deviations (of the population);
    all 0 where they do not differ."""
    array = np.asarray(counts, float)
    spread = array.std()
    return (array - array.mean()) / spread if spread > 1e-12 else np.zeros_like(array)


class _Judge:
    """Asks the role ``compare`` for a tournament, and counts the skills that winners used."""

    def __init__(self, run: Run, key: str, brief: str, traces: Sequence[Json]) -> None:
        self._run, self._key, self._brief, self._traces = run, key, brief, traces
        self.named: Counter[int] = Counter()  # place of a skill -> how often winners used it
        self.lessons: list[str] = []

    def compare(self, first: int, second: int, attempt: int) -> arena.Opinion:
        """One question, in this order."""
        shown = [
            {name: x for name, x in self._traces[player].items() if name != "score"}
            for player in (first, second)
        ]
        payload = {"brief": self._brief, "first": shown[0], "second": shown[1]}
        reply = self._run.call("compare", payload, f"{self._key}/{len(self.lessons)}")
        self.named.update(reply["used"])
        self.lessons.append(reply["lesson"])
        return arena.Opinion((reply["scores"][0], reply["scores"][1]), reply["pivotal"])


@dataclasses.dataclass
class ArenaMemory:
    """Fields are those of configs/agents/arena_memory.py."""

    groups: int  # queries a round
    rollouts: int  # of a query
    held_out: int
    k: int
    weight: float  # of the utility in retrieval
    recall: int  # skills that are near enough to be scored
    topology: str
    use_library: bool
    mint: bool
    delta: float  # cosine from which a lesson replaces the nearest skill
    prune: bool
    least_seen: int  # readings before a version may be pruned
    margin: float  # standard errors; 0: the published rule
    least_size: int  # of the library

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        if self.topology not in arena.TOPOLOGIES:
            allowed = ", ".join(arena.TOPOLOGIES)
            raise ValueError(f"system.topology={self.topology!r}; allowed: {allowed}")
        within("system", self, 2, math.inf, "rollouts")
        within("system", self, 1, math.inf, "groups", "held_out", "k", "recall")
        within("system", self, 0, math.inf, "weight", "least_seen", "margin", "least_size")
        within("system", self, 0, 1, "delta")
        self.known: dict[Pin, Utility] = {}

    def retrieve(self, run: Run, brief: str) -> tuple[Pin, ...]:
        """The ``recall`` nearest; of these the ``k`` of most similarity plus weight x utility."""
        if not self.use_library:
            return ()
        active = run.shelf.active()
        triggers = {name: run.shelf.get((name, active[name])).trigger for name in active}
        near = nearest(brief, triggers, self.recall, 0.0)
        worth = {name: self.weight * self._utility((name, active[name])).mean for name, _ in near}
        best = sorted(near, key=lambda pair: (-pair[1] - worth[pair[0]], pair[0]))[: self.k]
        return tuple((name, active[name]) for name, _ in best)

    def _utility(self, pin: Pin) -> Utility:
        return self.known.get(pin, Utility())

    def propose(self, run: Run, round: int) -> list[Episode]:
        """Groups of rollouts; before the first, the library that there is."""
        if not round:
            for one in run.world.library():
                words: Any = {"operator": "doc", "round": 0, "trigger": one["trigger"]}
                pin = run.offer(one["name"], one["trigger"] + "\n", one["body"], **words)
                if pin is not None:
                    run.mark(pin, "active", "documented")
        tasks = run.draws("queries", round).choice(run.splits["train"], self.groups, replace=False)
        return [
            Episode(task, pins, f"round-{round}", "rollout", sample)
            for task in tasks.tolist()
            for pins in [self.retrieve(run, run.world.task(task)["brief"])]
            for sample in range(self.rollouts)
        ]

    def act(self, run: Run, round: int, plan: list[Episode]) -> list[Json]:
        """Roll out."""
        return run.act(f"round-{round}", plan)

    def learn(self, run: Run, round: int, plan: list[Episode], outcomes: list[Json]) -> None:
        """A tournament for each query, then utilities, lessons and pruning."""
        size = self.rollouts
        for group in range(self.groups):
            part = slice(group * size, (group + 1) * size)
            self._group(run, round, group, plan[part], outcomes[part])
        if self.prune:
            self._prune(run, round)
        self._measure(run, round)

    def _group(
        self, run: Run, round: int, group: int, plan: Sequence[Episode], traces: Sequence[Json]
    ) -> None:
        key, (first, *rest) = f"{round}/{group}", plan
        if any(one.artefacts != first.artefacts for one in rest):
            raise ValueError(f"group {key}: its rollouts saw different skills")
        brief = run.world.task(first.task)["brief"]
        judge = _Judge(run, key, brief, traces)
        outcome = arena.hold(
            judge,
            dict.fromkeys(range(len(plan)), True),
            topology=self.topology,
            swiss_rounds=4,
            seed=int(run.draws("lots", key).integers(2**31)),
            replays=0,
        )
        run.records[f"tournaments/{round}-{group}.json"] = {
            "rank": [outcome.rank[player] for player in range(len(plan))],
            "calls": outcome.calls,
            "named": [judge.named[place] for place in range(len(first.artefacts))],
        }
        if first.artefacts:
            counts = [judge.named[place] for place in range(len(first.artefacts))]
            self._update(run, round, group, first.artefacts, counts)
        if self.mint and outcome.champion is not None:
            self._lesson(run, round, group, brief, first.artefacts, traces[outcome.champion], judge)

    def _update(
        self, run: Run, round: int, group: int, pins: Sequence[Pin], counts: Sequence[int]
    ) -> None:
        z = centred(counts)
        if z.any():  # a tie says nothing
            for pin, value in zip(pins, z.tolist(), strict=True):
                self.known.setdefault(pin, Utility()).readings.append(value)
        shown = [self.known[pin] for pin in sorted(self.known)]
        table = np.array([[u.mean, len(u.readings)] for u in shown]).reshape(-1, 2)
        place = group * self.rollouts
        credited = [(f"round-{round}", place, pin) for pin in pins]
        run.learn(f"utility-{round}-{group}", [f"round-{round}"], credited, utility=table)

    def _lesson(
        self,
        run: Run,
        round: int,
        group: int,
        brief: str,
        pins: Sequence[Pin],
        champion: Json,
        judge: _Judge,
    ) -> None:
        used = sorted({place for step in champion["used"] for place in step})
        about = [{"text": s.text, "body": s.body} for s in (run.shelf.get(pins[p]) for p in used)]
        payload = {"brief": brief, "lessons": judge.lessons, "about": about, "group": group}
        reply = run.call("merge", payload, f"{round}/{group}")
        active = run.shelf.active()
        triggers = {name: run.shelf.get((name, active[name])).trigger for name in active}
        near = nearest(reply["trigger"], triggers, 1, self.delta)
        name = near[0][0] if near else f"lesson-{round:03d}-{group:02d}"
        parents = [(name, active[name])] if near else []
        words: Any = {"operator": "merge", "round": round, "trigger": reply["trigger"]}
        pin = run.offer(name, reply["text"], reply["body"], parents=parents, **words)
        if pin is None:
            return
        run.try_in(pin, "ungated", {}, {})
        for parent in parents:
            if parent in self.known:
                self.known[pin] = Utility([], (INHERITED, self.known[parent].mean))

    def _prune(self, run: Run, round: int) -> None:
        for name, version in run.shelf.active().items():
            pin = (name, version)
            known = self._utility(pin)
            if len(known.readings) < self.least_seen or known.mean >= 0:
                continue
            if len(run.shelf.active()) <= self.least_size:
                continue
            evidence = {"readings": known.readings, "prior": list(known.prior)}
            parameters = {"margin": self.margin}
            where = f"{label(pin)}-prune-{round}"
            decision = run.gate(where, "below_zero", evidence, parameters, operator="prune")
            if decision.accepted:
                run.mark(pin, "pruned", decision.reason)

    def _measure(self, run: Run, round: int) -> None:
        tasks = run.splits[HELD_OUT][: self.held_out]
        plan = [
            Episode(task, self.retrieve(run, run.world.task(task)["brief"]), f"held-{round}")
            for task in tasks
        ]
        traces = run.act(f"held-{round}", plan)
        run.measure(
            round,
            {
                "held_out/score": float(np.mean([trace["score"] for trace in traces])),
                "library/active": len(run.shelf.active()),
            },
        )
