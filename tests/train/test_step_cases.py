"""What the whole step makes of inputs on which other trainers went wrong, and whom it favours."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import load, names
from jaxrl.pool.rollout import ACTION, FEEDBACK, PROMPT
from tests.train.test_step import GRPO, TRUST, run, trained
from tests.train.toy import Bigram, batch_of, group, rollout

PARAMETERS = {
    "sft": {},
    "rloo": {"mismatch_cap": 2.0},
    "grpo": GRPO,
    "dapo": {
        "trust": TRUST,
        "dynamic_sampling": True,
        "overlong_penalty": 0.0,
        "overlong_limit_tokens": 4,
        "overlong_buffer_tokens": 1,
        "drop_truncated": False,
    },
    "dr_grpo": {"trust": TRUST, "length_tokens": 4},
    "gspo": {"trust": TRUST},
    "cispo": {"ratio_cap": 5.0, "ratio_floor": 0.0, "mismatch_cap": 2.0},
    "reinforce_pp": {
        "trust": TRUST,
        "group_baseline": False,
        "kl_weight": 0.0,
        "discount": 1.0,
    },
    "ppo": {
        "trust": TRUST,
        "returns": {"value": False, "discount": 1.0, "trace": 1.0, "kl_weight": 0.0},
        "value_clip": 0.2,
        "whiten": True,
    },
    "gvpo": {
        "beta": 0.5,
        "anchor": "start",
        "coupling": "written",
        "unit_grad": True,
        "keep_truncated": False,
        "strata": False,
    },
}


def table(params):
    """[before token] log-prob of a token after the one before it."""
    return np.asarray(jax.nn.log_softmax(params["embed"] * params["scale"] @ params["head"]))


def test_case_1_the_mask_moves_with_its_tokens():
    # tokens [10, 11, 12, 13] less 9, mask [0, 0, 1, 0]: the one log-prob is that of 12 after 11
    told = rollout(1, 0, [1, 2], [3, 4], 1.0)
    masked = dataclasses.replace(told, kind=np.array([PROMPT, PROMPT, ACTION, FEEDBACK], np.uint8))
    batch = batch_of([group(1, [masked])], step_groups=1, size=1)
    _, metrics = run(load("sft"), batch)
    right = table(Bigram().init(jax.random.key(0)))
    assert metrics["loss/total"] == pytest.approx(-right[2, 3], rel=1e-5)
    assert abs(right[2, 3] - right[3, 4]) > 0.1  # the log-prob of 13 would show
    assert metrics["batch/action_tokens"] == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_case_2_on_policy_there_is_no_gap_and_the_ratio_is_one(temperature):
    right = table({**Bigram().init(jax.random.key(0))})
    scaled = np.asarray(jax.nn.log_softmax(right / temperature))
    rollouts = [
        rollout(
            1, i, [1], ids, float(i), logp=scaled[[1, ids[0]], ids].tolist(),
            temperature=temperature,
        )
        for i, ids in enumerate(([2, 3], [4, 5]))
    ]  # fmt: skip
    batch = batch_of([group(1, rollouts)], step_groups=1, size=2)
    _, metrics = run(load("grpo", **GRPO), batch, size=2)
    assert metrics["sampler/gap_max"] < 1e-5
    assert metrics["loss/ratio_mean"] == metrics["loss/ratio_max"] == 1
    assert metrics["loss/clipped_mean"] == 0
    assert metrics["loss/mismatch_mean"] == pytest.approx(1, abs=1e-5)


def test_every_method_is_tried():
    assert set(PARAMETERS) == set(names())


@pytest.mark.parametrize("name", names())
def test_what_was_rewarded_becomes_more_likely(name):
    right, wrong = [3, 5], [4, 6]
    answers = [right] if name == "sft" else [right, wrong]
    rollouts = [rollout(1, i, [1], ids, float(ids == right)) for i, ids in enumerate(answers)]
    size = len(rollouts)
    batch = batch_of([group(1, rollouts)], step_groups=1, size=size)
    tx = optax.sgd(0.05)
    state, _ = run(load(name, **PARAMETERS[name]), batch, tx=tx, size=size)
    before, after = table(Bigram().init(jax.random.key(0))), table(trained(state))

    def gain(ids):
        chosen = [1, ids[0]], ids
        return (after[chosen] - before[chosen]).sum()

    assert gain(right) > 1e-3
    if name != "sft":
        assert gain(wrong) < -1e-3
