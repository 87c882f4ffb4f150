"""How claims about agents are run: a system by its config, in memory, the truth read each round."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.agents import drive
from jaxrl.agents.run import Run


def settings(
    name: str,
    seed: int,
    quick: bool,
    system: Mapping[str, Any] | None = None,
    world: Mapping[str, Any] | None = None,
    **top: Any,
) -> drive.RunConfig:
    """The config of a system (``:tiny`` if ``quick``) with changes to its sections."""
    module = importlib.import_module(f"configs.agents.{name}")
    config: Any = module.get_config("tiny" if quick else "")
    config.seed = seed
    config.system.update(system or {})
    config.world.update(world or {})
    config.update({"null_draws": 0, **top})
    return drive.settings(config.to_dict())


def followed(name: str, config: drive.RunConfig, truth: Callable[[Run], float]) -> tuple[Run, list]:
    """A run in memory, and what ``truth`` said after each of its rounds."""
    told: list[float] = []
    run = drive.run(name, config, None, watch=lambda run: told.append(truth(run)))
    return run, told[: config.rounds]  # the watch looks once more at the end
