r"""GSPO: a supervised warm start, then group-relative advantages under a whole response's ratio.

python -m jaxrl.launch --config configs/gspo.py --workdir /tmp/gspo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """Source of the clips: arXiv 2507.18071 (3e-4, 4e-4), for responses of thousands of tokens.

    The mean of few log-ratios moves further: with the short responses here the clips are ours.
    """
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "gspo",
            "trust": base.TRUST | {"clip_low": 0.03, "clip_high": 0.04},
        }
    )
    config.train.minibatches = 2
    config.phases = ConfigDict(
        {"order": ("sft", "gspo"), "sft": sft.warm_start(variant), "gspo": ConfigDict()}
    )
    return config
