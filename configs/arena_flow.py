r"""ArenaFlow: a supervised warm start, then tournaments in each group, decisive steps amplified.

python -m jaxrl.launch --config configs/arena_flow.py --workdir /tmp/arena_flow
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).

The judge is scripted (jaxrl/tasks/judged.py): it stands in for a language model. A response here is
a single step, so that every winner's tokens count alike.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """Source of the clips and of the weight of steps: arXiv 2609.21378 (0.2, 0.28; 1). ArenaRL is
    the same with step_weight 0 and scale_by_std on.
    """
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "arena_flow",
            "trust": base.TRUST | {"clip_high": 0.28},
            "step_weight": 1.0,  # of the steps that decided; 0: all steps count alike
            "scale_by_std": False,
            "dynamic_sampling": True,  # groups in which all are level are refused and refilled
        }
    )
    config.task.source = "jaxrl.tasks.judged"
    arena = {
        # anchor | round_robin | swiss | single_elimination | double_elimination
        "topology": "single_elimination",
        "swiss_rounds": 3,  # of swiss only
        "replays": 2,  # of a question that the judge failed on, then a coin decides
        "accuracy": 0.8,  # probability that the judge tells the better one
        "failure_rate": 0.02,  # of a single question
    }
    config.task.parameters = {**config.task.parameters.to_dict(), "arena": arena}
    config.train.minibatches = 2
    config.phases = ConfigDict(
        {
            "order": ("sft", "arena_flow"),
            "sft": sft.warm_start(variant),
            "arena_flow": ConfigDict(),
        }
    )
    return config
