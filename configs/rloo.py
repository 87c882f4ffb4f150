r"""RLOO: a supervised warm start, then REINFORCE against the mean of the prompt's others.

python -m jaxrl.launch --config configs/rloo.py --workdir /tmp/rloo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """One update a take: nothing holds a second one close to the policy that sampled."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "rloo",
            "mismatch_cap": 2.0,  # on trainer over sampler probability; inf: not corrected
        }
    )
    config.phases = ConfigDict(
        {"order": ("sft", "rloo"), "sft": sft.warm_start(variant), "rloo": ConfigDict()}
    )
    return config
