"""Held-out accuracy of a run's published weights, as a job of its own.

    python -m jaxrl.measure --workdir RUN [--which newest|best|all] [--follow] [--prompts N]

It reads what the run has published and never touches what the run writes: results go to
``RUN/measured/v=<epoch>-<step>.json``, curves to ``RUN/measured/tb``. With ``--follow`` it waits
for new weights until the run is finished; the run itself may then have ``eval.every_steps=0`` and
keep its devices for training. What was measured before is not measured again.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from jaxrl.pool import deadline

_WORKDIR = flags.DEFINE_string("workdir", None, "of the run", allow_override=True)
_WHICH = flags.DEFINE_enum("which", "all", ["newest", "best", "all"], "of the kept weights")
_FOLLOW = flags.DEFINE_bool("follow", False, "go on until the run is finished")
_PROMPTS = flags.DEFINE_integer("prompts", 0, "0: eval.prompts of the run", lower_bound=0)
_POLL_S = flags.DEFINE_float("poll_s", 10.0, "seconds between two looks for new weights")


def chosen(workdir: Any, which: str) -> list[tuple[int, int]]:
    """(epoch, step) of the weights that are asked for and that are there."""
    published, best = workdir.published(), workdir.best()
    if which == "best":
        return [(best["epoch"], best["step"])] if best else []
    return published[-1:] if which == "newest" else published


def versions(workdir: Any, which: str, follow: bool, poll_s: float) -> Iterator[tuple[int, int]]:
    """Those, each once; with ``follow`` also those that are still to come, until the summary."""
    done: set[tuple[int, int]] = set()
    while True:
        finished = (workdir.root / "summary.json").exists()  # looked at before the weights
        for version in chosen(workdir, which):
            if version not in done:
                done.add(version)
                yield version
        if finished or not follow:
            return
        time.sleep(poll_s)


def measure(workdir: str, which: str, *, follow: bool, prompts: int, poll_s: float) -> int:
    """Measure; how many weights were. ValueError if the folder is no run."""
    from etils import epath

    from jaxrl.model import versions as weights
    from jaxrl.pool.rollout import Version
    from jaxrl.train import loop, rounds, settings
    from jaxrl.train.metrics import Logger
    from jaxrl.train.workdir import Workdir, write_json

    run = Workdir(epath.Path(workdir))
    if not (run.root / "config.json").exists():
        raise ValueError(f"{run.root} is no run: config.json is missing")
    held: Any = settings.read(json.loads((run.root / "config.json").read_text()))
    if prompts:
        held.eval.prompts = prompts
    phases, folder = settings.phases(held), run.root / "measured"
    parts = rounds.assemble(phases, run.root)
    logger, count = Logger(folder, start_step=0), 0
    for epoch, step in versions(run, which, follow, poll_s):
        path, result_path = run.weights(epoch, step), folder / f"v={epoch}-{step}.json"
        if result_path.exists():
            continue
        try:
            digest = weights.read_manifest(path)["digest"]
            parts.sampler.load(Version(epoch, step, digest), str(path))
        except (ValueError, FileNotFoundError) as error:
            print(f"{path.name} is gone, or not whole: {error}", flush=True)
            continue
        result = loop.accuracy(parts, phases[-1])
        write_json(result_path, result)
        k = result["k"]
        told = {f"avg_at_{k}": result["avg_at_k"], "greedy": result["greedy"]}
        logger.scalars(step, {f"eval/{name}": value for name, value in told.items()})
        logger.flush()
        stated = "  ".join(f"{name} {100 * value:.1f} %" for name, value in told.items())
        print(f"{path.name}: {stated}", flush=True)
        count += 1
    logger.close()
    return count


def main(argv: list[str]) -> None:
    """Measure. What was refused ends with one message and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        count = measure(
            str(_WORKDIR.value),
            _WHICH.value,
            follow=_FOLLOW.value,
            prompts=_PROMPTS.value,
            poll_s=_POLL_S.value,
        )
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        deadline.leave(f"jaxrl.measure: {type(error).__name__}: {error}")
    print(f"{count} weights measured")


if __name__ == "__main__":
    flags.mark_flags_as_required(["workdir"])
    app.run(main)
