r"""The main job: a model of about one million parameters learns two-term sums, on two CPU cores.

A short supervised warm start on few right answers, until it is right now and then; then GVPO from
its own rollouts on all questions of the train split.

python -m jaxrl.launch --config configs/quickstart.py --workdir /tmp/quickstart
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import gvpo


def get_config(variant: str = "") -> ConfigDict:
    """GVPO's own config; numbers that are this job's alone are set here."""
    config: Any = gvpo.get_config(variant)
    if variant == "tiny":
        return config
    config.task.parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    config.task.train_prompts = 12000
    config.sampler.update(max_new_tokens=5, prompt_buckets=(12,), slots=768)
    config.train.update(
        steps=150, groups=96, minibatches=2, micro_rollouts=384, token_buckets=(17,)
    )
    config.optimizer.update(
        learning_rate=3e-4, warmup_updates=10, decay_updates=300, final_fraction=0.05, b2=0.99
    )
    config.log.samples_every_steps = 25
    config.phases.sft.update(
        {
            "optimizer": {
                "learning_rate": 2e-3,
                "warmup_updates": 30,
                "b2": 0.95,
                "decay_updates": 0,
            },
            "pool": {"demonstrations": 4000},
            "train": {"steps": 300, "groups": 128, "micro_rollouts": 128},
        }
    )
    return config
