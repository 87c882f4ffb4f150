"""A planted world of requests: sub-tasks of three steps, half of which turn on the context.

A request asks for one of ``subtasks`` sub-tasks, the r-th of them as often as 1/r, in one of two
contexts. Each sub-task has right actions for its three steps; in every other sub-task the last one
depends on the context. The scripted actor follows a skill for the sub-task if it has one, mostly,
and finds a step by itself with probability ``alone``. In every moment all steps fail alike with a
probability of up to ``trouble``, whatever the arm.

At the start every other sub-task has a documented skill: right, but for one step in ``faulty`` of
them, and right in the first context only where the context matters.

The stand-in of the language model reads the graders' reasons, which say what was expected, and errs
by knobs: it spoils one step of what it writes (``corruption``), overlooks that contexts differ
(``careless``), calls a sub-task by another's name (``relabel``), judges the wrong way (``flip``)
or not at all (``tie``). With all of these 0 every candidate is sound, and a gate can buy nothing.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents import worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json, draws
from jaxrl.agents.port import Script

STEPS, ACTIONS, CONTEXTS = 3, 4, ("daily", "yearly")
VERBS = ("merge", "sort", "chart", "audit", "split", "print")
THINGS = ("tables", "letters", "budgets", "photos")
_ROWS: Json = {"type": "array", "items": {"type": "integer"}, "minItems": STEPS}
SKILL: Json = {
    "type": "object",
    "properties": {
        "label": {"type": "string"},
        "steps": {"type": "array", "items": _ROWS, "minItems": len(CONTEXTS)},
    },
    "required": ["label", "steps"],
}


@dataclasses.dataclass(eq=False)
class World:
    """See above; probabilities in [0, 1]."""

    subtasks: int
    requests: int  # tasks of the train split
    held_out: int
    alone: float
    follow: float
    trouble: float
    faulty: float
    corruption: float
    careless: float
    relabel: float
    flip: float
    tie: float
    seed: int

    BODY = SKILL

    def __post_init__(self) -> None:
        if not 2 <= self.subtasks <= len(VERBS) * len(THINGS):
            raise ValueError(
                f"world.subtasks={self.subtasks!r}; allowed: 2 .. {len(VERBS) * len(THINGS)}"
            )
        worlds.within("world", self, 1, math.inf, "requests", "held_out")
        shares = ("alone", "follow", "trouble", "faulty", "corruption", "careless", "relabel")
        worlds.within("world", self, 0, 1, *shares, "flip", "tie")
        if self.flip + self.tie > 1:
            raise ValueError(f"world.flip={self.flip!r}, tie={self.tie!r}; allowed: sum in 0 .. 1")
        self._labels = [f"{verb} {thing}" for thing in THINGS for verb in VERBS][: self.subtasks]
        weights = 1 / np.arange(1, self.subtasks + 1)
        self.traffic = weights / weights.sum()
        chance = draws("truth", self.seed)
        tables = chance.integers(ACTIONS, size=(self.subtasks, len(CONTEXTS), STEPS))
        tables[:, 1] = tables[:, 0]
        turning = np.arange(self.subtasks) % 4 < 2
        shift = chance.integers(1, ACTIONS, self.subtasks)
        tables[turning, 1, -1] = (tables[turning, 1, -1] + shift[turning]) % ACTIONS
        self.tables = tables  # the truth: [sub-task, context, step] -> the right action

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Requests to learn from, and requests to measure with."""
        return {
            "train": worlds.names_of("train", self.requests),
            worlds.HELD_OUT: worlds.names_of("held", self.held_out),
        }

    @functools.cache  # noqa: B019 (a world lives as long as its run)
    def task(self, name: str) -> Json:
        """A request."""
        chance = worlds.sampled(self.seed, name)
        subtask = int(chance.choice(self.subtasks, p=self.traffic))
        context = int(chance.integers(len(CONTEXTS)))
        brief = f"{self._labels[subtask]} {CONTEXTS[context]}"
        return {"id": name, "brief": brief, "subtask": subtask, "context": context}

    def documented(self) -> list[Json]:
        """The skills that there are at the start: {"label", "body"}."""
        found = []
        for subtask in range(0, self.subtasks, 2):
            chance = draws("documented", self.seed, subtask)
            steps = self.tables[subtask, 0].tolist()
            if chance.random() < self.faulty:
                place = int(chance.integers(STEPS))
                steps[place] = (steps[place] + 1) % ACTIONS
            label = self._labels[subtask]
            found.append({"label": label, "body": {"label": label, "steps": [steps, steps]}})
        return found

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """Three steps; the request is met if all are right. ``expected``: the grader's reasons."""
        label, right = self._labels[task["subtask"]], self.tables[task["subtask"], task["context"]]
        skill: Any = next((a.body["steps"] for a in artefacts if a.body["label"] == label), None)
        trouble = self.trouble * draws("moment", self.seed, scene.moment).random()
        lots = scene.chance.random((STEPS, 3))
        done = []
        for step in range(STEPS):
            followed = lots[step, 0] < self.follow
            if skill is not None and followed:
                fine = skill[task["context"]][step] == right[step]
            else:
                fine = lots[step, 1] < self.alone
            done.append(bool(fine and lots[step, 2] >= trouble))
        return {
            "score": float(all(done)),
            "done": done,
            "context": CONTEXTS[task["context"]],
            "expected": right.tolist(),
        }

    def value(self, bodies: Mapping[str, Json]) -> float:
        """The truth: chance that all steps of a request are right, under skills by label."""
        total = 0.0
        for subtask, share in enumerate(self.traffic):
            body = bodies.get(self._labels[subtask])
            for context in range(len(CONTEXTS)):
                right, product = self.tables[subtask, context], 1.0
                for step in range(STEPS):
                    found = self.alone
                    if body is not None:
                        fits = body["steps"][context][step] == right[step]
                        found = self.follow * fits + (1 - self.follow) * self.alone
                    product *= found
                total += share / len(CONTEXTS) * product
        # The mean over moments of (1 - trouble * u)^3, u uniform.
        t = self.trouble
        return total * (1.0 if t == 0 else (1 - (1 - t) ** 4) / (4 * t))

    def scripts(self) -> Mapping[str, Script]:
        """Stand-ins for the roles of ``skills.DesignerRSI``."""
        return {"extract": self._extract, "author": self._author, "judge": self._judge}

    def _extract(self, payload: Any, chance: np.random.Generator) -> Json:
        """A request's first two words are its label, unless they are mistaken for another's."""
        found = []
        for episode in payload["episodes"]:
            label = " ".join(episode["brief"].split()[:2])
            if chance.random() < self.relabel:
                label = self._labels[int(chance.integers(self.subtasks))]
            found.append([label])
        return {"labels": found}

    def _author(self, payload: Any, chance: np.random.Generator) -> Json:
        """Writes a skill anew, or changes the step that fails most."""
        evidence = payload["failures"] + payload["successes"]
        expected = [
            [e["expected"] for e in evidence if e["context"] == context] for context in CONTEXTS
        ]
        blind = payload["operator"] != "rewrite" and chance.random() < self.careless
        if payload["operator"] == "revise":
            steps = self._revised(payload["body"]["steps"], payload["failures"], expected, blind)
        else:
            steps = _written(payload["body"], expected, blind)
        if chance.random() < self.corruption:
            place, wrong = int(chance.integers(STEPS)), int(chance.integers(1, ACTIONS))
            spoiled = range(len(CONTEXTS)) if blind else [int(chance.integers(len(CONTEXTS)))]
            for context in spoiled:
                steps[context][place] = (steps[context][place] + wrong) % ACTIONS
        body = {"label": payload["label"], "steps": steps}
        return {"text": rendered(body), "body": body}

    def _revised(
        self, steps: list[list[int]], failures: Any, expected: list[Any], blind: bool
    ) -> list[list[int]]:
        """One step is set to what was expected of it: where it failed, or without looking, in
        every context."""
        steps = [list(row) for row in steps]
        wrong = Counter(
            (CONTEXTS.index(f["context"]), step, f["expected"][step])
            for f in failures
            for step in range(STEPS)
            if not f["done"][step]
            and steps[CONTEXTS.index(f["context"])][step] != f["expected"][step]
        )
        if wrong:
            context, step, action = min(wrong, key=lambda where: (-wrong[where], where))
            for other in range(len(CONTEXTS)) if blind else (context,):
                steps[other][step] = action
            if not blind:  # what failed in another context for the same reason is mended with it
                for other in range(len(CONTEXTS)):
                    if expected[other] and expected[other][0][step] == action:
                        steps[other][step] = action
        return steps

    def _judge(self, payload: Any, chance: np.random.Generator) -> Json:
        """Who did more; the other one, or neither, by chance."""
        first, second = sum(payload["first"]["done"]), sum(payload["second"]["done"])
        lot = chance.random()
        if first == second or lot < self.tie:
            return {"winner": "tie"}
        return {"winner": "first" if (first > second) != (lot >= 1 - self.flip) else "second"}


def _written(body: Any, expected: list[Any], blind: bool) -> list[list[int]]:
    """A table of what was expected: by context; or, without looking, of what came first."""
    every = [one for rows in expected for one in rows]
    old = body["steps"] if body else None
    if blind or not any(expected):
        steps = every[0] if every else old[0] if old else [0] * STEPS
        return [list(steps), list(steps)]
    return [
        list(rows[0] if rows else old[context] if old else every[0])
        for context, rows in enumerate(expected)
    ]


def rendered(body: Json) -> str:
    """The same skill as a text for people and models."""
    lines = [f"# {body['label']}", ""]
    for context, steps in zip(CONTEXTS, body["steps"], strict=True):
        lines += [f"When it is {context}:", *(f"{i}. action {a}" for i, a in enumerate(steps, 1))]
    return "\n".join(lines) + "\n"
