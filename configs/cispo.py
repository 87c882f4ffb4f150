r"""CISPO: a supervised warm start, then policy gradients under a held ratio.

python -m jaxrl.launch --config configs/cispo.py --workdir /tmp/cispo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """Source: arXiv 2506.13585 (no lower bound); the cap is what public recipes call epsilon 4."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "cispo",
            "ratio_cap": 5.0,  # absolute, not 1 + epsilon
            "ratio_floor": 0.0,  # absolute; 0: none
            "mismatch_cap": 2.0,  # on trainer over sampler probability; inf: not corrected
        }
    )
    config.train.minibatches = 2
    config.phases = ConfigDict(
        {"order": ("sft", "cispo"), "sft": sft.warm_start(variant), "cispo": ConfigDict()}
    )
    return config
