"""A planted world of two stages in which what is shown and in which form must fit together.

For each stage there are two good combinations of two memory units, ``a`` and ``b``, whose units
support each other and conflict with the other's, and a risky unit that helps nobody. A stage
succeeds by a table of (combination, form): ``a`` shines as a guide and fails as a checklist, ``b``
is fair as both, so that averages over either side mislead; in the second stage ``a`` and ``b`` have
changed places. ``interaction`` scales what goes beyond the averages: at 0 the best combination and
the best form are also the best pair. Tasks differ in difficulty, arms of a moment share a nuisance.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents import worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json, draws
from jaxrl.agents.port import Script

STAGES = (("planner", "plan"), ("worker", "act"))  # role, stage
FORMS = ("guide", "checklist", "constraint")
# Success by combination and form; notes on the paper give the first two columns.
TABLE = {"a": (0.82, 0.59, 0.50), "b": (0.76, 0.78, 0.50)}
ELSE = 0.45  # of any other combination


@dataclasses.dataclass(eq=False)
class World:
    """See above."""

    interaction: float  # 0 .. 1
    difficulty: float  # standard deviation over tasks
    trouble: float  # standard deviation over moments
    cite: float  # chance that a shown unit is used
    mistaken: float  # relations that are judged wrong
    train: int
    held_out: int
    seed: int

    def __post_init__(self) -> None:
        worlds.within("world", self, 0, 1, "interaction", "cite", "mistaken")
        worlds.within("world", self, 0, math.inf, "difficulty", "trouble")
        worlds.within("world", self, 1, math.inf, "train", "held_out")

    def splits(self) -> Mapping[str, Sequence[str]]:
        """To calibrate on, and to measure with."""
        return {
            "train": worlds.names_of("train", self.train),
            worlds.HELD_OUT: worlds.names_of("held", self.held_out),
        }

    def task(self, name: str) -> Json:
        """What state the work is in, and what it needs."""
        hard = float(worlds.sampled(self.seed, name).normal(0, self.difficulty))
        return {"id": name, "hard": hard, "state": "draft report open", "need": "next move"}

    def operations(self, task: Json) -> list[Json]:
        """One for each stage."""
        return [
            {"role": role, "stage": stage, "text": f"{task['state']} {task['need']} {stage}"}
            for role, stage in STAGES
        ]

    def units(self) -> list[Json]:
        """The memory at the start: {"name", "trigger", "body"}."""
        found = []
        for role, stage in STAGES:
            for group, count in (("a", 2), ("b", 2), ("risky", 1)):
                for number in range(count):
                    found.append(self._unit(role, stage, group, number))
        return found

    def _unit(self, role: str, stage: str, group: str, number: int) -> Json:
        body = {
            "role": role,
            "stage": stage,
            "conditions": ["draft report open", stage],
            "actions": [f"{group} {number}"],
            "outputs": [],
            "risk": 1.0 if group == "risky" else 0.0,
            "tokens": 40,
            "source": "documented",
        }
        trigger = f"draft report open next move {stage}"
        return {"name": f"{stage}-{group}-{number}", "trigger": trigger, "body": body}

    def chance_of(self, place: int, group: str, form: str) -> float:
        """The truth: success of a stage under a combination and a form."""
        if group not in TABLE:
            return ELSE
        known = np.array([TABLE[g] for g in ("a", "b")])
        row, column = ("ab" if place == 0 else "ba").index(group), FORMS.index(form)
        additive = known.mean(1)[row] + known.mean(0)[column] - known.mean()
        return float(additive + self.interaction * (known[row, column] - additive))

    def value(self, patches: Sequence[Json]) -> float:
        """The truth: expected score of what is shown in each stage."""
        groups = [group_of(patch["units"]) for patch in patches]
        return float(
            np.mean([self.chance_of(i, groups[i], p["form"]) for i, p in enumerate(patches)])
        )

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """Both stages, and which of the shown units each used."""
        shared = self.trouble * draws("moment", self.seed, scene.moment).normal()
        stages, used = [], []
        for place, patch in enumerate(scene.how["patches"]):
            base = self.chance_of(place, group_of(patch["units"]), patch["form"])
            lots = scene.chance.random(1 + len(patch["units"]))
            stages.append(float(lots[0] < base - task["hard"] - shared))
            shown = zip(patch["units"], lots[1:], strict=True)
            used.append([unit for unit, lot in shown if lot < self.cite])
        return {"score": float(np.mean(stages)), "stages": stages, "used": used}

    def scripts(self) -> Mapping[str, Script]:
        """Stand-ins for the roles of ``mace.Mace``."""
        return {"relate": self._relate, "extract": self._extract}

    def _relate(self, payload: Any, chance: np.random.Generator) -> Json:
        """Units of one group support each other, of two conflict; the risky relate to nobody."""
        pair = (payload["one"], payload["other"])
        groups = [unit["body"]["actions"][0].split()[0] for unit in pair]
        if chance.random() < self.mistaken:
            return {"kind": ("support", "conflict", "none")[int(chance.integers(3))]}
        if not set(groups) <= set(TABLE):
            return {"kind": "none"}
        return {"kind": "support" if groups[0] == groups[1] else "conflict"}

    def _extract(self, payload: Any, chance: np.random.Generator) -> Json:
        """A unit that says something of the episode, and helps nobody."""
        role, stage = STAGES[int(chance.integers(len(STAGES)))]
        unit = self._unit(role, stage, "seen", payload["number"])
        return {"units": [{**unit, "text": f"Seen once in {stage}."}]}


def group_of(units: Sequence[str]) -> str:
    """``a`` or ``b`` for a whole combination of them, else what it is not."""
    groups = {unit.split("-")[1] for unit in units}
    return groups.pop() if len(groups) == 1 and len(units) == 2 else "other"
