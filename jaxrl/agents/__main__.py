"""The agents' door: a config becomes a run of a system, or goes on with it.

    python -m jaxrl.agents --system NAME --config configs/agents/NAME.py[:variant] --workdir DIR
        [--config.field=value]

DIR/evo/NAME-s<seed>/ holds the journal and all that follows from it, DIR/report.md what was
proposed, accepted, refused, and why, DIR/tb the curves: one run has one DIR.
"""

import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

_SYSTEM = flags.DEFINE_string("system", None, "a name of jaxrl.agents.contract.SYSTEMS")
_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/agents/NAME.py[:variant]")
_WORKDIR = flags.DEFINE_string("workdir", None, "where the run is written: a folder")


def main(argv: list[str]) -> None:
    """Run the config. What was refused or went wrong ends with one message and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    from jaxrl.agents import drive, report  # when the flags are understood

    name, workdir = str(_SYSTEM.value), Path(str(_WORKDIR.value))
    try:
        config = drive.settings(_CONFIG.value.to_dict())
        root = workdir / "evo" / f"{name.replace(':', '-')}-s{config.seed}"
        if others := [one.name for one in root.parent.glob("*") if one.name != root.name]:
            raise ValueError(f"workdir={str(workdir)!r} holds another run, {others[0]}")
        drive.run(name, config, root, watch=lambda run: report.write(run.journal, workdir))
        print(f"{name}: {workdir / 'report.md'}")
    except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
        sys.exit(f"jaxrl.agents: {type(error).__name__}: {error}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["system", "config", "workdir"])
    app.run(main)
