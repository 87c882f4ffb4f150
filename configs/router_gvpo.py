r"""A mixture of experts under GVPO: ``configs/router.py`` with another method after the warm start.

python -m jaxrl.launch --config configs/router_gvpo.py --workdir /tmp/router_gvpo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import gvpo, router


def get_config(variant: str = "") -> ConfigDict:
    """The phase ``gvpo`` stands where ``grpo`` stood, with the same fields to override."""
    config: Any = router.get_config(variant)
    config.algorithm = gvpo.get_config(variant).algorithm
    config.phases.order = ("sft", "gvpo")
    config.phases.gvpo = config.phases.grpo
    del config.phases.grpo
    return config
