"""What the whole step makes of inputs on which other trainers went wrong, and whom it favours."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import everyone, load, names
from jaxrl.pool.rollout import ACTION, FEEDBACK, PROMPT
from jaxrl.train.accumulate import weighted_sum
from tests.train.test_step import GRPO, assert_same, run, trained
from tests.train.toy import Bigram, batch_of, group, rollout, state_of, step_of


def tiny(name):
    """A method as its config has it for one core."""
    fields = importlib.import_module(f"configs.{name}").get_config("tiny").algorithm.to_dict()
    if name == "ppo":  # a value would have to learn first
        fields["returns"] |= {"value": False, "trace": 1.0}
    return load(**fields)


def is_told_nothing_else(name):
    """Whether a reward is all that a method learns from; the others' tests bring what they need."""
    algorithm = tiny(name)
    alone = {(who, "plain") for who in ("student", "reference")}
    return not algorithm.needs and not algorithm.lessons and set(everyone(algorithm)) <= alone


def table(params):
    """[before token] log-prob of a token after the one before it."""
    return np.asarray(jax.nn.log_softmax(params["embed"] * params["scale"] @ params["head"]))


def test_a_loss_that_has_no_weight_may_be_anything():
    loss = jnp.array([[1.0, np.nan], [np.inf, -3.0]])
    weight = jnp.array([[2.0, 0.0], [0.0, -0.5]])
    value, slope = jax.value_and_grad(weighted_sum)(loss, weight)
    assert value == 1 * 2 + -3 * -0.5
    np.testing.assert_array_equal(slope, weight)


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


@pytest.mark.parametrize("name", [name for name in names() if is_told_nothing_else(name)])
def test_what_was_rewarded_becomes_more_likely(name):
    right, wrong = [3, 5], [4, 6]
    answers = [right] if name == "sft" else [right, wrong]
    rollouts = [rollout(1, i, [1], ids, float(ids == right)) for i, ids in enumerate(answers)]
    size = len(rollouts)
    batch = batch_of([group(1, rollouts)], step_groups=1, size=size)
    tx = optax.sgd(0.1)
    state, _ = run(tiny(name), batch, tx=tx, size=size)
    before, after = table(Bigram().init(jax.random.key(0))), table(trained(state))

    def gain(ids):
        chosen = [1, ids[0]], ids
        return (after[chosen] - before[chosen]).sum()

    assert gain(right) > 1e-3
    if name != "sft":
        assert gain(wrong) < -1e-3


def test_a_take_without_a_rollout_has_no_facts_and_is_passed_over():
    """Whoever needs facts is not asked: nobody knows their shapes, nothing is compiled for them."""
    algorithm = load("gvpo_distill", alpha=0.5, coupling="written", keep_truncated=False)
    tx = optax.sgd(0.1)
    step = step_of(algorithm, tx, micro=4, size=2, minibatches=2)
    state = state_of(algorithm, tx)
    before = jax.device_get(state)
    batch = jax.device_put(batch_of([], step_groups=4, size=2, minibatches=2))
    with jax.transfer_guard("disallow"):
        state, metrics = step(state, batch)
    assert step.trace_count == 0
    assert_same(jax.device_get(state.roles), before.roles)
    assert int(state.step) == int(before.step) + 1
    assert float(metrics["optim/skipped"]) == float(metrics["batch/empty"]) == 2
    assert float(metrics["optim/updates"]) == float(metrics["batch/action_tokens"]) == 0
