r"""PPO: a supervised warm start, then advantages of a value model that learns beside the policy.

python -m jaxrl.launch --config configs/ppo.py --workdir /tmp/ppo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """As many rollouts a step as the group methods, each of another prompt."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "ppo",
            "trust": base.TRUST,
            "returns": {
                "value": True,  # false: the take's mean is the only baseline
                "discount": 1.0,
                "trace": 0.95,  # lambda of the advantage estimation; 1 without a value
                "kl_weight": 0.0,  # of KL(policy, reference), in the reward; 0: not scored
            },
            "value_clip": 0.2,  # how far an update may move a value, in units of reward
            "whiten": True,
        }
    )
    config.scorers.value.optimizer = ConfigDict({"learning_rate": 1e-3})
    config.train.update(groups=config.train.groups * config.pool.rollouts_per_group, minibatches=2)
    config.pool.rollouts_per_group = 1
    config.phases = ConfigDict(
        {"order": ("sft", "ppo"), "sft": sft.warm_start(variant), "ppo": ConfigDict()}
    )
    return config
