"""The smallest system there can be: one number is guessed, and better guesses replace it."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.agents import worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json
from jaxrl.agents.port import Role, Script
from jaxrl.agents.run import Episode, Run

GUESS = {
    "type": "object",
    "properties": {"guess": {"type": "number"}},
    "required": ["guess"],
}


@dataclasses.dataclass
class World:
    """Tasks are noisy looks at how far a guess is from ``target``; ``slope`` 0: nothing helps."""

    target: float
    slope: float
    seed: int

    def splits(self) -> Mapping[str, Sequence[str]]:
        return {"train": worlds.names_of("train", 40), worlds.HELD_OUT: worlds.names_of("held", 20)}

    def task(self, name: str) -> Json:
        return {"id": name, "noise": float(worlds.sampled(self.seed, name).normal(0, 0.05))}

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        miss = abs(artefacts[0].body["guess"] - self.target) if artefacts else 1.0
        luck = task["noise"] + 0.02 * scene.chance.normal()
        return {"score": float(np.clip(0.5 - self.slope * miss + luck, 0, 1))}

    def scripts(self) -> Mapping[str, Script]:
        return {"guesser": lambda seen, chance: {"guess": seen["now"] + float(chance.normal())}}


@dataclasses.dataclass
class Climber:
    """Proposes one guess a round, and keeps it if it is better on the same tasks."""

    tasks: int

    @property
    def roles(self) -> Mapping[str, Role]:
        return {"guesser": Role("propose", GUESS, "Guess a number nearer to the hidden one.")}

    def propose(self, run: Run, round: int) -> list[Episode]:
        chance = run.draws("tasks", round)
        tasks = chance.choice(run.splits["train"], self.tasks, replace=False).tolist()
        now = tuple(run.shelf.active().items())
        body = run.shelf.get(now[0]).body if now else {"guess": 0.0}
        reply = run.call("guesser", {"now": body["guess"], "round": round}, f"guess-{round}")
        self.pin = run.offer("guess", "", reply, operator="guess", round=round, parents=now)
        assert self.pin is not None
        arms = (("old", now), ("new", (self.pin,)))
        return [Episode(task, pins, f"round-{round}", arm) for arm, pins in arms for task in tasks]

    def act(self, run: Run, round: int, plan: list[Episode]) -> list[Json]:
        return run.act(f"round-{round}", plan)

    def learn(self, run: Run, round: int, plan: list[Episode], outcomes: list[Json]) -> None:
        assert self.pin is not None
        scores = [trace["score"] for trace in outcomes]
        evidence = {"old": scores[: self.tasks], "new": scores[self.tasks :]}
        run.try_in(self.pin, "strict_improvement", evidence, {})
        credited = [(f"round-{round}", self.tasks, self.pin)]
        run.learn(f"seen-{round}", [f"round-{round}"], credited, scores=np.asarray(scores))
        held = [
            Episode(task, tuple(run.shelf.active().items()), "held", "held")
            for task in run.splits[worlds.HELD_OUT]
        ]
        traces = run.act(f"held-{round}", held)
        run.measure(round, {"held_out/score": float(np.mean([t["score"] for t in traces]))})


NAME = "tests.agents.tiny:Climber"
CONFIG = {
    "seed": 0,
    "rounds": 4,
    "null_draws": 20,
    "system": {"tasks": 8},
    "world": {"source": "tests.agents.tiny", "target": 2.0, "slope": 0.2},
}
