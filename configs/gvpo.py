r"""GVPO: a supervised warm start, then group variance policy optimisation on own rollouts.

python -m jaxrl.launch --config configs/gvpo.py --workdir /tmp/gvpo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, models, sft


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: arXiv 2504.19599's scripts (beta)."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "gvpo",
            "beta": 0.1,  # in units of reward: how much leaving the anchor costs
            "anchor": "frozen",  # frozen: the weights at the phase's start | start: at the take's
            "unit_grad": True,  # divide by beta, so that beta does not also scale the step
            "coupling": "written",  # written: whole groups in a micro-batch | weights: detached
            "keep_truncated": variant == "tiny",  # whose first weights seldom stop by themselves
            "strata": False,  # groups hold fixed numbers of rollouts of several policies
        }
    )
    if not variant:  # tiny has too few groups for many devices; TPUs' kernels want plain rows
        config.train.packing.rows = "packed"
    config.train.minibatches = (
        1 if variant in models.NAMES else 2
    )  # with one, and the anchor at the take's start, beta does nothing
    config.phases = ConfigDict(
        {"order": ("sft", "gvpo"), "sft": sft.warm_start(variant), "gvpo": ConfigDict()}
    )
    return config
