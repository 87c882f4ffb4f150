"""The runs that the invariants are tried on: every system there is, by its tiny config."""

import functools
import importlib
from typing import Any

from jaxrl.agents import contract, drive
from tests.agents import tiny

NAMES = (tiny.NAME, *contract.SYSTEMS)


@functools.cache
def settings(name: str) -> drive.RunConfig:
    """The tiny config of a system."""
    base: Any = importlib.import_module("configs.agents.base").get_config("tiny")
    if name == tiny.NAME:
        base.update(tiny.CONFIG)
        return drive.settings(base.to_dict())
    config: Any = importlib.import_module(f"configs.agents.{name}").get_config("tiny")
    return drive.settings(config.lock().to_dict())
