"""Do GVPO and GRPO want the same learning rate on the main job?

Look at: held-out avg@4 and greedy accuracy at the end (python -m jaxrl.compare), reward, entropy.
Expect: GVPO's anchor bears the higher rate better.
Result: open.
"""

from jaxrl.sweep import grid

BASE = "configs/quickstart.py"
GOAL = "held_out.after.greedy"


def sweep():
    """Overrides of each run."""
    return grid(
        {
            "config": (BASE, "configs/quickstart.py:grpo"),
            "optimizer.learning_rate": (1e-4, 3e-4),
            "seed": (0, 1),
        }
    )


def search(trial):
    """Overrides of a trial: both seeds at a rate that Optuna chooses."""
    rate = trial.suggest_float("optimizer.learning_rate", 1e-5, 3e-3, log=True)
    return grid({"optimizer.learning_rate": (rate,), "seed": (0, 1)})
