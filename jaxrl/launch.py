"""The only door: a config becomes a run, an experiment file many.

    python -m jaxrl.launch --config configs/NAME.py[:variant] --workdir DIR [--config.field=value]
        [--model_from CHECKPOINT]
    python -m jaxrl.launch --experiment experiments/NAME.py --list | --index I | --all | --search N
        --workdir DIR [--tiny] [--jobs J]
    ... --mesh configs/meshes.py:NAME           devices on each axis, for a named slice
    ... --hosts NAME,NAME,... --process I       the same on every host, each with its number

Starts the run that the config describes, or continues it where the newest checkpoint in DIR stands.
With ``--model_from`` the form of the model is that of a published checkpoint; it is what stands in
the run's config.json then, and --config.train.start=CHECKPOINT takes the weights too.

Each run of an experiment has a folder of its own in DIR. --all passes over finished runs, continues
those that were broken off, and goes on behind one that fails. Exit code 75 says that the run was
told to stop, has saved, and wants to be started again.
"""

import sys
from collections.abc import Mapping
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from jaxrl import runner
from jaxrl.pool import deadline

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]")
_WORKDIR = flags.DEFINE_string("workdir", None, "where the run is written: a folder or a bucket")
_MESH = config_flags.DEFINE_config_file(
    "mesh", None, "configs/meshes.py:NAME, in the place of the config's or the sweep's mesh"
)
_MODEL_FROM = flags.DEFINE_string(
    "model_from", "", "a published checkpoint whose form fills config.model: a directory or .gguf"
)
_EXPERIMENT = flags.DEFINE_string("experiment", None, "experiments/NAME.py, in place of --config")
_LIST = flags.DEFINE_bool("list", False, "say which runs there are, and check each")
_INDEX = flags.DEFINE_integer("index", None, "start or continue one run of the experiment")
_ALL = flags.DEFINE_bool("all", False, "start or continue all runs, one after another")
_SEARCH = flags.DEFINE_integer("search", None, "so many trials of the experiment's search(trial)")
_TINY = flags.DEFINE_bool("tiny", False, "the variants :tiny of the experiment's configs")
_JOBS = flags.DEFINE_integer("jobs", 1, "runs at a time, of --all and --search", lower_bound=1)
_HOSTS = flags.DEFINE_list(
    "hosts", [], "one name a process, the same on all of them, in order; none: one process"
)
_PROCESS = flags.DEFINE_integer("process", 0, "this one's place among --hosts")
_PORT = flags.DEFINE_integer("port", 8476, "of the first host; the one above is used too")
_JOIN_S = flags.DEFINE_float("join_s", 300.0, "seconds after which missing hosts are named")
_LOST_S = flags.DEFINE_integer("lost_s", 100, "seconds of silence after which a host is lost")
_PROFILE = flags.DEFINE_integer(
    "profile", 0, "trace so many steps for TensorBoard, from the second one on", lower_bound=0
)
_DEBUG = flags.DEFINE_bool("debug", False, "show where an error was raised")


def main(argv: list[str]) -> None:
    """Run what was asked for. What was refused or went wrong ends with one message and exit code
    1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not _DEBUG.value:
        logging.set_verbosity(logging.WARNING)  # the checkpoint library tells of every file
    try:
        code = _experiment() if _EXPERIMENT.value else _one()
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        if _DEBUG.value:
            raise
        deadline.leave(f"jaxrl.launch: {type(error).__name__}: {error}")
    sys.exit(code)


def _one() -> int:
    """A config as a run."""
    # Only now, when the flags are understood: this starts jax.
    from jaxrl.model import pretrained

    if _MODEL_FROM.value:
        _CONFIG.value.model.update(pretrained.read_config(_MODEL_FROM.value))
    return _start(_CONFIG.value, str(_WORKDIR.value))


def _start(config: Any, workdir: str, swept: Mapping[str, Any] | None = None) -> int:
    """Join the other hosts, if there are any, and run."""
    from jaxrl.train import heap, hosts, rounds

    heap.keep()
    if _MESH.value is not None:
        config.mesh.update(_MESH.value)
    if _HOSTS.value:
        hosts.join(
            _HOSTS.value,
            _PROCESS.value,
            port=_PORT.value,
            join_s=_JOIN_S.value,
            lost_s=_LOST_S.value,
        )
    hosts.heed_sigterm()
    try:
        rounds.run(config, workdir, swept=swept, profile=_PROFILE.value)
    except hosts.Preempted as stop:
        print(f"jaxrl.launch: {stop}; the same command continues", flush=True)
        return runner.PREEMPTED
    return 0


def _experiment() -> int:
    """What was asked of an experiment."""
    asked = runner.Asked(
        str(_EXPERIMENT.value),
        _WORKDIR.value or "",
        tiny=_TINY.value,
        jobs=_JOBS.value,
        words=_joining(),
    )
    verbs = [_LIST.value, _INDEX.value is not None, _ALL.value, _SEARCH.value is not None]
    if sum(verbs) != 1:
        raise ValueError("allowed: one of --list, --index I, --all, --search N")
    if _LIST.value:
        return runner.tell(asked)
    if not _WORKDIR.value:
        raise ValueError("--workdir is missing; allowed: a folder or a bucket for the runs")
    if _INDEX.value is not None:
        return runner.run_one(asked, _INDEX.value, _start)
    return runner.run_all(asked) if _ALL.value else runner.run_search(asked, _SEARCH.value or 0)


def _joining() -> tuple[str, ...]:
    """The flags with which a run's own process takes the same mesh and joins the same hosts."""
    words: tuple[str, ...] = ()
    if _MESH.value is not None:
        words = (f"--mesh={config_flags.get_config_filename(flags.FLAGS['mesh'])}",)
    if not _HOSTS.value:
        return words
    said = {
        "hosts": ",".join(_HOSTS.value),
        "process": _PROCESS.value,
        "port": _PORT.value,
        "join_s": _JOIN_S.value,
        "lost_s": _LOST_S.value,
    }
    return (*words, *(f"--{name}={value}" for name, value in said.items()))


def _complete(values: dict[str, object]) -> bool:
    return bool(values["experiment"]) or None not in (values["config"], values["workdir"])


if __name__ == "__main__":
    flags.register_multi_flags_validator(
        ["config", "workdir", "experiment"],
        _complete,
        message="allowed: --config and --workdir, or --experiment",
    )
    app.run(main)
