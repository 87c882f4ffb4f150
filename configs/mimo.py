r"""MiMo-V2.6: a supervised warm start, then advantages handed out by the quality of the passes.

python -m jaxrl.launch --config configs/mimo.py --workdir /tmp/mimo
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).

The grader is scripted (jaxrl/tasks/graded.py): it stands in for a language model.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def get_config(variant: str = "") -> ConfigDict:
    """Numbers of MiMo-V2.6's report as notes tell them; slack, full and the spread are ours."""
    config: Any = base.get_config(variant)
    config.algorithm = ConfigDict(
        {
            "name": "mimo",
            "grading": "redistribution",  # redistribution (online) | product (offline rubrics)
            "least_spread": 0.05,  # product: qualities with a smaller std count as 1
            "cap": 1.5,  # on the factor that makes up for qualities below 1
            "band": {  # ratios of current policy over sampler that are trained, by sign
                "positive_low": 0.2,
                "positive_high": 5.0,
                "negative_low": 0.2,
                "negative_high": 5.0,
            },
            "length": {
                "penalty": 0.2,  # the most that a long pass loses; 0: length is no matter
                "quantile": 0.3,  # of the passes' lengths, against which they are measured
                "pass_rate": 0.5,  # in groups that pass more often
                "slack": 0.2,  # so much longer, as a share, costs nothing
                "full": 2.0,  # so much longer costs the whole penalty
                "power": 1.5,
            },
            "segments": {  # needs the fact "token_flagged", which this grader does not give
                "use": False,
                "harsher": 2.0,
                "most": 2.0,
                "least": 0.5,
            },
            "dynamic_sampling": True,
        }
    )
    config.task.source = "jaxrl.tasks.graded"
    grader = {
        "noise": 0.05,  # std of what is added to a quality
        "least": 0.05,  # lowest grade
        "exploit_below": 0.5,  # a pass of which the answer is a smaller share is an exploit
        "missed": 0.1,  # probability that an exploit is not flagged
        "false_flags": 0.01,  # probability that an honest pass is
        "failure_rate": 0.02,  # probability that a group comes back without usable grades
    }
    config.task.parameters = {**config.task.parameters.to_dict(), "grader": grader}
    config.train.minibatches = 2
    warm: Any = sft.warm_start(variant)
    if variant == "tiny":  # right now and then after seconds: grades are of passes
        config.task.parameters.update(min_terms=2, max_terms=2, max_digits=1)
        warm.optimizer.learning_rate = 1e-2
        warm.train.steps = 100
        warm.checkpoint = {"every_steps": 100}
    config.phases = ConfigDict({"order": ("sft", "mimo"), "sft": warm, "mimo": ConfigDict()})
    return config
