"""What a planted world is: tasks whose truth is known, so that a claim of progress can be judged.

It has artefacts that help, that do nothing and that harm; a nuisance that all arms of one moment
share (difficulty, market, a slow backend), so that only contrasts inside a moment tell anything;
and a knob at whose other end the planted effect is gone. A system is run at both ends: where the
effect is planted it must find it, where it is not it must not claim to.

A world with a real actor asks it by ``scene.ask``; one with a scripted actor has it inside ``run``.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json, draws
from jaxrl.agents.port import Script

HELD_OUT = "held_out"  # the split whose ids no proposing or judging role may see


@dataclasses.dataclass(frozen=True)
class Scene:
    """What an episode has besides its task: the moment that all arms share (its name seeds their
    nuisance), random numbers of its own, a model to ask as the role ``actor``, and how it is to be
    done."""

    moment: str
    chance: np.random.Generator
    ask: Callable[[Json], Json]
    how: Json = None  # of the episode


class World(Protocol):
    """Tasks, and what becomes of them under artefacts.

    A module that holds a world calls it ``World``: a dataclass made of the fields of
    ``config.world`` (without ``source``, which names the module) and the run's ``seed``. Where its
    scripted actor reads what a model wrote, ``BODY`` is the JSON Schema of a body that it can
    read: an artefact with another is refused.
    """

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Ids of the tasks of each split, HELD_OUT among them; an id stands in one split only."""
        ...

    def task(self, name: str) -> Json:
        """The task of an id: {"id": name, ...}, the same each time."""
        ...

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: Scene) -> Json:
        """The trace of one episode: {"score": in [0, 1], ...}; ``artefacts`` are in context: a
        scripted actor reads their bodies, a model their texts."""
        ...

    def scripts(self) -> Mapping[str, Script]:
        """Stand-ins for the roles of a language model."""
        ...


def within(what: str, owner: object, low: float, high: float, *fields: str) -> None:
    """ValueError naming the first of an object's fields that is no finite number from ``low`` to
    ``high``."""
    for field in fields:
        value = vars(owner)[field]
        if not (math.isfinite(value) and low <= value <= high):
            allowed = f">= {low:g}" if high == math.inf else f"{low:g} .. {high:g}"
            raise ValueError(f"{what}.{field}={value!r}; allowed: {allowed}")


def names_of(split: str, count: int) -> list[str]:
    """Ids of a split's tasks: ``train-00007``."""
    return [f"{split}-{number:05d}" for number in range(count)]


def sampled(seed: int, name: str) -> np.random.Generator:
    """The random numbers that a task is made of: ``sample_task(sampled(seed, name))``."""
    return draws("task", seed, name)
