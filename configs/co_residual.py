r"""Co-RA: the residual advantage from a teacher that learns from the same verdicts.

python -m jaxrl.launch --config configs/co_residual.py --workdir /tmp/co_residual
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, residual


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: a public re-implementation (lambda)."""
    config: Any = base.get_config(variant)
    tight = {"clip_low": 0.1, "clip_high": 0.1, "mismatch": "none"}  # the rollouts are not its own
    config.algorithm = ConfigDict(
        {
            "name": "co_residual",
            "student": residual.learning(10.0),
            "teacher_trust": base.TRUST | tight,
        }
    )
    config.train.minibatches = 2
    phases: Any = residual.teacher_then_student(variant, "co_residual")
    # What is trained of the teacher; the embedding is its head too, and stays.
    phases.co_residual.scorers.teacher.optimizer = ConfigDict(
        {"learning_rate": 3e-5, "freeze": ("embedding",)}
    )
    config.phases = phases
    return config
