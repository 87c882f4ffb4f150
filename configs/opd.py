r"""On-policy distillation: a long supervised teacher marks the tokens of a short-trained student.

python -m jaxrl.launch --config configs/opd.py --workdir /tmp/opd
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, residual


def get_config(variant: str = "") -> ConfigDict:
    """GKD is estimator="full", divergence="jsd" with an alpha, and phases on a recorded pool for
    its off-policy share.
    """
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "opd",
            "estimator": "sampled",  # sampled | full: over the vocabulary | top_k: and a tail
            "divergence": "reverse",  # reverse | forward | jsd
            "alpha": 0.0,  # of divergence="jsd" only: the teacher's share in the mixture
            "top_k": 0,  # of estimator="top_k" only: tokens that are kept
            "support": "",  # of estimator="top_k" only: whose, student | teacher
            "discount": 0.0,  # of later tokens' advantages; 1: reverse KL of whole responses
            "trust": base.TRUST,
        }
    )
    config.phases = residual.teacher_then_student(variant, "opd")
    return config
