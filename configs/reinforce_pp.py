r"""REINFORCE++: a supervised warm start, then returns whitened over the take; no groups.

python -m jaxrl.launch --config configs/reinforce_pp.py --workdir /tmp/reinforce_pp
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """As many rollouts a step as the group methods, each of another prompt.

    For the variant with the prompt's mean: group_baseline on, and groups as in base.py.
    """
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "reinforce_pp",
            "trust": base.TRUST,
            "group_baseline": False,  # true: the prompt's mean goes first, and the KL in the loss
            "kl_weight": 0.0,  # of KL(policy, reference), in the reward; 0: no reference is scored
            "discount": 1.0,
        }
    )
    config.train.update(groups=config.train.groups * config.pool.rollouts_per_group, minibatches=2)
    config.pool.rollouts_per_group = 1
    config.phases = ConfigDict(
        {
            "order": ("sft", "reinforce_pp"),
            "sft": sft.warm_start(variant),
            "reinforce_pp": ConfigDict(),
        }
    )
    return config
