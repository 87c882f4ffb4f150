r"""Residual advantage: GRPO's advantages, plus what a teacher says of each token.

The teacher is the same model after a long supervised phase; the student starts anew with a short
one, and then learns from its own rollouts.

python -m jaxrl.launch --config configs/residual.py --workdir /tmp/residual
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def teacher_then_student(variant: str, method: str) -> ConfigDict:
    """Phases: a teacher, a new student with fewer steps of the same, then the method with both."""
    teacher: Any = sft.warm_start(variant)
    teacher.train.steps = 3 if variant == "tiny" else 1200
    student: Any = sft.warm_start(variant)
    student.train.start = "fresh"
    return ConfigDict(
        {
            "order": ("teacher", "sft", method),
            "teacher": teacher,
            "sft": student,
            method: {"scorers": {"teacher": {"weights": "teacher"}}},
        }
    )


def learning(weight: float) -> ConfigDict:
    """Fields of jaxrl/algorithms/residual.py."""
    return ConfigDict(
        {
            "trust": base.TRUST,
            "residual_weight": weight,  # lambda; 0: GRPO, and no teacher is scored
            "center_responses": True,
            "teacher_top": 0,  # the teacher's likeliest tokens that are compared; 0: all
            "verifier": "scaled",  # GRPO | centred: Dr. GRPO | whitened: REINFORCE++
            "weighting": "rollout_mean",
        }
    )


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: a public re-implementation (lambda)."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict({"name": "residual", **learning(1.0)})
    config.train.minibatches = 2
    config.phases = teacher_then_student(variant, "residual")
    return config
