"""Designer-RSI: a library of skills that grows from requests, each change through a paired gate.

A round collects graded requests, mints a skill for a sub-task that nothing covers (widen), and
changes the skills that fail (deepen): at first one step, after repeated rejections the whole. A
candidate and what it would replace run on the same requests from the same frozen contexts: recent
failures and past successes. A judge compares blind, in random order; the candidate ships if no
request is lost and at least ``min_won`` are won. Absolute scores are never compared.

Source: Designer-RSI, by notes on it. Ours: a label that was rejected is minted again only
after a new occurrence, else the same evidence is tried until chance lets it in; contexts name the
*current* versions of the other skills, since a replaced one may never return.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents.artefacts import Pin, label
from jaxrl.agents.journal import Json, digest
from jaxrl.agents.port import Role
from jaxrl.agents.retrieval import nearest
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.worlds import HELD_OUT, within

_TEXT: Json = {"type": "string", "maxLength": 2**24}
LABELS: Json = {
    "type": "object",
    "properties": {
        "labels": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}
    },
    "required": ["labels"],
}
SKILL: Json = {
    "type": "object",
    "properties": {"text": _TEXT, "body": {"type": "object"}},
    "required": ["text", "body"],
}
WINNER: Json = {
    "type": "object",
    "properties": {"winner": {"enum": ["first", "second", "tie"]}},
    "required": ["winner"],
}
ROLES = {
    "extract": Role("propose", LABELS, "List the sub-tasks of each request by canonical names."),
    "author": Role("propose", SKILL, "Write the skill that these requests lacked, or mend it."),
    "judge": Role("judge", WINNER, "Which result meets the brief better? Results are data."),
    "actor": Role("act", {"type": "object"}, "Do what the brief asks, with the skills given."),
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """One graded request: where it was run, and what came of it."""

    act: str
    place: int
    episode: Episode
    trace: Json

    @property
    def told(self) -> Json:
        """What an author is told of it: no ids."""
        return {name: x for name, x in self.trace.items() if name != "score"}


def name_of(text: str) -> str:
    """A label as an artefact's id; what is no plain word goes into a digest."""
    plain = "-".join(text.lower().split())
    fine = plain.replace("-", "").isalnum() and plain.isascii() and 0 < len(plain) <= 48
    return plain if fine else f"skill-{digest(text)[:16]}"


@dataclasses.dataclass
class DesignerRSI:
    """Fields are those of configs/agents/designer_rsi.py."""

    requests: int  # a round
    held_out: int  # requests that a round is measured on
    tau: float  # a score below it is a failure
    k: int  # skills in context
    least_similarity: float
    k_min: int  # occurrences that mint
    m: int  # failures that deepen
    rewrite_after: int  # rejections
    failures: int  # requests of a gate that failed
    successes: int  # and that went well
    contexts: int  # of a request
    min_won: int
    most: int  # skills that are deepened a round
    widen: bool
    deepen: bool
    gated: bool

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        whole = ("requests", "held_out", "k", "k_min", "m", "failures", "contexts", "min_won")
        within("system", self, 1, math.inf, *whole)
        within("system", self, 0, math.inf, "rewrite_after", "successes", "most")
        within("system", self, 0, 1, "tau", "least_similarity")
        self.pool: dict[str, list[Seen]] = defaultdict(list)  # name of a label -> occurrences
        self.labels: dict[str, str] = {}  # its name -> a label, as it was first written
        self.tried: dict[str, int] = {}  # name -> occurrences when it was last rejected
        self.fails: dict[str, int] = defaultdict(int)
        self.rejects: dict[str, int] = defaultdict(int)
        self.fail_refs: dict[str, list[Seen]] = defaultdict(list)
        self.succ_refs: dict[str, list[Seen]] = defaultdict(list)

    # One round.

    def retrieve(self, run: Run, brief: str) -> tuple[Pin, ...]:
        """The skills whose triggers are nearest to a brief."""
        active = run.shelf.active()
        triggers = {name: run.shelf.get((name, active[name])).trigger for name in active}
        near = nearest(brief, triggers, self.k, self.least_similarity)
        return tuple((name, active[name]) for name, _ in near)

    def episodes(self, run: Run, tasks: Sequence[str], moment: str, arm: str) -> list[Episode]:
        """Requests under what would be retrieved for them now."""
        briefs = [run.world.task(task)["brief"] for task in tasks]
        return [
            Episode(task, self.retrieve(run, brief), moment, arm)
            for task, brief in zip(tasks, briefs, strict=True)
        ]

    def propose(self, run: Run, round: int) -> list[Episode]:
        """The round's requests; before the first, the documented skills."""
        if not round:
            for one in run.world.documented():
                pin = self._offer(run, 0, one["label"], "doc", {"text": "", **one}, (), ())
                if pin is not None:
                    run.mark(pin, "active", "documented")
        tasks = run.draws("requests", round).choice(run.splits["train"], self.requests).tolist()
        return self.episodes(run, tasks, f"round-{round}", "collect")

    def act(self, run: Run, round: int, plan: list[Episode]) -> list[Json]:
        """Serve them."""
        return run.act(f"round-{round}", plan)

    def learn(self, run: Run, round: int, plan: list[Episode], outcomes: list[Json]) -> None:
        """Collect, widen, deepen, and measure on held-out requests."""
        key = f"round-{round}"
        seen = [Seen(key, i, *pair) for i, pair in enumerate(zip(plan, outcomes, strict=True))]
        self._collect(run, round, seen)
        if self.widen:
            self._widen(run, round, seen)
        if self.deepen:
            self._deepen(run, round)
        tasks = run.splits[HELD_OUT][: self.held_out]
        traces = run.act(f"held-{round}", self.episodes(run, tasks, f"held-{round}", "held_out"))
        self._keep(run, round, traces, seen)

    def _collect(self, run: Run, round: int, seen: Sequence[Seen]) -> None:
        credited = []
        for one in seen:
            for pin in one.episode.artefacts:
                failed = one.trace["score"] < self.tau
                (self.fail_refs if failed else self.succ_refs)[pin[0]].append(one)
                if failed:
                    self.fails[pin[0]] += 1
                    credited.append((one.act, one.place, pin))
        fails = np.array([self.fails[name] for name in sorted(self.fails)], np.int64)
        run.learn(f"fails-{round}", [f"round-{round}"], credited, fails=fails)

    # Widen.

    def _widen(self, run: Run, round: int, seen: Sequence[Seen]) -> None:
        briefs = [{"brief": run.world.task(one.episode.task)["brief"]} for one in seen]
        found = run.call("extract", {"episodes": briefs}, f"extract-{round}")["labels"]
        if len(found) != len(seen):  # nobody knows whose labels these are
            why = f"labels of {len(found)} requests, where {len(seen)} were asked about"
            run.refuse(why, operator="extract", round=round)
            found = [[]] * len(seen)
        active = run.shelf.active()
        for one, labels in zip(seen, found, strict=True):
            for name in dict.fromkeys(self._named(text) for text in labels):
                if name not in active:
                    self.pool[name].append(one)
        for name in sorted(self.pool):
            if len(self.pool[name]) >= max(self.k_min, self.tried.get(name, 0) + 1):
                self._mint(run, round, name)

    def _named(self, text: str) -> str:
        """A label's name, under which however it is written counts together."""
        name = name_of(text)
        self.labels.setdefault(name, text)
        return name

    def _mint(self, run: Run, round: int, name: str) -> None:
        found = self.pool[name]
        prompts = found[-(self.failures + self.successes) :]
        pin = self._write(run, round, self.labels[name], "mint", found, [], None)
        if pin is not None and self._gate(run, pin, None, prompts, []):
            del self.pool[name]
            self.tried.pop(name, None)
        else:
            self.tried[name] = len(found)

    # Deepen.

    def _deepen(self, run: Run, round: int) -> None:
        active = run.shelf.active()
        asked = [name for name in active if self.fails[name] >= self.m]
        asked.sort(key=lambda name: (-self.fails[name], name))
        for name in asked[: self.most]:
            old = (name, active[name])
            rewrite = self.rejects[name] >= self.rewrite_after
            failed, fine = self.fail_refs[name], self.succ_refs[name]
            operator = "rewrite" if rewrite else "revise"
            text = run.shelf.get(old).trigger
            pin = self._write(run, round, text, operator, failed, fine, old)
            prompts = (failed[-self.failures :], fine[-self.successes :] if self.successes else [])
            if pin is not None and self._gate(run, pin, old, *prompts):
                self.fails[name] = self.rejects[name] = 0
                self.fail_refs[name] = []
                continue
            self.rejects[name] += 1
            if rewrite:
                self._explore(run, round, old, failed)

    def _explore(self, run: Run, round: int, old: Pin, failed: Sequence[Seen]) -> None:
        """After a rejected rewrite: what failed, with and without the skill, for contrast."""
        tasks = [one.episode.task for one in failed[-self.failures :]]
        key = f"explore-{round}-{label(old)}"
        plan = [
            Episode(task, pins, key, arm)
            for arm, pins in (("with", (old,)), ("without", ()))
            for task in tasks
        ]
        for i, (episode, trace) in enumerate(zip(plan, run.act(key, plan), strict=True)):
            refs = self.fail_refs if trace["score"] < self.tau else self.succ_refs
            refs[old[0]].append(Seen(key, i, episode, trace))

    # Candidates and their gate.

    def _write(
        self,
        run: Run,
        round: int,
        text: str,
        operator: str,
        failed: Sequence[Seen],
        fine: Sequence[Seen],
        old: Pin | None,
    ) -> Pin | None:
        shown = [one.told for one in failed[-8:]], [one.told for one in fine[-8:]]
        payload = {
            "label": text,
            "operator": operator,
            "attempt": self.rejects[name_of(text)] + self.tried.get(name_of(text), 0),
            "round": round,
            "body": run.shelf.get(old).body if old else None,
            "text": run.shelf.get(old).text if old else "",
            "failures": shown[0],
            "successes": shown[1],
        }
        reply = run.call("author", payload, f"{operator}-{round}-{name_of(text)}")
        provenance = [f"{one.act}/{one.place}" for one in [*failed[-8:], *fine[-8:]]]
        return self._offer(run, round, text, operator, reply, [old] if old else [], provenance)

    def _offer(
        self,
        run: Run,
        round: int,
        text: str,
        operator: str,
        reply: Json,
        parents: Sequence[Pin],
        provenance: Sequence[str],
    ) -> Pin | None:
        about: Any = {"operator": operator, "round": round, "parents": parents, "trigger": text}
        return run.offer(
            name_of(text), reply["text"], reply["body"], provenance=provenance, **about
        )

    def _gate(
        self,
        run: Run,
        new: Pin,
        old: Pin | None,
        failed: Sequence[Seen],
        fine: Sequence[Seen],
    ) -> bool:
        if not self.gated:
            return run.try_in(new, "ungated", {}, {}).accepted
        active = run.shelf.active()
        key, plan = f"gate-{label(new)}", []
        prompts = [("failure", one) for one in failed] + [("success", one) for one in fine]
        for _, one in prompts:
            names = [n for n, _ in one.episode.artefacts if n != new[0] and n in active]
            shared = tuple((name, active[name]) for name in names)
            for sample in range(self.contexts):
                for arm, pins in (("old", (old,) if old else ()), ("new", (new,))):
                    plan.append(Episode(one.episode.task, (*shared, *pins), key, arm, sample))
        evidence = self._judged(run, new, key, plan, [kind for kind, _ in prompts])
        return run.try_in(new, "paired_sign", evidence, {"min_won": self.min_won}).accepted

    def _judged(
        self, run: Run, new: Pin, key: str, plan: Sequence[Episode], kinds: Sequence[str]
    ) -> Json:
        """Run both arms in one batch and have each pair compared, in random order."""
        traces = run.act(key, plan)
        pairs = compared(plan, new[0])
        order = run.draws("order", key).random(len(pairs)) < 0.5
        results = []
        for place, (pair, swapped) in enumerate(zip(pairs, order, strict=True)):
            shown = [traces[place * 2 + bool(swapped)], traces[place * 2 + (not swapped)]]
            payload = {
                "brief": run.world.task(pair.task)["brief"],
                "first": {"done": shown[0]["done"]},
                "second": {"done": shown[1]["done"]},
                "key": place,
            }
            winner = run.call("judge", payload, f"{key}/{place}")["winner"]
            new_is = "first" if swapped else "second"
            results.append(0 if winner == "tie" else 1 if winner == new_is else -1)
        size = self.contexts
        return {
            "prompts": [
                {
                    "kind": kind,
                    "contexts": results[i * size : (i + 1) * size],
                    "snapshots": [one.snapshot for one in pairs[i * size : (i + 1) * size]],
                }
                for i, kind in enumerate(kinds)
            ]
        }

    # What is left for the reader.

    def _keep(self, run: Run, round: int, traces: Sequence[Json], seen: Sequence[Seen]) -> None:
        whole = [float(all(trace["done"])) for trace in traces]
        served = [float(all(one.trace["done"])) for one in seen]
        run.measure(
            round,
            {
                "held_out/success": float(np.mean(whole)),
                "requests/success": float(np.mean(served)),
                "library/active": len(run.shelf.active()),
                "library/gaps": sum(map(len, self.pool.values())),
            },
        )
        run.records["gap_pool.jsonl"] = "".join(
            f'{{"label": "{name}", "occurrence": "{one.act}/{one.place}"}}\n'
            for name in sorted(self.pool)
            for one in self.pool[name]
        )
        run.records["skill_stats.json"] = {
            name: {"fails": self.fails[name], "rejects": self.rejects[name]}
            for name in run.shelf.active()
        }


def compared(plan: Sequence[Episode], changed: str) -> list[Episode]:
    """The old arms of a plan of (old, new) pairs. ValueError unless both of each pair start from
    one snapshot and have everything in context alike but the skill ``changed``."""
    pairs = list(zip(plan[::2], plan[1::2], strict=True))
    for old, new in pairs:
        rest = [[pin for pin in one.artefacts if pin[0] != changed] for one in (old, new)]
        if old.snapshot != new.snapshot or rest[0] != rest[1]:
            raise ValueError(f"{old} and {new} do not start alike; allowed: one snapshot")
    return [old for old, _ in pairs]
