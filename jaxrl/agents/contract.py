"""What a system is: propose, act, learn, over states that are frozen while it acts; and which are.

A system is a dataclass whose fields are those of ``config.system``; what it remembers between
rounds is made anew by running it again on its journal, so it may keep plain attributes
(``field(init=False)``), and nothing may come to it past ``run``.
"""

import dataclasses
import importlib
import typing
from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl.agents.port import Role
from jaxrl.agents.run import Run

# Name of --system -> where its class is. Config, test and README row have the same name.
SYSTEMS: Mapping[str, str] = {
    "designer_rsi": "jaxrl.agents.skills:DesignerRSI",
    "codemidas": "jaxrl.agents.funnel:CodeMidas",
    "mimo_graders": "jaxrl.agents.graders:Graders",
    "better_turns": "jaxrl.agents.layers:BetterTurns",
    "arena_memory": "jaxrl.agents.arena_memory:ArenaMemory",
    "skill_graph": "jaxrl.agents.skill_graph:SkillGraph",
    "mace": "jaxrl.agents.mace:Mace",
    "memtrial": "jaxrl.agents.memory:MemTrial",
    "dense": "jaxrl.agents.feedback_tree:Refit",
    "harness_evolution": "jaxrl.agents.cross:HarnessEvolution",
}


class System(Protocol):
    """A loop that improves what surrounds the weights."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """Who it asks of a language model."""
        ...

    def propose(self, run: Run, round: int) -> Any:
        """What to do this round: decided from what is known, before anything is done."""
        ...

    def act(self, run: Run, round: int, plan: Any) -> Any:
        """Do it, by ``run.act``; nothing that is known changes meanwhile."""
        ...

    def learn(self, run: Run, round: int, plan: Any, outcomes: Any) -> None:
        """Take in what came of it: candidates through gates, numbers by ``run.learn``, curves by
        ``run.measure(round, ...)``, once."""
        ...


def find(dotted: str) -> Any:
    """``package.module:Name`` -> what is there. ValueError if nothing is."""
    module, _, name = dotted.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{dotted!r}: {error}; allowed: package.module:Name") from error


def build(what: str, kind: Any, fields: Mapping[str, Any]) -> Any:
    """A dataclass of exactly these fields; nested mappings where a field is a dataclass.

    TypeError naming the fields that are unknown or missing.
    """
    wanted = [field.name for field in dataclasses.fields(kind) if field.init]
    unknown, missing = sorted(set(fields) - set(wanted)), sorted(set(wanted) - set(fields))
    if unknown or missing:
        raise TypeError(f"{what} takes {wanted}; unknown: {unknown}; missing: {missing}")
    hints = typing.get_type_hints(kind)
    made = {
        name: build(f"{what}.{name}", hints[name], value)
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping)
        else value
        for name, value in fields.items()
    }
    return kind(**made)


def load(name: str, fields: Mapping[str, Any]) -> System:
    """A system of SYSTEMS, or of your own as ``package.module:Name``. ValueError for an unknown
    name."""
    if name not in SYSTEMS and ":" not in name:
        allowed = ", ".join(SYSTEMS)
        raise ValueError(f"system={name!r}; allowed: {allowed}, or package.module:Name")
    return build("config.system", find(SYSTEMS.get(name, name)), fields)
