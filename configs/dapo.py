r"""DAPO: a supervised warm start, then decoupled clip, dynamic sampling and overlong shaping.

python -m jaxrl.launch --config configs/dapo.py --workdir /tmp/dapo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """Source of the clips and of the buffer's share: arXiv 2503.14476 (0.2, 0.28; a fifth)."""
    config: Any = base.get_config(variant)
    limit = config.sampler.max_new_tokens
    config.algorithm = ConfigDict(
        {
            "name": "dapo",
            "trust": base.TRUST | {"clip_high": 0.28},
            # Groups whose rewards are all equal are refused and refilled; a tiny warm start is
            # never right, so all of its groups would be.
            "dynamic_sampling": variant != "tiny",
            "overlong_penalty": 1.0,  # taken off the reward at the limit; 0: no shaping
            "overlong_limit_tokens": limit,
            "overlong_buffer_tokens": max(1, limit // 5),
            "drop_truncated": False,
        }
    )
    config.train.minibatches = 2
    config.phases = ConfigDict(
        {"order": ("sft", "dapo"), "sft": sft.warm_start(variant), "dapo": ConfigDict()}
    )
    return config
