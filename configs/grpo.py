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
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 3.0,  # bound on the ratio where the advantage is negative; inf: none
            "kl_weight": 0.0,  # of KL(policy, reference); 0: no reference is scored
            "mismatch_cap": 2.0,  # on trainer over sampler probability; inf: not corrected
            "scale_by_std": True,
            "weighting": "rollout_mean",
            "length_tokens": 0,  # of weighting="fixed_length" only: sampler.max_new_tokens
        }
    )
    config.train.minibatches = 2
    config.phases = ConfigDict(
        {"order": ("sft", "grpo"), "sft": sft.warm_start(variant), "grpo": ConfigDict()}
    )
    return config
