"""A planted market: dates with a path of four assets, and memories that vote for one of them.

A draft is a portfolio. It starts even, each memory in context tilts it by ``beta`` towards the
asset that the memory votes for, and the actor's hand trembles by ``tremble``. A quarter of the
memories is useful (votes for the date's best asset), a quarter misleading (for its worst), the rest
neutral (for any); a useful or misleading one is informed on a date with probability ``informed``
and else votes for any. Utility: return - ``aversion`` / 2 x variance - ``cost`` x turnover.

All drafts of a date meet the same path, whose level depends on the date's regime; and a memory is
retrieved mostly in its home regime. So what was in context when things went well says little.

Ends of the knob: ``beta`` 0, memories do nothing; ``lasting`` n > 0, which memories are useful is
drawn anew every n dates, so that the past tells nothing of what comes (0: they stay).
``telling``: chance that a memory's text has the word of its kind (else any kind's).

Ours, after the planted market that MemTrial ships, with its shares and costs.
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

ASSETS, SESSIONS, REGIMES = 4, 20, ("calm", "rising", "falling", "wild")
LEVELS = (0.01, 0.06, -0.06, 0.0)  # of a regime's market
KINDS = (1, 0, 0, -1)  # useful, neutral, neutral, misleading
WORDS = {1: "momentum carry", 0: "calendar anecdote", -1: "rumour panic"}


@dataclasses.dataclass(eq=False)
class World:
    """See above."""

    dates: int
    held_out: int
    memories: int
    beta: float
    informed: float
    lasting: int
    telling: float
    tremble: float
    broken: float  # drafts that fail for reasons of their own
    aversion: float
    cost: float
    seed: int

    def __post_init__(self) -> None:
        if self.memories < 4 or self.memories % 4:
            raise ValueError(f"world.memories={self.memories!r}; allowed: multiples of 4")
        worlds.within("world", self, 0, 1, "beta", "informed", "telling", "broken")
        worlds.within("world", self, 0, math.inf, "lasting", "tremble", "aversion", "cost")
        worlds.within("world", self, 1, math.inf, "dates", "held_out")
        self._place = {name: i for i, name in enumerate(sum(map(list, self.splits().values()), []))}

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Dates to act on, in order; and those that come after them."""
        return {
            "train": worlds.names_of("train", self.dates),
            worlds.HELD_OUT: worlds.names_of("held", self.held_out),
        }

    def kinds(self, date: str) -> np.ndarray:
        """The truth: [memory] 1 useful, 0 neutral, -1 misleading on that date."""
        era = self._place[date] // self.lasting if self.lasting else 0
        every = np.tile(KINDS, self.memories // len(KINDS))
        return draws("kinds", self.seed, era).permutation(every)

    def memories_at_start(self) -> list[Json]:
        """{"name", "text", "body"} of each."""
        found = []
        kinds = self.kinds(self.splits()["train"][0])
        for number, kind in enumerate(kinds.tolist()):
            chance = draws("memory", self.seed, number)
            told = kind if chance.random() < self.telling else int(chance.choice(KINDS))
            home = REGIMES[int(chance.integers(len(REGIMES)))]
            text = f"Market {home}: {WORDS[told]}\n"
            body = {"memory": number, "home": home}
            found.append({"name": f"memory-{number:02d}", "text": text, "body": body})
        return found

    def task(self, name: str) -> Json:
        """A date: its regime, and each memory's likeness to it."""
        chance = worlds.sampled(self.seed, name)
        regime = int(chance.integers(len(REGIMES)))
        noise = chance.normal(0, 0.5, self.memories).tolist()
        return {"id": name, "regime": REGIMES[regime], "likeness": noise}

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a world lives as long as its run)
    def _date(self, name: str) -> tuple[np.ndarray, list[int]]:
        """Returns [session, asset], and the asset that each memory votes for."""
        chance = draws("path", self.seed, name)
        level = LEVELS[REGIMES.index(self.task(name)["regime"])] + chance.normal(0, 0.04)
        drift = (level + chance.normal(0, 0.05, ASSETS)) / SESSIONS
        path = drift + chance.normal(0, 0.01, (SESSIONS, 1)) + chance.normal(0, 0.01, (SESSIONS, 4))
        total = path.sum(0)
        aim = {1: int(total.argmax()), -1: int(total.argmin())}
        informed = chance.random(self.memories) < self.informed
        anywhere = chance.integers(ASSETS, size=self.memories).tolist()
        kinds = self.kinds(name).tolist()
        votes = [aim[kind] if kind and informed[i] else anywhere[i] for i, kind in enumerate(kinds)]
        return path, votes

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """Draft a portfolio and see it through. ``utility`` None: the draft failed."""
        path, votes = self._date(task["id"])
        weights = np.full(ASSETS, 1 / ASSETS)
        for one in artefacts:
            body: Any = one.body
            vote = np.eye(ASSETS)[votes[body["memory"]]]
            weights = weights + self.beta * (vote - 1 / ASSETS)
        weights = np.maximum(weights + self.tremble * scene.chance.normal(size=ASSETS), 0.0)
        weights = weights / weights.sum() if weights.sum() else np.full(ASSETS, 1 / ASSETS)
        if scene.chance.random() < self.broken:
            return {"score": 0.0, "utility": None, "weights": weights.tolist()}
        steps = path @ weights
        turnover = float(np.abs(weights - 1 / ASSETS).sum())
        variance = float(steps.var(ddof=1)) * SESSIONS
        utility = float(steps.sum()) - self.aversion / 2 * variance - self.cost * turnover
        score = float(np.clip(0.5 + utility, 0, 1))
        return {"score": score, "utility": utility, "weights": weights.tolist()}

    def scripts(self) -> Mapping[str, Script]:
        """Nobody is asked: drafts are made in ``run``."""
        return {}
