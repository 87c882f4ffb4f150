"""An experiment file -> its runs: a config, a name and a state each. Nothing is started here.

    BASE = "configs/NAME.py[:variant]"
    def sweep(): return [overrides, ...]            see jaxrl/sweep.py
    def search(trial): return overrides or a list   Optuna's trial; optional, with
    GOAL = "held_out.after.greedy"                  what it maximises: a field of summary.json

A run's folder is named by what it overrides, not by its number: a sweep that has grown goes on
where it was.
"""

import dataclasses
import difflib
import hashlib
import importlib.util
import itertools
import json
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath
from ml_collections import ConfigDict

T = TypeVar("T")

CONFIG = "config"  # the key of an override that names another config than BASE
WATCHED = ("mesh", "checkpoint", "log")  # sections that change nothing of what a run found
MOST_RUNS = 10_000  # of a sweep; a generator without an end has more
LONGEST_NAME = 96  # of a run's folder, which also carries a digest

# Below these a config lists no fields: what differs is written there.
_OPEN = re.compile(r"phases\.\w+|scorers\.\w+\.(model|optimizer)|scorers\.views|task\.parameters")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    config: str  # configs/NAME.py[:variant]
    overrides: Mapping[str, Any]  # dotted fields
    label: str  # what differs from others, for people

    @property
    def name(self) -> str:
        """Of its folder: the label, and a digest of config and overrides."""
        whole = json.dumps([self.config, dict(self.overrides)], sort_keys=True, default=str)
        digest = hashlib.blake2b(whole.encode(), digest_size=4).hexdigest()
        plain = re.sub(r"[^\w.,=+-]+", "_", self.label).strip("_")[:LONGEST_NAME]
        return f"{plain or 'base'}-{digest}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"config": self.config, "overrides": dict(self.overrides), "label": self.label}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What an experiment file says."""

    path: str
    base: str
    runs: Sequence[Run]
    search: Callable[[Any], Any] | None
    goal: str


def _module(path: str, name: str) -> Any:
    """A python file as a module. ValueError if there is none, or it cannot be run."""
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path} is no file; allowed: experiments/NAME.py, configs/NAME.py")
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    if (here := str(pathlib.Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # configs import each other from the checkout's root
    loader = found.loader
    _theirs(path, lambda: loader.exec_module(module))
    return module


def _theirs(what: str, call: Callable[[], T]) -> T:
    """What a researcher's own code returns. ValueError naming the line where it failed."""
    try:
        return call()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        stated = f"{type(error).__name__}: {error} ({pathlib.Path(at.filename).name}:{at.lineno})"
        raise ValueError(f"{what}: {stated}") from error


def tiny(config: str) -> str:
    """The variant for one CPU core: NAME.py:tiny, and of NAME.py:grpo NAME.py:tiny_grpo."""
    path, _, variant = config.partition(":")
    if variant == "tiny" or variant.startswith("tiny_"):
        return config
    return f"{path}:tiny_{variant}" if variant else f"{path}:tiny"


def _run(base: str, overrides: Any, small: bool) -> Run:
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise ValueError(f"{overrides!r} is no override; allowed: a dict of dotted config fields")
    fields = dict(overrides)
    named = str(fields.pop(CONFIG, base))
    parts = [f"{field.rsplit('.', 1)[-1]}={value}" for field, value in fields.items()]
    if named != base:
        parts.insert(0, pathlib.Path(named.replace(".py", "")).name.replace(":", "_"))
    return Run(tiny(named) if small else named, fields, ",".join(parts).replace(" ", ""))


def load(path: str, *, small: bool = False) -> Experiment:
    """Read an experiment file; ``small`` takes the tiny variant of its configs.

    ValueError naming what is missing, and runs that are the same.
    """
    module = _module(path, f"experiment_{pathlib.Path(path).stem}")
    held = vars(module)
    if not isinstance(held.get("BASE"), str) or not ("sweep" in held or "search" in held):
        raise ValueError(f"{path}: allowed: BASE, and sweep() or search(trial)")
    given = _swept(path, held["sweep"]) if "sweep" in held else ()
    runs = [_run(module.BASE, each, small) for each in given]
    names = [run.name for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        numbers = [i for i, name in enumerate(names) if name == twice[0]]
        raise ValueError(f"{path}: runs {numbers} are the same: {twice[0]}")
    if "search" in held and not isinstance(held.get("GOAL"), str):
        raise ValueError(f"{path}: GOAL is missing; allowed: a field of summary.json, dotted")
    base = tiny(module.BASE) if small else module.BASE
    return Experiment(path, base, runs, held.get("search"), str(held.get("GOAL", "")))


def _swept(path: str, sweep: Callable[[], Any]) -> list[Any]:
    given = _theirs(f"{path}: sweep()", lambda: list(itertools.islice(sweep(), MOST_RUNS + 1)))
    if not 0 < len(given) <= MOST_RUNS:
        count = "no run" if not given else f"more than {MOST_RUNS} runs"
        raise ValueError(f"{path}: sweep() gives {count}; allowed: 1 to {MOST_RUNS}")
    return given


def runs_of(experiment: Experiment, overrides: Any, *, small: bool) -> list[Run]:
    """What a trial asks for: one override or several, such as seeds."""
    base = str(_module(experiment.path, "experiment_base").BASE)
    several = [overrides] if isinstance(overrides, Mapping) else list(overrides)
    return [_run(base, each, small) for each in several]


def config_of(run: Run) -> ConfigDict:
    """The locked config of a run. ValueError naming the override that does not fit."""
    path, _, variant = run.config.partition(":")
    config = _module(path, f"config_{pathlib.Path(path).stem}").get_config(variant)
    config.lock()
    for field, value in run.overrides.items():
        _set(config, field, value)
    return config


def _set(config: Any, field: str, value: Any) -> None:
    *parents, last = field.split(".")
    section, path = config, ""
    for name in parents:
        path = f"{path}.{name}" if path else name
        if name not in section and _OPEN.match(path):
            with section.unlocked():
                section[name] = ConfigDict()
        if name not in section:
            raise ValueError(f"{field}: {_unknown(path, section)}")
        section = section[name]
        if not isinstance(section, ConfigDict):
            raise ValueError(f"{field}: {path} is no section, but {section!r}")
    if last not in section and not _OPEN.match(".".join(parents)):
        raise ValueError(_unknown(field, section))
    with section.unlocked():
        try:
            section[last] = ConfigDict(value) if isinstance(value, Mapping) else value
        except TypeError as error:
            raise ValueError(f"{field}={value!r}: {error}") from error


def _unknown(field: str, section: Any) -> str:
    near = difflib.get_close_matches(field.rsplit(".", 1)[-1], list(section), 1)
    guess = f"; did you mean {near[0]}?" if near else ""
    return f"{field} is unknown; allowed: {', '.join(sorted(section))}{guess}"


def check(run: Run) -> ConfigDict:
    """``config_of``, with all that ``read`` reads. ValueError or TypeError naming the field."""
    config = config_of(run)
    read(config)
    return config


def read(config: ConfigDict) -> list[Any]:
    """The phases of a config, with every section and the method's own fields read as the run itself
    would. ValueError or TypeError naming the field."""
    from jaxrl.algorithms import contract
    from jaxrl.train import settings

    phases = settings.phases(config)
    for phase in phases:
        try:
            contract.load(**phase.algorithm)
        except (ValueError, TypeError) as error:
            raise type(error)(f"phases.{phase.name}: {error}") from error
    return phases


def state(workdir: epath.Path, config: Mapping[str, Any] | None = None) -> str:
    """finished, at step N, begun, or new. ValueError naming fields if a finished run had another
    ``config``: it would be passed over with what it was not asked for."""
    if not (workdir / "config.json").exists():
        return "new"
    if not (workdir / "summary.json").exists():
        steps = [int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()]
        return f"at step {max(steps)}" if steps else "begun"
    if config is not None:
        held, asked = (
            {name: section for name, section in whole.items() if name not in WATCHED}
            for whole in (
                json.loads((workdir / "config.json").read_text()),
                json.loads(json.dumps(config)),
            )
        )
        if changed := _differing(held, asked, ""):
            raise ValueError(
                f"{workdir} is finished, with another config: {'; '.join(changed[:4])}; allowed: "
                "the same, or another --workdir"
            )
    return "finished"


def _differing(held: Any, asked: Any, name: str) -> list[str]:
    if not (isinstance(held, Mapping) and isinstance(asked, Mapping)):
        return [] if held == asked else [f"{name} was {held!r}, is {asked!r}"]
    return [
        line
        for key in sorted({*held, *asked})
        for line in _differing(held.get(key), asked.get(key), f"{name}.{key}".lstrip("."))
    ]
