r"""Supervised training on the task's right answers; also the warm start of the other methods.

python -m jaxrl.launch --config configs/sft.py --workdir /tmp/sft
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, models


def warm_start(variant: str) -> ConfigDict:
    """Overrides of a supervised phase: demonstrations are recorded groups of one rollout."""
    tiny = variant == "tiny"
    rollouts = models.rollouts(variant) if variant in models.NAMES else 256
    return ConfigDict(
        {
            "algorithm": {"name": "sft"},
            "pool": {"kind": "recorded", "rollouts_per_group": 1, "publish_every_steps": 0},
            "optimizer": {"learning_rate": 1e-3},
            "train": {
                "steps": 2 if tiny else 300,
                "groups": 16 if tiny else rollouts,
                "epochs": 1,
                "minibatches": 1,
                "micro_rollouts": 16 if tiny else rollouts,
            },
        }
    )


def get_config(variant: str = "") -> ConfigDict:
    """The same, as a run of its own."""
    config: Any = base.get_config(variant)
    phase: Any = warm_start(variant)
    config.algorithm = phase.algorithm
    config.pool.update(phase.pool)
    config.optimizer.update(phase.optimizer)
    config.train.update(phase.train)
    return config
