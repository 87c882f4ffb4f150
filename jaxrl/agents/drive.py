"""From a config to a run: builds system, world and port, drives the rounds, replays.

``run(name, config, root)`` starts a run or goes on with the one that lies in ``root``;
``replay(name, config, source, target)`` makes its folder again from its journal alone.
"""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxrl.agents import contract
from jaxrl.agents.contract import System, build, find
from jaxrl.agents.journal import Journal
from jaxrl.agents.port import (
    ActorPort,
    HttpPort,
    LLMPort,
    ReplayPort,
    ScriptedPort,
    ServedPort,
    Spending,
    TinyPort,
)
from jaxrl.agents.run import Run
from jaxrl.agents.worlds import World


@dataclasses.dataclass(frozen=True)
class PortConfig:
    """Which language model, and how it is asked; see configs/agents/base.py."""

    kind: Literal["scripted", "replay", "tiny", "served", "http"]
    path: str
    generator: str
    url: str
    model: str
    api_key_variable: str
    spending: Spending
    max_tokens: int
    temperature: float
    attempts: int
    backoff_s: float
    timeout_s: float

    def __post_init__(self) -> None:
        kinds = ("scripted", "replay", "tiny", "served", "http")
        if self.kind not in kinds:
            raise ValueError(f"port.kind={self.kind!r}; allowed: {', '.join(kinds)}")
        for field in ("max_tokens", "attempts", "timeout_s"):
            if not vars(self)[field] > 0:
                raise ValueError(f"port.{field}={vars(self)[field]!r}; allowed: > 0")
        for field in ("temperature", "backoff_s"):
            if not vars(self)[field] >= 0:
                raise ValueError(f"port.{field}={vars(self)[field]!r}; allowed: >= 0")
        if self.kind == "tiny" and ":" not in self.generator:
            raise ValueError(f"port.generator={self.generator!r}; allowed: package.module:function")
        if self.kind in ("served", "http"):
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"port.url={self.url!r}; allowed: http://... or https://...")
            variable = self.api_key_variable
            if variable and variable not in os.environ:
                raise ValueError(f"port.api_key_variable={variable!r}, which is not set")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A run: fields of its system and its world stay mappings until their classes are known."""

    seed: int
    rounds: int
    null_draws: int
    system: Mapping[str, Any]
    world: Mapping[str, Any]
    port: PortConfig

    def __post_init__(self) -> None:
        for field, least in (("seed", 0), ("rounds", 1), ("null_draws", 0)):
            if vars(self)[field] < least:
                raise ValueError(f"{field}={vars(self)[field]!r}; allowed: >= {least}")


def _world(config: RunConfig) -> World:
    fields = dict(config.world)
    if "source" not in fields:
        raise TypeError("config.world lacks source, the module that holds the World")
    kind = find(f"{fields.pop('source')}:World")
    return build("config.world", kind, {**fields, "seed": config.seed})


def _port(config: PortConfig, system: System, world: World, journal: Journal, seed: int) -> LLMPort:
    roles = system.roles
    if config.kind == "scripted":
        return ScriptedPort(roles, world.scripts(), seed)
    if config.kind == "replay":
        with contextlib.closing(Journal(Path(config.path), closed=True)) as other:
            return ReplayPort.of(other, roles)
    if config.kind == "tiny":
        generator, tokenizer = find(config.generator)(config.path)
        limits = {"temperature": config.temperature, "max_new_tokens": config.max_tokens}
        tiny = TinyPort(roles, generator, tokenizer, model=config.model, **limits)
        return ActorPort(roles, tiny, ScriptedPort(roles, world.scripts(), seed))
    variable = config.api_key_variable
    kind = ServedPort if config.kind == "served" else HttpPort
    port = kind(
        roles,
        url=config.url,
        model=config.model,
        api_key=os.environ[variable] if variable else "",
        spending=config.spending,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        attempts=config.attempts,
        backoff_s=config.backoff_s,
        timeout_s=config.timeout_s,
        spent=sum(line.result["cost"] for line in journal.of("call"))
        + sum(line.asked["cost"] for line in journal.of("unanswered")),
    )
    if config.kind == "http":
        return port
    return ActorPort(roles, port, ScriptedPort(roles, world.scripts(), seed))


def settings(config: Mapping[str, Any]) -> RunConfig:
    """A config's mapping as a record. TypeError for a field too many or too few, ValueError for a
    value that is not allowed."""
    return build("config", RunConfig, config)


def parts(name: str, config: RunConfig) -> tuple[System, World]:
    """A config's system and world. TypeError and ValueError as they are made."""
    return contract.load(name, config.system), _world(config)


def begin(
    name: str,
    config: RunConfig,
    journal: Journal,
    made: tuple[System, World],
    port: LLMPort | None = None,
) -> Run:
    """The run that a journal tells of, at its first line. ``port``: instead of the config's."""
    system, world = made
    if port is None and not journal.closed:
        port = _port(config.port, system, world, journal, config.seed)
    run = Run(journal, world, port, system.roles, seed=config.seed, null_draws=config.null_draws)
    # How a model is reached is no part of what the run is: it may go on elsewhere.
    plain = {key: value for key, value in dataclasses.asdict(config).items() if key != "port"}
    run.start({**plain, "name": name})
    return run


def drive(
    run: Run, system: System, rounds: int, watch: Callable[[Run], object] | None = None
) -> Run:
    """All rounds; after each, and at the end, the folder is brought up to date and ``watch`` looks
    at it."""
    for round in range(rounds + 1):
        if round < rounds:
            plan = system.propose(run, round)
            outcomes = system.act(run, round, plan)
            system.learn(run, round, plan, outcomes)
        else:
            run.journal.once("end", "", None)
        run.settle()
        if watch is not None and run.journal.live:
            watch(run)
    return run


def run(
    name: str,
    config: RunConfig,
    root: Path | None,
    port: LLMPort | None = None,
    watch: Callable[[Run], object] | None = None,
) -> Run:
    """Start the run, or go on where it was. ``root`` None: in memory; ``port``: instead of the
    config's."""
    made = parts(name, config)  # before anything is written
    with contextlib.closing(Journal(root)) as journal:
        return drive(begin(name, config, journal, made, port), made[0], config.rounds, watch)


def replay(name: str, config: RunConfig, source: Path, target: Path) -> Run:
    """Make a finished run's folder again in ``target``, which must be empty: from its journal and
    objects, without asking a model or a world. ValueError if it is not, JournalError if something
    else would happen."""
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ValueError(f"target={str(target)!r} is not empty")
    shutil.copy(source / "journal.jsonl", target / "journal.jsonl")
    shutil.copytree(source / "objects", target / "objects")
    made = parts(name, config)
    with contextlib.closing(Journal(target, closed=True)) as journal:
        return drive(begin(name, config, journal, made), made[0], config.rounds)
