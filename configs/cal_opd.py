r"""Cal-OPD: distillation from a teacher that is believed where verdicts do not sway it.

The teacher of this config has seen plain questions only: what it makes of a verdict is noise, which
is one way of being swayed.

python -m jaxrl.launch --config configs/cal_opd.py --workdir /tmp/cal_opd
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, residual


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: arXiv 2609.21619 (width)."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "cal_opd",
            "width": 5.0,  # lambda: moves of the teacher that the interval is wide; 0: OPD
            "trust": base.TRUST,
        }
    )
    # The words are made of letters that the questions have: the tokenizer knows no others.
    config.scorers.views = ConfigDict(
        {
            "judged_right": "{prompt} right: {response}",
            "judged_wrong": "{prompt} wrong: {response}",
        }
    )
    config.train.view_token_buckets = (64,)
    config.phases = residual.teacher_then_student(variant, "cal_opd")
    return config
