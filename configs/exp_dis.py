r"""ExpDis: rounds of an explorer, a filter, a student that copies, and the student's own practice.

python -m jaxrl.launch --config configs/exp_dis.py --workdir /tmp/exp_dis
Takes: unmeasured.   Reaches: unmeasured (held-out avg@4, commit, date).

Explorer and student of a round start from the student of the round before; only the student's
weights go on. Rounds share no prompt. The phases explorer_<n>, distil_<n> and student_<n> are one
round; summary.json says what each has cost.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, sft

NOVELTY_WEIGHTS = (0.75, 0.5)  # of each round; the paper's: 0.5 for one, .75 .5 .35 .25 for four
EXPLORER_STEPS, STUDENT_STEPS = 200, 100  # of all rounds, one update each


def shares(total: int, rounds: int) -> list[int]:
    """The total split evenly, what is left over first."""
    return [total // rounds + (n < total % rounds) for n in range(rounds)]


def one_round(
    number: int, weights: tuple[float, ...], steps: tuple[int, int], before: str, config: Any
) -> dict[str, Any]:
    """Phases of a round, by name. ``before`` is the phase whose last student it starts from."""
    pool = {"shard": number, "shards": len(weights)}
    explorer = f"explorer_{number + 1}"
    return {
        explorer: {
            "algorithm": {**config.algorithm, "novelty_weight": weights[number]},
            "train": {"start": before, "steps": steps[0]},
            "pool": {**pool},
        },
        f"distil_{number + 1}": {
            "algorithm": {"name": "sft"},
            "train": {
                "start": before,
                "steps": 2 * config.pool.survivors,  # at most; it ends with its second pass
                "groups": 1,
                "micro_rollouts": 1,
            },
            "pool": {
                "kind": "recorded",
                "path": explorer,  # its records, filtered
                "rollouts_per_group": 1,
                "epochs": 2,
                "publish_every_steps": 0,
            },
            "optimizer": {"warmup_updates": 0},
        },
        f"student_{number + 1}": {
            "algorithm": {**config.algorithm, "novelty_weight": 0.0},
            "train": {"steps": steps[1]},
            "pool": {**pool},
            "optimizer": {"learning_rate": config.optimizer.learning_rate / 5, "warmup_updates": 0},
        },
    }


def get_config(variant: str = "") -> ConfigDict:
    """Source of the numbers that are not ours: arXiv 2610.10536 (clips, rollouts, passes, steps,
    share of the learning rates, predictor; novelty weights of the first two of four rounds).
    """
    config: Any = base.get_config(variant)
    tiny, limit = variant == "tiny", config.sampler.max_new_tokens
    config.algorithm = ConfigDict(
        {
            "name": "exp_dis",
            "trust": base.TRUST | {"clip_high": 0.28},
            "novelty_weight": NOVELTY_WEIGHTS[0],  # of novelty against the verdict's +-1
            "length_tokens": limit,
            # groups whose total reward cannot vary are refilled; first weights are never right
            "dynamic_sampling": not tiny,
            "overlong_penalty": 1.0,  # taken off the reward at the limit; 0: no shaping
            "overlong_limit_tokens": limit,
            "overlong_buffer_tokens": max(1, limit // 5),
        }
    )
    config.scorers.views = ConfigDict({"response_only": "{response}"})
    config.scorers.novelty = ConfigDict(
        {
            "hidden": 32 if tiny else 512,  # width and output of the random networks
            "optimizer": {"learning_rate": 1e-4, "warmup_updates": 0, "b2": 0.999},
        }
    )
    config.train.view_token_buckets = (limit,)
    if tiny:
        config.pool.update(survivors=2, rollouts_per_group=8)
    else:
        config.pool.update(rollouts_per_group=16, max_refills=8)
        config.train.update(groups=16, micro_rollouts=256)
    weights = NOVELTY_WEIGHTS[:1] if tiny else NOVELTY_WEIGHTS
    explorers = shares(2 if tiny else EXPLORER_STEPS, len(weights))
    students = shares(2 if tiny else STUDENT_STEPS, len(weights))
    phases: dict[str, Any] = {"sft": sft.warm_start(variant)}
    for number, steps in enumerate(zip(explorers, students, strict=True)):
        phases |= one_round(number, weights, steps, [*phases][-1], config)
    config.phases = ConfigDict({"order": (*phases,), **phases})
    return config
