r"""The main job: a model of about one million parameters learns three-term sums, on two CPU cores.

A short supervised warm start until it is right now and then, then GVPO from its own rollouts.

python -m jaxrl.launch --config configs/quickstart.py --workdir /tmp/quickstart
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import gvpo


def get_config(variant: str = "") -> ConfigDict:
    """GVPO's own config; numbers that are this job's alone are set here."""
    config: Any = gvpo.get_config(variant)
    return config
