r"""RLSD: GRPO's advantages, weighed token by token by a teacher that may not turn them round.

python -m jaxrl.launch --config configs/rlsd.py --workdir /tmp/rlsd
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, residual


def get_config(variant: str = "") -> ConfigDict:
    """The teacher is another model here; with teacher="self" it needs a view ``with_solution``."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "rlsd",
            "teacher": "teacher",  # teacher | reference, self: own weights behind a solution
            "share": 0.5,  # of the reweighting; 0: GRPO
            "band": 0.2,  # a token's weight lies in 1 -+ band
            "scale_by_std": True,
            "trust": base.TRUST,
        }
    )
    config.train.minibatches = 2
    config.phases = residual.teacher_then_student(variant, "rlsd")
    return config
