"""REINFORCE++ and its variant with a group's baseline, against their oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, logps, ragged, update
from tests.algorithms.oracles import CAPPED, LOOSE, TRUST, agree, listed, observed_of, small
from tests.papers import reinforce_pp as paper

PLAIN = {"trust": TRUST, "group_baseline": False, "kl_weight": 0.0, "discount": 1.0}
BASELINE = PLAIN | {"group_baseline": True}


@pytest.mark.parametrize(
    "parameters",
    [
        PLAIN | {"trust": CAPPED},
        PLAIN | {"kl_weight": 0.3, "discount": 0.9},
        BASELINE | {"trust": CAPPED, "kl_weight": 0.3},
    ],
    ids=["plain", "KL in the reward", "baseline"],
)
def test_it_equals_the_oracle(parameters):
    batch, observed = small(), observed_of(small())
    rest = listed(
        observed["old_logp"],
        batch.sampler_logp,
        observed["ref_logp"],
        batch.reward,
        batch.group,
        batch.valid,
        batch.acted,
    )
    agree(load("reinforce_pp", **parameters), batch, lambda x: paper.loss(x, *rest, p=parameters))


@pytest.mark.parametrize(
    "parameters", [PLAIN | {"kl_weight": 0.3}, BASELINE], ids=["plain", "group"]
)
def test_advantages_have_mean_0_and_variance_1_over_the_tokens_of_the_take(parameters):
    batch = ragged()  # two minibatches: the statistics are the take's
    credit = credited(load("reinforce_pp", **parameters), batch, observed_of(batch))
    # who has valid company
    beside = np.array([(batch.valid & (batch.group == label)).sum() > 1 for label in batch.group])
    counted = np.asarray(batch.acted)
    if parameters["group_baseline"]:
        counted = counted & beside[batch.rollout][:, None]
    advantage = np.asarray(credit.advantage)[counted]
    np.testing.assert_allclose([advantage.mean(), advantage.var(ddof=1)], [0, 1], atol=1e-5)


def test_groups_of_one_are_enough():
    batch = batch_of([1, 2, 1], [1.0, 0.0, 0.5], [0, 1, 2])
    plain = credited(load("reinforce_pp", **PLAIN), batch, {})
    # tokens 1, 0, 0, .5: mean .375, variance (.390625 + 2 * .140625 + .015625) / 3 = .229167
    scaled = (np.array([1, 0, 0.5]) - 0.375) / np.sqrt(0.6875 / 3)
    np.testing.assert_allclose(plain.advantage[:, 2], scaled, rtol=1e-5)
    group = credited(load("reinforce_pp", **BASELINE), batch, {})
    np.testing.assert_array_equal(group.advantage, 0)  # case 16: no baseline, no advantage


def test_case_27_the_penalty_is_the_gap_to_the_reference_as_a_reward():
    # equal rewards, one token a response, log-ratios to the reference .2 and -.2: A < 0 where the
    # policy is above it
    batch = batch_of([1, 1], [1.0, 1.0], [0, 1])
    observed = observed_of(batch)
    observed["ref_logp"] = observed["old_logp"] - np.array([[0.2], [-0.2]])
    credit = credited(load("reinforce_pp", **PLAIN | {"kl_weight": 0.1}), batch, observed)
    np.testing.assert_allclose(credit.advantage[:, 2], np.array([-1, 1]) / np.sqrt(2), rtol=1e-5)


@pytest.mark.parametrize("parameters", [PLAIN, BASELINE], ids=["plain", "group"])
def test_equal_rewards_give_no_gradient(parameters):
    batch = batch_of([2, 1, 3], [0.1] * 3, [4, 4, 4])
    parameters = parameters | {"trust": LOOSE}
    value, slope, _ = update(
        load("reinforce_pp", **parameters), batch, logps(batch, 1), observed_of(batch), micro=3
    )
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


def test_a_reference_is_scored_where_it_is_asked_for():
    assert load("reinforce_pp", **PLAIN).observers == (("student", "plain"),)
    with_kl = load("reinforce_pp", **PLAIN | {"kl_weight": 0.1})
    logits = {"student": jnp.zeros((2, 3)), "reference/plain": jnp.ones((2, 3))}
    assert with_kl.observers == (("student", "plain"), ("reference", "plain"))
    assert set(with_kl.observe(logits, jnp.zeros(2, int))) == {"old_logp", "ref_logp", "entropy"}


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        (PLAIN | {"kl_weight": -1.0}, "kl_weight"),
        (PLAIN | {"discount": 1.1}, "discount"),
        (BASELINE | {"discount": 0.9}, "discount"),
    ],
)
def test_bad_fields_are_named(parameters, field):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        load("reinforce_pp", **parameters)
