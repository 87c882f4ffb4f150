r"""LoRA: a supervised warm start of the whole model, then GRPO that trains low-rank adapters only.

The base is bit for bit the warm start's from then on. `python -m jaxrl.export --workdir
/tmp/lora --to DIR` merges the adapters into it, `--adapters` saves them alone.

python -m jaxrl.launch --config configs/lora.py --workdir /tmp/lora
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import grpo


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: arXiv 2106.09685 (alpha twice the rank is common
    usage since).
    """
    config: Any = grpo.get_config(variant)
    config.model.adapter.update(rank=2 if variant == "tiny" else 8, alpha=16.0)
    config.optimizer.learning_rate = 1e-3  # adapters take about ten times that of full training
    phases: Any = config.phases
    phases.sft.optimizer.train = "base"  # the adapters are beside a model that has learnt to answer
    phases.lora = phases.grpo
    del phases["grpo"]
    phases.order = ("sft", "lora")
    return config
