"""PPO against its oracle: the policy's term, the value's, and a take of both."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.train import state as states
from tests.algorithms.batches import batch_of, credited, differences, logps, ragged
from tests.algorithms.oracles import CAPPED, TRUST, agree, listed, observed_of, small
from tests.papers import ppo as paper
from tests.train import toy

RETURNS = {"value": True, "discount": 0.9, "trace": 0.8, "kl_weight": 0.0}
ALONE = RETURNS | {"value": False, "trace": 1.0}
PLAIN = {"trust": TRUST, "returns": RETURNS, "value_clip": 0.5, "whiten": True}


def told(batch, *names):
    """What the oracles take after the log-probs or values."""
    observed = observed_of(batch)
    arrays = (observed["old_logp"], batch.sampler_logp, observed["ref_logp"], observed["value"])
    rest = dict(zip(("old_logp", "sampler_logp", "ref_logp", "value"), arrays, strict=True))
    rest |= {"reward": batch.reward, "valid": batch.valid, "acted": batch.acted}
    return listed(*(rest[name] for name in names))


@pytest.mark.parametrize(
    "change",
    [
        {"trust": CAPPED},
        {"returns": RETURNS | {"kl_weight": 0.3}, "whiten": False},
        {"returns": ALONE},
    ],
    ids=["value", "KL in the reward", "no value"],
)
def test_it_equals_the_oracle(change):
    parameters, batch = PLAIN | change, small()
    rest = told(batch, "old_logp", "sampler_logp", "ref_logp", "value", "reward", "valid", "acted")
    agree(load("ppo", **parameters), batch, lambda x: paper.loss(x, *rest, p=parameters))


@pytest.mark.parametrize("clip", [0.5, math.inf])
def test_the_value_s_lesson_equals_the_oracle(clip):
    parameters = PLAIN | {"value_clip": clip, "returns": RETURNS | {"kl_weight": 0.3}}
    ((who, lesson),) = load("ppo", **parameters).lessons
    assert (who, lesson.scorers) == ("value", (("value", "plain"),))
    batch, value = small(), logps(small(), 9)
    rest = told(batch, "old_logp", "ref_logp", "value", "reward", "valid", "acted")

    def oracle(value):
        return paper.value_loss(value, *rest, p=parameters)

    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, batch)
        observed = {name: jnp.asarray(x) for name, x in observed_of(batch).items()}
        credit = lesson.credit(arrays, observed)

        def loss(value):
            token_loss, _ = lesson.loss({"value": value}, arrays, observed, credit)
            return (token_loss * credit.weight).sum()

        found, slope = jax.value_and_grad(loss)(jnp.asarray(value))
    np.testing.assert_allclose(found, oracle(value.tolist()), rtol=1e-6)
    np.testing.assert_allclose(slope, differences(oracle, value), rtol=1e-6, atol=1e-9)


def test_without_a_value_nobody_but_the_student_is_asked():
    alone = load("ppo", **PLAIN | {"returns": ALONE})
    assert alone.lessons == () and alone.observers == (("student", "plain"),)
    both = load("ppo", **PLAIN | {"returns": RETURNS | {"kl_weight": 0.1}})
    assert [who for who, _ in both.observers] == ["student", "value", "reference"]
    logits = {name: jnp.ones((2, 3)) for name in ("student", "reference/plain")}
    observed = both.observe(logits | {"value/plain": jnp.full((2, 1), 7.0)}, jnp.zeros(2, int))
    assert set(observed) == {"old_logp", "entropy", "value", "ref_logp"}
    np.testing.assert_array_equal(observed["value"], 7)


def test_without_a_value_it_is_reinforce_pp():
    batch, observed = ragged(), observed_of(ragged())
    plain = {"trust": TRUST, "group_baseline": False, "kl_weight": 0.3, "discount": 0.9}
    ours = load("ppo", **PLAIN | {"returns": ALONE | {"kl_weight": 0.3}})
    a, b = (credited(x, batch, observed) for x in (ours, load("reinforce_pp", **plain)))
    np.testing.assert_allclose(a.advantage, b.advantage, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(a.weight, b.weight)


def test_a_value_that_is_right_leaves_no_advantage():
    batch = batch_of([2, 3], [1.0, 0.0], [0, 1])
    right = np.where(np.asarray(batch.acted), np.asarray(batch.reward)[:, None], 0.0)
    parameters = PLAIN | {"returns": RETURNS | {"discount": 1.0}}
    credit = credited(load("ppo", **parameters), batch, observed_of(batch) | {"value": right})
    np.testing.assert_allclose(credit.advantage, 0, atol=1e-6)


def test_the_value_learns_beside_the_policy_and_neither_moves_the_other():
    returns = RETURNS | {"discount": 1.0, "trace": 1.0}
    algorithm = load("ppo", **PLAIN | {"returns": returns, "value_clip": math.inf})
    batch = toy.batch_of(toy.random_groups(0, 8, 1), step_groups=8, size=1)
    value = toy.Bigram().init(jax.random.key(1))
    sgd = optax.inject_hyperparams(optax.sgd)  # the rate lies in the state: one compilation
    step = toy.step_of(algorithm, sgd(0.0), micro=4, size=1, lesson_txs={"value": sgd(0.0)})

    def take(rate, value_rate, takes):
        others = {"value": states.scorer(value, tx=sgd(value_rate))}
        state, losses = toy.state_of(algorithm, sgd(rate), others=others), []
        for _ in range(takes):
            state, metrics = step(state, batch)
            losses.append(float(metrics["value/loss/total"]))
        return {who: jax.device_get(role.params) for who, role in state.roles.items()}, losses

    # a policy that stands still: the value falls towards the rewards of its states
    still, losses = take(0.0, 0.3, 12)
    assert losses[-1] < 0.7 * losses[0] and np.all(np.diff(losses) < 0)
    start = jax.device_get(toy.Bigram().init(jax.random.key(0)))
    for name, x in still["student"].items():
        np.testing.assert_array_equal(x, start[name])
    # what the value learns in a take is not seen by the policy in the same take
    moved, frozen = take(0.3, 0.3, 1)[0], take(0.3, 0.0, 1)[0]
    for name, x in moved["student"].items():
        np.testing.assert_array_equal(x, frozen["student"][name])
        assert (x != start[name]).any()
    for name, x in frozen["value"].items():
        np.testing.assert_array_equal(x, jax.device_get(value[name]))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"value_clip": 0.0}, "algorithm.value_clip"),
        ({"whiten": False, "returns": ALONE}, "algorithm.whiten"),
        ({"returns": ALONE | {"trace": 0.9}}, "returns.trace"),
        ({"returns": RETURNS | {"discount": 1.1}}, "returns.discount"),
        ({"returns": RETURNS | {"kl_weight": -0.1}}, "returns.kl_weight"),
    ],
)
def test_bad_fields_are_named(change, field):
    with pytest.raises(ValueError, match=f"{field}="):
        load("ppo", **PLAIN | change)
