r"""SELF: learn from a tool's words, without a reward, after a start that teaches to read them.

python -m jaxrl.launch --config configs/self_feedback.py --workdir /tmp/self_feedback
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: SELF, §4 (weights, average, its learning rate is
    for adapters and ours is not). Rounds and updates a round are not stated there.
    """
    config: Any = base.get_config(variant)
    config.task.source = "jaxrl.tasks.tools"
    config.task.family = "lookup"
    config.task.parameters = ConfigDict(
        {
            "names": 26,
            "told_fraction": 0.5,  # of the tasks: a wrong call is told the code
            "shown_fraction": 0.85,  # of the tasks: the code is in the prompt; the warm start
        },
        convert_dict=False,
    )
    if variant != "tiny":
        config.task.update(train_prompts=3000, held_out_prompts=300)
        config.train.update(groups=128, steps=100)
    config.pool.update(rollouts_per_group=4, max_feedback_tokens=8)
    config.sampler.prompt_buckets = (16,)
    config.sampler.max_new_tokens = 6
    config.train.update(token_buckets=(32,), view_token_buckets=(32,), minibatches=2)
    config.algorithm = ConfigDict(
        {
            "name": "self_feedback",
            "feedback_weight": 0.2,
            "distillation_weight": 1.0,
        }
    )
    config.scorers.self.ema_rate = 0.99
    config.scorers.views = ConfigDict(
        {
            "with_feedback": "{prompt}{feedback}{response}",
            "as_environment": "{prompt}{response}{feedback}",
        }
    )
    config.phases = ConfigDict(
        {
            "order": ("sft", "self_feedback"),
            "sft": sft.warm_start(variant),
            "self_feedback": ConfigDict(),
        }
    )
    return config
