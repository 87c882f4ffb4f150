r"""PRAXIS: a warm start, then reinforcement on graph problems, more of those that still go wrong.

python -m jaxrl.launch --config configs/praxis.py --workdir /tmp/praxis
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft


def universes() -> ConfigDict:
    """Reasoning Gym's graph families in sizes that a small model can read."""
    three, four = ({"min_rows": n, "max_rows": n, "min_cols": n, "max_cols": n} for n in (3, 4))
    islands = {"max_num_islands": 3, "max_island_size": 4}
    return ConfigDict(
        {
            "course_schedule": {"min_num_courses": 3, "max_num_courses": 4},
            "family_relationships": {"min_family_size": 4, "max_family_size": 5},
            "largest_island:3x3": three | islands,
            "largest_island:4x4": four | islands,
            "shortest_path:3x3": three,
            "shortest_path:4x4": four,
        },
        convert_dict=False,
    )


def get_config(variant: str = "") -> ConfigDict:
    """The paper states none of these numbers: they are ours."""
    config: Any = base.get_config(variant)
    config.task.source = "jaxrl.tasks.graphs"
    config.task.family = "graphs"
    config.task.parameters = universes()
    config.pool.tokenizer_vocab_size = config.model.vocab_size = 256
    config.sampler.max_new_tokens = 16
    config.sampler.prompt_buckets = (320,)
    config.train.token_buckets = (336,)
    config.train.minibatches = 2
    if variant == "tiny":
        config.task.update(train_prompts=60, held_out_prompts=12)
    else:
        config.task.update(train_prompts=6000, held_out_prompts=300)
        config.train.micro_rollouts = 64
    config.algorithm = ConfigDict(
        {
            "name": "praxis",
            "trust": base.TRUST,
            "consistency_weight": 0.1,  # of the rules' picks, against the reward
            "consistency_cap": 5.0,  # nats: less likely responses are not pulled
            "correction_cap": 0.0,  # 0: the sampler's own objective | > 0: that of equal draws
        }
    )
    moving = {"move": "bounded", "rules": ("majority", "likeliest", "shortest", "rarest")}
    config.phases = ConfigDict(
        {
            "order": ("sft", "praxis"),
            "sft": sft.warm_start(variant),
            "praxis": {"train": {"curriculum": moving}},
        }
    )
    return config
