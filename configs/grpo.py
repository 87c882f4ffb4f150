r"""GRPO: a supervised warm start, then group-relative advantages under a clipped ratio.

python -m jaxrl.launch --config configs/grpo.py --workdir /tmp/grpo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """Dr. GRPO is the same with scale_by_std off and weighting="fixed_length"."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "grpo",
            "trust": base.TRUST,
            "kl_weight": 0.0,  # of KL(policy, reference); 0: no reference is scored
            "scale_by_std": True,
            "full_group": 0.0,  # group size whose scale all groups get; 0: no factor, inf: n/(n-1)
            "mask_limit": float("inf"),  # nats a token; inf: bad rollouts are never dropped
            "dynamic_sampling": False,  # refuse groups whose rewards are all equal, and refill
            "weighting": "rollout_mean",
            "length_tokens": 0,  # of weighting="fixed_length" only: sampler.max_new_tokens
        }
    )
    if variant != "tiny":  # whose few groups do not divide over many devices
        config.train.packing.rows = "packed"
    config.train.minibatches = 2
    config.phases = ConfigDict(
        {"order": ("sft", "grpo"), "sft": sft.warm_start(variant), "grpo": ConfigDict()}
    )
    return config
