"""A planted world of queries under skills that help, do nothing or harm, judged in pairs.

Each skill is about one of three steps and ``helpful``, ``neutral`` or ``harmful``: where a rollout
uses it, it moves that step's chance by ``effect``, 0 or -``effect``. A rollout uses each skill in
its context with probability ``use``. What it is worth is the number of its steps that went well,
plus ``noise``, plus what all rollouts of a moment share. With ``effect`` 0 all skills are alike.

The stand-in of the judge prefers the worthier of two; with probability ``sight`` it names a step
that decided (the winner's was right, the loser's was not), else any, and the skills that the winner
used in it. A lesson is the champion's: a new skill that is like one it used with probability
``faithful``, else of a kind drawn at random.
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

STEPS = 3
WORDS = ("river", "stone", "copper", "garden", "signal", "harbor", "winter", "marble")
WORDS += ("candle", "thread", "meadow", "engine", "silver", "tunnel", "violin", "desert")
SKILL: Json = {
    "type": "object",
    "properties": {
        "kind": {"type": "integer", "minimum": -1, "maximum": 1},
        "step": {"type": "integer", "minimum": 0, "maximum": STEPS - 1},
    },
    "required": ["kind", "step"],
}


@dataclasses.dataclass(eq=False)
class World:
    """See above; probabilities in [0, 1]."""

    helpful: int  # skills of each kind at the start
    neutral: int
    harmful: int
    effect: float
    base: float  # chance of a step without skills
    use: float
    sight: float
    noise: float
    faithful: float
    queries: int
    held_out: int
    words: int  # of a query, and of a skill's trigger
    seed: int

    BODY = SKILL

    def __post_init__(self) -> None:
        worlds.within("world", self, 0, 1, "effect", "base", "use", "sight", "faithful")
        worlds.within("world", self, 0, math.inf, "helpful", "neutral", "harmful", "noise")
        worlds.within("world", self, 1, math.inf, "queries", "held_out")
        if not 1 <= self.words <= len(WORDS):
            raise ValueError(f"world.words={self.words!r}; allowed: 1 .. {len(WORDS)}")

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Queries to learn from and to measure with."""
        return {
            "train": worlds.names_of("train", self.queries),
            worlds.HELD_OUT: worlds.names_of("held", self.held_out),
        }

    def task(self, name: str) -> Json:
        """A query: some words."""
        chance = worlds.sampled(self.seed, name)
        words = chance.choice(WORDS, self.words, replace=False).tolist()
        return {"id": name, "brief": " ".join(words)}

    def library(self) -> list[Json]:
        """The skills at the start: {"name", "trigger", "body"}; which is what, nobody says."""
        kinds = [1] * self.helpful + [0] * self.neutral + [-1] * self.harmful
        order = draws("library", self.seed).permutation(len(kinds))
        return [self._skill(f"skill-{i:02d}", kinds[k]) for i, k in enumerate(order)]

    def _skill(self, name: str, kind: int) -> Json:
        chance = draws("skill", self.seed, name)
        trigger = " ".join(chance.choice(WORDS, self.words, replace=False))
        # ``kind`` is what a text would say; the system hands it to authors only, and reads none.
        body = {"kind": kind, "step": int(chance.integers(STEPS))}
        return {"name": name, "trigger": trigger, "body": body}

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """One rollout: which skills it used at which step, and which steps went well."""
        shared = self.noise * draws("moment", self.seed, scene.moment).normal()
        used: list[list[int]] = [[] for _ in range(STEPS)]
        chances = [self.base] * STEPS
        for place, artefact in enumerate(artefacts):
            if scene.chance.random() < self.use:
                step = artefact.body["step"]
                used[step].append(place)
                chances[step] += self.effect * artefact.body["kind"]
        done = [bool(scene.chance.random() < p) for p in chances]
        worth = sum(done) + self.noise * scene.chance.normal() + shared
        return {"score": sum(done) / STEPS, "done": done, "used": used, "worth": float(worth)}

    def effect_of(self, artefact: Artefact) -> float:
        """The truth: what using it adds to a query's expected score."""
        return self.effect * artefact.body["kind"] / STEPS

    def scripts(self) -> Mapping[str, Script]:
        """Stand-ins for the roles of ``arena_memory.ArenaMemory``."""
        return {"compare": self._compare, "merge": self._merge}

    def _compare(self, payload: Any, chance: np.random.Generator) -> Json:
        sides = (payload["first"], payload["second"])
        first = sides[0]["worth"] > sides[1]["worth"]
        won, lost = sides if first else sides[::-1]
        telling = [s for s in range(STEPS) if won["done"][s] and not lost["done"][s]]
        if not telling or chance.random() >= self.sight:
            telling = list(range(STEPS))
        step = int(telling[int(chance.integers(len(telling)))])
        scores = [float(first), float(not first)]
        return {"scores": scores, "pivotal": [step], "used": won["used"][step], "lesson": ""}

    def _merge(self, payload: Any, chance: np.random.Generator) -> Json:
        """A skill like one that the lessons are about, or of any kind."""
        about = payload["about"]
        if about and chance.random() < self.faithful:
            body = about[int(chance.integers(len(about)))]["body"]
        else:
            body = {"kind": int(chance.integers(-1, 2)), "step": int(chance.integers(STEPS))}
        return {"trigger": payload["brief"], "text": f"For {payload['brief']}.\n", "body": body}
