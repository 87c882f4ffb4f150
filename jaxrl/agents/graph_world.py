"""A planted world of task types, each with a right workflow over nodes that have a right variant.

A document sets ``flags``, a variant for each node and a sequence of ``steps`` nodes for each task
type. A task of a type succeeds with the product of what fits: every wrong flag, node and variant
multiplies it. The stand-in of the language model sees, of each failure, one thing that was wrong
and what was right, repairs one such thing with probability ``fix`` and spoils another with
``spoil``; now and then it writes what is no document. With ``fix`` 0 nobody can get better, only
luckier.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents import worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json, draws
from jaxrl.agents.port import Script

VARIANTS = 3
WRONG_FLAG, WRONG_NODE, WRONG_VARIANT = 0.85, 0.5, 0.75  # what each multiplies a chance by


@dataclasses.dataclass(eq=False)
class World:
    """See above; probabilities in [0, 1]."""

    types: int
    steps: int
    nodes: int
    flags: int
    train: int  # tasks of each split
    validation: int
    held_out: int
    wrong: float  # share of the first documents' things
    fix: float
    spoil: float
    invalid: float
    seed: int

    def __post_init__(self) -> None:
        worlds.within("world", self, 0, 1, "wrong", "fix", "spoil", "invalid")
        worlds.within("world", self, 1, math.inf, "types", "steps", "nodes", "flags")
        worlds.within("world", self, 1, math.inf, "train", "validation", "held_out")
        if self.nodes < self.steps:
            raise ValueError(f"world.nodes={self.nodes!r}; allowed: >= world.steps={self.steps}")
        chance = draws("truth", self.seed)
        self.right: Json = {  # the truth: a body in which all is right
            "flags": chance.integers(2, size=self.flags).tolist(),
            "variants": chance.integers(VARIANTS, size=self.nodes).tolist(),
            "workflows": [
                chance.choice(self.nodes, self.steps, replace=False).tolist()
                for _ in range(self.types)
            ],
        }

        self.BODY: Json = {"type": "object", "required": ["flags", "variants", "workflows"]}
        self.BODY["properties"] = {
            "flags": _list(self.flags, {"type": "integer"}),
            "variants": _list(self.nodes, {"type": "integer"}),
            "workflows": _list(self.types, _list(self.steps, _place(self.nodes))),
        }

    def splits(self) -> Mapping[str, Sequence[str]]:
        """To learn from, to select by, and to report on."""
        return {
            "train": worlds.names_of("train", self.train),
            "validation": worlds.names_of("validation", self.validation),
            worlds.HELD_OUT: worlds.names_of("test", self.held_out),
        }

    @functools.cache  # noqa: B019 (a world lives as long as its run)
    def task(self, name: str) -> Json:
        """A task of some type, which may be harder than others."""
        chance = worlds.sampled(self.seed, name)
        return {"id": name, "type": int(chance.integers(self.types))}

    def first(self, count: int) -> list[Json]:
        """Bodies to begin with: one, and others that differ from it in two things."""
        base = self._spoilt(self.right, draws("base", self.seed), self.wrong)
        found = [base]
        for number in range(1, count):
            chance = draws("first", self.seed, number)
            body = base
            for _ in range(2):
                body = self._broken(body, self._things(), chance)
            found.append(body)
        return found

    def _things(self, scope: str = "all") -> list[tuple[str, int, int]]:
        """What can be right or wrong: (kind, place, step)."""
        found = [("flags", i, 0) for i in range(self.flags)] if scope != "graph" else []
        if scope != "other":
            found += [("variants", i, 0) for i in range(self.nodes)]
            found += [("workflows", i, s) for i in range(self.types) for s in range(self.steps)]
        return found

    def _spoilt(self, body: Json, chance: np.random.Generator, share: float) -> Json:
        for thing in self._things():
            if chance.random() < share:
                body = self._broken(body, [thing], chance)
        return body

    def _broken(self, body: Json, things: Sequence[Any], chance: np.random.Generator) -> Json:
        kind, place, step = things[int(chance.integers(len(things)))]
        sizes = {"flags": 2, "variants": VARIANTS, "workflows": self.nodes}
        now = body[kind][place][step] if kind == "workflows" else body[kind][place]
        value = (now + int(chance.integers(1, sizes[kind]))) % sizes[kind]
        return changed(body, kind, place, step, value)

    def _faults(self, body: Json, kind: int) -> list[tuple[str, int, int]]:
        """What is wrong for tasks of a type."""
        right = self.right
        found = [
            ("flags", i, 0) for i in range(self.flags) if body["flags"][i] != right["flags"][i]
        ]
        for step, node in enumerate(body["workflows"][kind]):
            if node != right["workflows"][kind][step]:
                found.append(("workflows", kind, step))
            elif body["variants"][node] != right["variants"][node]:
                found.append(("variants", node, 0))
        return found

    def chance_of(self, body: Json, kind: int) -> float:
        """Of a task of a type."""
        worth = {"flags": WRONG_FLAG, "workflows": WRONG_NODE, "variants": WRONG_VARIANT}
        return float(np.prod([worth[fault[0]] for fault in self._faults(body, kind)] or [1.0]))

    def value(self, body: Json) -> float:
        """The truth: mean success over task types."""
        return float(np.mean([self.chance_of(body, kind) for kind in range(self.types)]))

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """Hard and soft score; of a failure, one thing that was wrong and what is right."""
        body, kind = artefacts[0].body, task["type"]
        fine = scene.chance.random() < self.chance_of(body, kind)
        faults = self._faults(body, kind)
        shown = None
        if not fine and faults:
            where, place, step = faults[int(scene.chance.integers(len(faults)))]
            right = self.right[where][place]
            shown = [where, place, step, right[step] if where == "workflows" else right]
        soft = 1 - len(faults) / (self.flags + 2 * self.steps)
        return {"score": float(fine), "soft": soft, "type": kind, "wrong": shown}

    def scripts(self) -> Mapping[str, Script]:
        """The stand-in for the role of ``skill_graph.SkillGraph``."""
        return {"write": self._write}

    def _write(self, payload: Any, chance: np.random.Generator) -> Json:
        scope = {"other": "other", "graph": "graph"}.get(payload["operator"].split("_")[-1], "all")
        body = payload["parents"][0]["body"]
        if payload["operator"].startswith("cross"):
            body = self._crossed(body, payload["parents"][1]["body"], scope, chance)
        for _ in range(payload["edits"]):
            seen = [f["wrong"] for f in payload["failures"] if f["wrong"]]
            things = set(self._things(scope))
            seen = [one for one in seen if tuple(one[:3]) in things]
            if seen and chance.random() < self.fix:
                body = changed(body, *seen[int(chance.integers(len(seen)))])
            if chance.random() < self.spoil:
                body = self._broken(body, sorted(things), chance)
        text = self.rendered(body)
        if chance.random() < self.invalid:
            text = text.replace("## Task Graphs", "## Notes\n\n## Task Graphs")
        return {"text": text, "body": body}

    def _crossed(self, one: Json, other: Json, scope: str, chance: np.random.Generator) -> Json:
        """Each flag, variant and workflow in scope comes from either parent."""

        def mixed(kind: str) -> Json:
            pairs = zip(one[kind], other[kind], strict=True)
            return [b if chance.random() < 0.5 else a for a, b in pairs]

        kinds = [kind for kind in one if (kind == "flags") == (scope == "other")]
        return one | {kind: mixed(kind) for kind in kinds}

    def rendered(self, body: Json) -> str:
        """A document that says the same."""
        used = sorted({node for workflow in body["workflows"] for node in workflow})
        lines = ["# Skill", "", "## Global Guidance", ""]
        lines += [f"Rule {i} is {'on' if on else 'off'}." for i, on in enumerate(body["flags"])]
        lines += ["", "## Node Lists", ""]
        for node in used:
            lines += [f"### node {node}", f"Do it in way {body['variants'][node]}.", ""]
        lines += ["## Task Graphs", ""]
        for kind, workflow in enumerate(body["workflows"]):
            lines += [f"### type {kind}", f"Use when: the task is of type {kind}", "Workflow:"]
            lines += [f"{i}. node {node}" for i, node in enumerate(workflow, 1)] + [""]
        return "\n".join(lines)

    def spliced(self, parent: Json, child: Json, graph: bool) -> Json:
        """A child's body with what it may not change put back."""
        kept = ("flags",) if graph else ("variants", "workflows")
        return child | {kind: parent[kind] for kind in kept}


def _list(count: int, items: Json) -> Json:
    return {"type": "array", "items": items, "minItems": count, "maxItems": count}


def _place(count: int) -> Json:
    return {"type": "integer", "minimum": 0, "maximum": count - 1}


def changed(body: Json, kind: str, place: int, step: int, value: int) -> Json:
    """A body with one thing set."""
    rows = [list(row) if isinstance(row, list) else row for row in body[kind]]
    if kind == "workflows":
        rows[place][step] = value
    else:
        rows[place] = value
    return body | {kind: rows}
