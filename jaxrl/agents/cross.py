"""Harness Evolution: say what failed, edit the harness through a gate, then ask what weights can
take over.

Failed episodes are labelled by predicates on their traces: F1 evidence was not shown, F2 the
harness refused, F3 control was lost (loops, budget), F4 what was to be delivered is wrong. All that
fire are kept. The first in order is what the paper reports, and it is a competing risk: mending F2
and F3 lets F4 grow although no answer became worse. An episode that failed for reasons of its own
has no label.

An edit runs on the development questions together with the incumbent, measured anew, and is
accepted if its gain is above the noise: half the width of 95 % of what two measurements of one and
the same harness differ by.

At last: weights tuned on passed trajectories of the evolved harness, the 2x2 of harness and weights
on held-out questions, with the seed's cell measured twice, and two controls: answers shuffled among
the same prompts, and trajectories of the seed harness, as many tokens.

Source: Harness Evolution, by notes on it. Ours: what a harness refused is left out of a trajectory
before it is imitated, so that the accepted call follows the question as it will have to without the
harness.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.agents.artefacts import Pin
from jaxrl.agents.journal import Json
from jaxrl.agents.port import Role
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.worlds import HELD_OUT
from jaxrl.evaluate import interval
from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.rollout import ACTION, NOT_SAMPLED, PROMPT, Failure, Rollout, StopReason
from jaxrl.pool.spool import SUFFIX, Writer

EDIT: Json = {
    "type": "object",
    "properties": {"change": {"type": "object"}},
    "required": ["change"],
}
ROLES = {
    "edit": Role("propose", EDIT, "Propose one change of the harness that mends what fails most."),
    "actor": Role("act", {"type": "object"}, "Answer by a call."),
}

PREDICATES: Mapping[str, Callable[[Json], bool]] = {  # in the order of the first match
    "F1": lambda trace: not set(trace["needed"]) <= set(trace["shown"]),
    "F2": lambda trace: trace["refused"],
    "F3": lambda trace: trace["budget_out"],
    "F4": lambda trace: trace["wrong"],
}
# All that a harness may hold, and what of it. What is not here cannot be reached by an edit.
PAGES = ("page-1", "page-2")
SWITCHES = ("repair", "guard")
LONGEST_NOTE = 2000
RERUNS = 3  # of episodes that failed for reasons of their own


def fired(trace: Json) -> list[str]:
    """The labels of a failed episode, in order; none for one that passed, or that broke."""
    if trace["failure"] or trace["score"] == 1:
        return []
    return [name for name, holds in PREDICATES.items() if holds(trace)]


def shares(traces: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Of all episodes that did not break: how many have each label first, and at all."""
    found = [fired(trace) for trace in traces if not trace["failure"]]
    count = max(len(found), 1)
    return {
        "first": {n: sum(labels[:1] == [n] for labels in found) / count for n in PREDICATES},
        "fired": {n: sum(n in labels for labels in found) / count for n in PREDICATES},
    }


def refusal(change: Mapping[str, Any]) -> str:
    """Why a change may not be tried; "" if it may. A harness is data: pages, switches, a note."""
    for field, value in change.items():
        if field == "pages":
            if not isinstance(value, list) or not value or not set(map(str, value)) <= set(PAGES):
                return f"pages={value!r}; allowed: some of {PAGES}"
        elif field in SWITCHES:
            if not isinstance(value, bool):
                return f"{field}={value!r}; allowed: true, false"
        elif field == "note":
            if not isinstance(value, str) or len(value) > LONGEST_NOTE:
                return f"note; allowed: at most {LONGEST_NOTE} characters"
        else:
            return f"field {field[:40]!r}; allowed: pages, {', '.join(SWITCHES)}, note"
    return "" if change else "no change"


def aa_noise(scores: np.ndarray, seed: np.random.Generator, draws: int = 1000) -> float:
    """Half the width that holds 95 % of the differences of an A/A comparison: [task, 2 r] scores of
    one harness, each task's split at random into two times r, means compared."""
    half = scores.shape[1] // 2
    mixed = seed.permuted(np.broadcast_to(scores, (draws, *scores.shape)), axis=2)
    gaps = mixed[..., :half].mean((1, 2)) - mixed[..., half : 2 * half].mean((1, 2))
    return float(np.quantile(np.abs(gaps), 0.95))


def whole(scores: np.ndarray) -> np.ndarray:
    """[arm, task, repeat] without the tasks that lack a score in any arm. ValueError if none is
    left."""
    kept = scores[:, np.isfinite(scores).all((0, 2))]
    if not kept.shape[1]:
        raise ValueError("every question lacks a score in some arm; allowed: one measured in all")
    return kept


def examples_of(traces: Sequence[Json]) -> list[Json]:
    """What to imitate of the episodes that passed: the question, and what of the model's words the
    harness accepted."""
    return [
        {
            "prompt": "".join(s["text"] for s in trace["spans"] if s["kind"] != "model"),
            "said": "".join(
                s["text"] for s in trace["spans"] if s["kind"] == "model" and s["accepted"]
            ),
        }
        for trace in traces
        if trace["score"] == 1
    ]


def shuffled(examples: Sequence[Json], chance: np.random.Generator) -> list[Json]:
    """The same prompts and the same answers, each at another's place."""
    order = chance.permutation(len(examples))
    return [
        {**one, "said": examples[i]["said"]}
        for one, i in zip(examples, order.tolist(), strict=True)
    ]


def matched(examples: Sequence[Json], most: int) -> list[Json]:
    """As many characters of what was said as ``most``, from the start again where they run out."""
    found: list[Json] = []
    said = 0
    while examples and said < most:
        found.append(examples[len(found) % len(examples)])
        said += len(found[-1]["said"])
    return found


def rollout_of(example: Json, number: int, tokenizer: Tokenizer, run_id: str) -> Rollout:
    """An example as a record for supervised training: the prompt, then what was said and the end as
    actions, which alone carry loss."""
    prompt = list(tokenizer.prompt(example["prompt"]))
    said = [*tokenizer.encode(example["said"]), tokenizer.eos_id]
    length = len(prompt) + len(said)
    return Rollout(
        run_id=run_id,
        group_id=number,
        sample=0,
        attempt=0,
        task_key=str(number),
        content_hash=str(number),
        split="train",
        source="harness_evolution",
        tokens=np.array([*prompt, *said], np.uint32),
        kind=np.array([PROMPT] * len(prompt) + [ACTION] * len(said), np.uint8),
        step=np.array([-1] * len(prompt) + [0] * len(said), np.int32),
        logp=np.zeros(length, np.float32),
        version_index=np.full(length, NOT_SAMPLED, np.uint16),
        temperature=np.ones(length, np.float32),
        versions=(),
        reward=1.0,
        reward_components={},
        correct=True,
        stop_reason=StopReason.STOP,
        failure=Failure.NONE,
        text=example["said"],
        facts={"demonstration": True},
        times={},
    )


def record(examples: Sequence[Json], tokenizer: Tokenizer, folder: Path, run_id: str) -> Path:
    """Write examples where a run of the ``sft`` algorithm with pool.kind="recorded" reads them;
    the file. ValueError for none."""
    if not examples:
        raise ValueError("examples=[]; allowed: one that passed, or more")
    path = folder / f"examples{SUFFIX}"
    with Writer(path) as writer:
        for number, example in enumerate(examples):
            writer.append(rollout_of(example, number, tokenizer, run_id))
    return path


@dataclasses.dataclass(frozen=True)
class Cell:
    """Scores of one harness with one set of weights: [task, repeat], NaN where an episode broke."""

    tasks: tuple[str, ...]
    scores: np.ndarray

    @property
    def plain(self) -> Json:
        """The scores, None where an episode broke."""
        return [[x if np.isfinite(x) else None for x in row] for row in self.scores.tolist()]

    @property
    def mean(self) -> float:
        """Over repeats, then tasks."""
        return float(self.scores.mean(1).mean())


Cells = Mapping[tuple[str, str], Cell]  # (seed | evolved, base | trained | ...)


def two_by_two(cells: Cells, weights: str) -> dict[str, Json] | None:
    """Effects, with intervals over tasks: of the harness, what weights took over of it without it,
    what the harness still adds to them, and the interaction. None (no claim) unless the four cells
    have the same tasks and as many repeats, none missing."""
    names = [("seed", "base"), ("evolved", "base"), ("seed", weights), ("evolved", weights)]
    found = [cells[name] for name in names if name in cells]
    whole = len(found) == 4 and all(np.isfinite(cell.scores).all() for cell in found)
    alike = len({(cell.tasks, cell.scores.shape) for cell in found}) == 1
    if not (whole and alike):
        return None
    s00, s10, s01, s11 = (cell.scores.mean(1) for cell in found)
    effects = {
        "harness": s10 - s00,
        "internalised": s01 - s00,
        "residual_harness": s11 - s01,
        "interaction": s11 - s10 - s01 + s00,
    }
    return {name: interval(gap.tolist(), "t").to_json() for name, gap in effects.items()}


@dataclasses.dataclass
class HarnessEvolution:
    """Fields are those of configs/agents/harness_evolution.py. Round 0 measures A/A, then come
    ``edits`` rounds of one edit each, then one of training and of the 2x2."""

    edits: int
    repeats: int  # of a question, in each arm
    gated: bool

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        for field, least in (("edits", 0), ("repeats", 1)):
            if vars(self)[field] < least:
                raise ValueError(f"system.{field}={vars(self)[field]!r}; allowed: >= {least}")
        self.noise = 0.0
        self.labels: dict[str, dict[str, float]] = {}

    def harness(self, run: Run, which: str) -> Pin:
        """The pin of the seed, or of the one that evolves."""
        name = "harness-seed" if which == "seed" else "harness"
        return name, run.shelf.active()[name]

    def propose(self, run: Run, round: int) -> list[tuple[str, tuple[Pin, ...]]]:
        """Arms: name and what is in context."""
        if not round:
            body = {"kind": "harness", **run.world.seed_harness()}  # type: ignore[attr-defined]
            for name in ("harness-seed", "harness"):
                pin = run.offer(name, "", body, operator="doc", round=0)
                assert pin is not None
                run.mark(pin, "active", "at start")
        now = self.harness(run, "evolved")
        if not 0 < round <= self.edits:
            return [("old", (now,))]
        body = run.shelf.get(now).body
        payload = {"harness": body, "labels": self.labels, "round": round}
        change = run.call("edit", payload, f"edit-{round}")["change"]
        if why := refusal(change):
            run.refuse(f"harness: {why}", operator="edit", round=round)
            return [("old", (now,))]
        made = {**body, **change}
        words: Any = {"operator": "edit", "round": round, "parents": [now]}
        pin = run.offer("harness", str(change.get("note", "")), made, **words)
        return [("old", (now,))] + ([("new", (pin,))] if pin else [])

    def act(self, run: Run, round: int, plan: list[tuple[str, tuple[Pin, ...]]]) -> list[Cell]:
        """Every arm on the development questions, in one batch."""
        repeats = self.repeats if 0 < round <= self.edits else 2 * self.repeats
        return self.measure(run, f"dev-{round}", run.splits["dev"], dict(plan), repeats)

    def measure(
        self,
        run: Run,
        key: str,
        tasks: Sequence[str],
        arms: Mapping[str, tuple[Pin, ...]],
        repeats: int,
    ) -> list[Cell]:
        """One cell an arm, same questions and repeats; what broke is run again, a few times."""
        plan = [
            Episode(task, pins, key, arm, repeat)
            for arm, pins in arms.items()
            for task in tasks
            for repeat in range(repeats)
        ]
        traces = run.act(key, plan)
        for again in range(1, RERUNS + 1):
            broken = [i for i, trace in enumerate(traces) if trace["failure"]]
            if broken:
                fresh = run.act(f"{key}-again-{again}", [plan[i] for i in broken])
                for i, trace in zip(broken, fresh, strict=True):
                    traces[i] = trace
        self.traces = dict(
            zip(arms, np.array(traces, object).reshape(len(arms), -1).tolist(), strict=True)
        )
        scores = np.array([np.nan if t["failure"] else t["score"] for t in traces])
        table = scores.reshape(len(arms), len(tasks), repeats)
        return [Cell(tuple(tasks), cell) for cell in table]

    def learn(
        self,
        run: Run,
        round: int,
        plan: list[tuple[str, tuple[Pin, ...]]],
        outcomes: list[Cell],
    ) -> None:
        """Noise, or a decision, or the 2x2."""
        key, traces = f"dev-{round}", self.traces
        numbers = {"dev/score": outcomes[0].mean}
        kept = "old"
        if not round:
            self.noise = aa_noise(whole(outcomes[0].scores[None])[0], run.draws("aa"))
        elif len(plan) > 1:
            pin = plan[1][1][0]
            means = whole(np.stack([cell.scores for cell in outcomes])).mean(2).tolist()
            evidence = {"old": means[0], "new": means[1]}
            gate = ("calibrated_mean", evidence, {"noise": self.noise})
            accepted = run.try_in(pin, *(gate if self.gated else ("ungated", {}, {}))).accepted
            kept = "new" if accepted else "old"
            numbers["dev/candidate"] = outcomes[1].mean
        if round <= self.edits:
            self.labels = shares(traces[kept])
            numbers |= {f"{how}/{n}": x for how, t in self.labels.items() for n, x in t.items()}
        broken = [trace for arm in traces.values() for trace in arm if trace["failure"]]
        numbers["episodes/broken"] = float(len(broken))
        numbers["dev/noise"] = self.noise
        fired_now = np.array([[t[n] for n in PREDICATES] for t in self.labels.values()])
        credited = [(key, 0, plan[0][1][0])]
        run.learn(f"labels-{round}", [key], credited, labels=fired_now, noise=np.array(self.noise))
        run.records["labels.jsonl"] = run.records.get("labels.jsonl", "") + "".join(
            f'{{"round": {round}, "arm": "{arm}", "fired": "{" ".join(fired(t))}"}}\n'
            for arm, found in traces.items()
            for t in found
            if t["score"] < 1
        )
        if round > self.edits:
            numbers |= self._cross(run, round, traces["old"])
        run.measure(round, {n: x for n, x in numbers.items() if np.isfinite(x)})

    def _cross(self, run: Run, round: int, evolved: Sequence[Json]) -> dict[str, float]:
        """Train, and measure every harness with every set of weights."""
        seed, now = self.harness(run, "seed"), self.harness(run, "evolved")
        self.measure(run, f"seed-{round}", run.splits["dev"], {"seed": (seed,)}, 2 * self.repeats)
        passed = examples_of(evolved)
        most = sum(len(one["said"]) for one in passed)
        sets = {
            "trained": passed,
            "shuffled": shuffled(passed, run.draws("shuffle")),
            "seed_traces": matched(examples_of(self.traces["seed"]), most),
        }
        weights: dict[str, tuple[Pin, ...]] = {"base": ()}
        for name, examples in sets.items():
            run.records[f"examples/{name}.json"] = examples
            body = {"kind": "weights", **run.world.fine_tune(examples)}  # type: ignore[attr-defined]
            pin = run.offer(f"weights-{name}", "", body, operator="tune", round=round)
            if pin is not None:
                run.mark(pin, "active", f"{len(examples)} examples")
                weights[name] = (pin,)
        arms = {
            (which, name): (pin, *tuned)
            for which, pin in (("seed", seed), ("evolved", now))
            for name, tuned in weights.items()
        }
        named = {"/".join(arm): pins for arm, pins in arms.items()} | {"seed/base again": (seed,)}
        held = run.splits[HELD_OUT]
        *cells, again = self.measure(run, f"cross-{round}", held, named, self.repeats)
        table = dict(zip(arms, cells, strict=True))
        told: dict[str, Json] = {
            "cells": {"/".join(arm): cell.plain for arm, cell in table.items()},
            "again": again.plain,
            "tasks": list(held),
            "effects": {name: two_by_two(table, name) for name in weights if name != "base"},
        }
        run.records["cross.json"] = told | {"noise": self.noise}
        numbers = {f"cells/{'_'.join(arm)}": cell.mean for arm, cell in table.items()}
        numbers["cells/aa_gap"] = again.mean - table["seed", "base"].mean
        for name, effects in told["effects"].items():
            for effect, about in (effects or {}).items():
                numbers[f"{name}/{effect}"] = about["mean"]
        return numbers
