r"""Contrastive self-distillation: wrong answers, drawn to what a right one would make of them.

python -m jaxrl.launch --config configs/contrast.py --workdir /tmp/contrast
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """SDPO's attraction alone is sides="right", teacher="self" and an alpha below 1."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "contrast",
            "alpha": 1.0,  # 1: reverse KL, shared style cancels; below: generalised Jensen-Shannon
            "sides": "both",  # both | right: attraction alone | wrong: repulsion alone
            "teacher": "reference",  # reference: the phase's first weights | self: moving average
            "success": 1.0,  # a response is right from this reward on
            "kl_weight": 0.1,  # to the phase's first weights: without it nothing comes to rest
            "trust": base.TRUST,
        }
    )
    config.scorers.self.ema_rate = 0.95  # SDPO's
    # One template for both, of characters that the questions have.
    config.scorers.views = ConfigDict(
        {
            "with_solution": "{prompt} {solution} = {response}",
            "with_wrong_solution": "{prompt} {wrong} = {response}",
        }
    )
    config.train.view_token_buckets = (64,)
    config.phases = ConfigDict(
        {"order": ("sft", "contrast"), "sft": sft.warm_start(variant), "contrast": ConfigDict()}
    )
    return config
