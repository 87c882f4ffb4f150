r"""Co-RA: the residual advantage from a teacher that learns from the same verdicts.

Teacher and student are adapters over one base, a supervised warm start that stays bit for bit; the
teacher's have had a long supervised phase. For a student that is trained as a whole, beside a
teacher with adapters over a base of its own, or for a teacher that is trained as a whole too:

    --config.phases.co_residual.scorers.teacher.base=own
    --config.phases.co_residual.optimizer.train=base
    --config.phases.co_residual.scorers.teacher.optimizer.train=all

python -m jaxrl.launch --config configs/co_residual.py --workdir /tmp/co_residual
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, residual, sft


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
    config.model.adapter.update(rank=2 if variant == "tiny" else 8, alpha=16.0)
    config.optimizer.learning_rate = 1e-3  # of adapters
    config.train.minibatches = 2
    start: Any = sft.warm_start(variant)
    start.optimizer.train = "base"
    teacher: Any = sft.warm_start(variant)
    teacher.train.steps = 3 if variant == "tiny" else 1200
    # The teacher's optimizer says what differs from the student's: smaller steps of its adapters.
    section = {
        "weights": "teacher",
        "base": "student",
        "optimizer": {"learning_rate": 1e-4, "train": "adapters"},
    }
    method = {
        "train": {"start": "sft"},
        "optimizer": {"train": "adapters"},
        "scorers": {"teacher": section},
    }
    phases = {"sft": start, "teacher": teacher, "co_residual": method}
    config.phases = ConfigDict({"order": tuple(phases), **phases})
    return config
