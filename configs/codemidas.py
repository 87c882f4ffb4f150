r"""CodeMidas: GRPO on hidden tests, of tasks whose rollouts neither all pass nor all fail.

python -m jaxrl.launch --config configs/codemidas.py --workdir /tmp/codemidas
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).

A group whose rewards are all equal is refused and another task drawn in its place; the gates that
screen tasks before training are in jaxrl/tasks/screening.py. Source: arXiv 2609.22068 (a binary
reward; there 32 tasks of 32 rollouts a step).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import cover, grpo


def get_config(variant: str = "") -> ConfigDict:
    """GRPO's own config on code."""
    config: Any = grpo.get_config(variant)
    task: Any = cover.code_task(variant, testers=0, kept=0)
    config.task.parameters = ConfigDict(task.pop("parameters"))
    config.task.update(task)
    config.sampler.max_new_tokens = 16
    config.algorithm.dynamic_sampling = True
    warm: Any = config.phases.sft
    if variant == "tiny":  # until programs pass now and then
        config.task.held_out_prompts = 8  # expressions of one operator are few
        warm.optimizer.learning_rate = 1e-2
        warm.train.steps = 60
        config.checkpoint.every_steps = 30
    config.phases = ConfigDict(
        {"order": ("sft", "codemidas"), "sft": warm, "codemidas": ConfigDict()}
    )
    return config
