r"""Dr. GRPO: a supervised warm start, then rewards less their group's mean, over a constant length.

python -m jaxrl.launch --config configs/dr_grpo.py --workdir /tmp/dr_grpo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """The constant is the longest response allowed, never the width of a batch."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "dr_grpo",
            "trust": base.TRUST,
            "length_tokens": config.sampler.max_new_tokens,
        }
    )
    config.train.minibatches = 2
    config.phases = ConfigDict(
        {"order": ("sft", "dr_grpo"), "sft": sft.warm_start(variant), "dr_grpo": ConfigDict()}
    )
    return config
