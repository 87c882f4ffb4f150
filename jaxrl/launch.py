"""The only door: a config becomes a run.

    python -m jaxrl.launch --config configs/NAME.py[:variant] --workdir DIR [--config.field=value]

Starts the run that the config describes, or continues it where the newest checkpoint in DIR stands.
"""

import sys

from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file of configs/, with :variant.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where everything of the run is written; a folder or a bucket."
)


def main(argv: list[str]) -> None:
    """Run the config; a refused one or a broken pool ends with one clear message, exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    from jaxrl.train import rounds  # jax starts only after the flags are understood

    try:
        rounds.run(_CONFIG.value, _WORKDIR.value)
    except (ValueError, TypeError, rounds.RunError) as error:
        sys.exit(f"jaxrl.launch: {error}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
