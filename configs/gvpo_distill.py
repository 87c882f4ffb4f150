r"""Group-variance distillation: a student follows a teacher by the text alone.

The teacher is the same model after a long supervised phase, and reads the student's texts in its
own tokens; the student starts anew with a short one. A teacher that was trained with another
tokenizer comes from another run: set scorers.teacher.weights to its weights, and its tokenizer and
model to what it was trained with.

python -m jaxrl.launch --config configs/gvpo_distill.py --workdir /tmp/gvpo_distill
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, residual


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: arXiv 2609.21432 (rollouts a group, epochs)."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "gvpo_distill",
            "alpha": 0.5,  # texts count by characters^-alpha; 0: alike
            "coupling": "written",  # written: whole groups in a micro-batch | weights: detached
            "keep_truncated": variant == "tiny",  # whose first weights seldom stop by themselves
        }
    )
    config.pool.rollouts_per_group = 4
    config.train.epochs = 2
    config.train.minibatches = 2
    config.phases = residual.teacher_then_student(variant, "gvpo_distill")
    return config
