"""The only door: a config becomes a run.

    python -m jaxrl.launch --config configs/NAME.py[:variant] --workdir DIR [--config.field=value]
        [--model_from CHECKPOINT]

Starts the run that the config describes, or continues it where the newest checkpoint in DIR stands.
With ``--model_from`` the form of the model is that of a published checkpoint; it is what stands in
the run's config.json then, and --config.train.start=CHECKPOINT takes the weights too.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]")
_WORKDIR = flags.DEFINE_string("workdir", None, "where the run is written: a folder or a bucket")
_MODEL_FROM = flags.DEFINE_string(
    "model_from", "", "a published checkpoint whose form fills config.model: a directory or .gguf"
)
_DEBUG = flags.DEFINE_bool("debug", False, "show where an error was raised")


def main(argv: list[str]) -> None:
    """Run the config. What was refused or went wrong ends with one message and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not _DEBUG.value:
        logging.set_verbosity(logging.WARNING)  # the checkpoint library tells of every file

    # Only now, when the flags are understood: this starts jax.
    from jaxrl.model import pretrained
    from jaxrl.train import rounds

    try:
        if _MODEL_FROM.value:
            _CONFIG.value.model.update(pretrained.read_config(_MODEL_FROM.value))
        rounds.run(_CONFIG.value, str(_WORKDIR.value))
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        if _DEBUG.value:
            raise
        sys.exit(f"jaxrl.launch: {type(error).__name__}: {error}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
