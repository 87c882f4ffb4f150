r"""A mixture of experts under GRPO: what becomes of its routers, by config.

The warm start evens the experts' loads (``train.balance_weight``); GRPO does without. As it stands
its routers are free and the sampler's routes are recorded, so that ``router/...`` tells loads,
drift and how often sampler and trainer choose the same experts. In the phase ``grpo``,
``optimizer.freeze=("router/",)`` freezes the routers and ``train.routes="replayed"`` has training
follow the recorded routes. See experiments/router_freeze.py.

python -m jaxrl.launch --config configs/router.py --workdir /tmp/router
Takes: 6 min (one core, loaded).   Reaches: held-out avg@4 70.9 % (seed 0, e1c5355, 2026-11-30).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import grpo


def get_config(variant: str = "") -> ConfigDict:
    """32 experts of which a token takes 2 (8 as tiny), on sums of two numbers."""
    config: Any = grpo.get_config(variant)
    tiny = variant == "tiny"
    config.model.family = "qwen3_moe"
    config.model.experts.update(
        count=8 if tiny else 32, per_token=2, hidden=16 if tiny else 96, normalise=True
    )
    config.task.parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    config.sampler.record_routes = True
    config.phases.sft.train.balance_weight = 0.01
    config.phases.grpo = ConfigDict(
        {
            "optimizer": {"freeze": (), "rates": ()},
            # by name, so that its weights stay on disk, for jaxrl.restore_router
            "train": {"routes": "free", "start": "sft"},
        }
    )
    return config
