"""ExpDis against its oracle. E1 ... E6: ExpDis' own checks; E2 see tests/model/test_novelty.py, E4
tests/train, E5 tests/pool/test_filtering.py."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.algorithms.exp_dis import Prediction
from jaxrl.batch import View
from jaxrl.model import novelty as networks
from tests.algorithms.batches import batch_of, credited, differences, logps, update
from tests.papers import exp_dis as paper

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": math.inf,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
PLAIN = {
    "trust": TRUST,
    "novelty_weight": 0.5,
    "length_tokens": 6,
    "dynamic_sampling": True,
    "overlong_penalty": 0.0,
    "overlong_limit_tokens": 4,
    "overlong_buffer_tokens": 3,
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("exp_dis", **PLAIN | change)


def shown(batch, no_place=()):
    """The batch with its responses in rows of their own, as collate lays a view out; those of some
    rollouts do not fit."""
    acted = np.asarray(batch.acted)
    index = np.where(acted, np.cumsum(acted, -1) - 1, -1)
    index[list(no_place)] = -1
    ones: Any = np.ones(batch.tokens.shape, int)
    found: Any = index
    view = View(tokens=ones, position=ones, segment=ones, index=found)
    return dataclasses.replace(batch, views={"response_only": view})


def small():
    """A mixed group with a failed and a truncated rollout, an all-right one, an all-wrong one."""
    return shown(
        batch_of(
            [2, 4, 3, 3, 1, 2, 2, 3, 4],
            [1, 0, 1, 1, 1, 1, 0, 0, 0],
            [4, 4, 4, 4, 7, 7, 7, 9, 9],
            valid=[1, 1, 0, 1, 1, 1, 1, 1, 1],
            truncated=[0, 1, 0, 0, 0, 0, 0, 0, 1],
        ),
        no_place=[3],
    )


def placed(batch):
    """Tokens that the view shows."""
    return np.asarray(batch.acted) & (np.asarray(batch.views["response_only"].index) >= 0)


def observed_at(batch, new):
    """What observe gives; novelty is anything where the view holds no token."""
    held = placed(batch)
    novelty = np.where(held, np.asarray(new)[:, None], 1e3)
    return {"old_logp": logps(batch, 2), "entropy": logps(batch, 2), "novelty": novelty}


NEW = [0.3, 0.9, 0.5, 0.8, 0.4, 0.7, 0.2, 0.6, 0.1]


@pytest.mark.parametrize(
    "change",
    [{}, {"overlong_penalty": 0.7}, {"novelty_weight": 0.0}],
    ids=lambda change: "-".join(change) or "plain",
)
def test_it_equals_the_oracle(change):
    parameters = PLAIN | change
    batch = small()
    observed = observed_at(batch, NEW)
    shown: Any = placed(batch)
    new = [x if known else 0.0 for x, known in zip(NEW, shown.any(-1).tolist(), strict=True)]
    assert 0 < new.count(0.0) < 3

    def oracle(logp):
        return paper.loss(
            logp,
            observed["old_logp"].tolist(),
            batch.reward.tolist(),
            new,
            batch.group.tolist(),
            batch.valid.tolist(),
            batch.truncated.tolist(),
            batch.acted.tolist(),
            parameters | TRUST,
        )

    logp = logps(batch, 1)
    value, slope, _ = update(load("exp_dis", **parameters), batch, logp, observed, micro=3)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=1e-6)
    np.testing.assert_allclose(slope, differences(oracle, logp), rtol=1e-6, atol=1e-8)
    assert np.abs(slope).max() > 1e-3


def test_by_hand():
    # right, right, wrong with novelty .4, .8, .9: R = 1.2, 1.4, -1, mean 1.6 / 3
    batch = shown(batch_of([2, 2, 2], [1, 1, 0], [5, 5, 5]))
    credit = credited(make(), batch, observed_at(batch, [0.4, 0.8, 0.9]))
    expected = np.array([1.2, 1.4, -1]) - 1.6 / 3
    np.testing.assert_allclose(credit.advantage[:, 2], expected, rtol=1e-12)
    np.testing.assert_allclose(credit.weight[:, 2:4], 1 / (3 * 6))


def test_e1_the_novelty_of_wrong_answers_changes_nothing():
    batch = small()
    other = [x if right else 50.0 for x, right in zip(NEW, batch.reward.tolist(), strict=True)]
    a, b = (credited(make(), batch, observed_at(batch, new)) for new in (NEW, other))
    np.testing.assert_array_equal(a.advantage, b.advantage)
    np.testing.assert_array_equal(a.weight, b.weight)


def test_e3_without_weight_it_is_the_plain_method_and_scores_no_novelty():
    batch = small()
    whole = dataclasses.replace(batch, truncated=np.zeros(9, bool))
    algorithm = make(novelty_weight=0.0)
    assert algorithm.observers == (("student", "plain"),) and algorithm.lessons == ()
    observed = observed_at(whole, NEW)
    del observed["novelty"]
    # Dr. GRPO with verdicts of +-1, but that groups without variance are in no denominator
    signed = dataclasses.replace(whole, reward=2 * whole.reward - 1)
    plain = credited(
        load(
            "grpo",
            trust=TRUST,
            kl_weight=0.0,
            scale_by_std=False,
            full_group=0.0,
            mask_limit=math.inf,
            dynamic_sampling=False,
            weighting="fixed_length",
            length_tokens=6,
        ),
        signed,
        observed,
    )
    credit = credited(algorithm, whole, observed)
    np.testing.assert_allclose(credit.advantage, plain.advantage)
    trained = np.asarray(credit.weight > 0)
    assert not trained[7:].any() and (np.asarray(plain.advantage)[7:] == 0).all()
    np.testing.assert_allclose(
        credit.weight[:7] * 6, plain.weight[:7] * 8, rtol=1e-6
    )  # 6 rollouts are counted, and 8 with the group without variance


@pytest.mark.parametrize(
    ("rewards", "with_novelty", "without"),
    [
        ([1, 0, 1], True, True),
        ([1, 1, 1], True, False),
        ([0, 0], False, False),
        ([0.5, 0.2], False, False),
        ([1, np.nan], True, False),
        ([], False, False),
    ],
)
def test_e6_dynamic_sampling_tests_the_total_reward(rewards, with_novelty, without):
    rewards = np.asarray(rewards, float)
    for weight, kept in ((0.5, with_novelty), (0.0, without)):
        assert make(novelty_weight=weight).keep(rewards, {}) is kept
        assert make(novelty_weight=weight, dynamic_sampling=False).keep(rewards, {}) is True
        if rewards.size and np.isfinite(rewards).all() and set(rewards) <= {0, 1}:
            assert paper.keep(rewards.tolist(), weight) is kept


def test_e6_an_all_right_group_is_trained_where_novelty_differs():
    batch = shown(batch_of([2, 2, 3, 2], [1, 1, 1, 1], [5, 5, 8, 8]))
    credit = credited(make(), batch, observed_at(batch, [0.4, 0.4, 0.4, 0.8]))
    # the first group turns out equal: in no denominator, so that the second has two rollouts
    np.testing.assert_array_equal(credit.weight[:2], 0)
    np.testing.assert_allclose(credit.advantage[2:, 2], [-0.1, 0.1], rtol=1e-12)
    np.testing.assert_allclose(credit.weight[2:, 2], 1 / (2 * 6))


def test_truncated_rollouts_stay_in_the_mean_but_are_not_trained():
    batch = small()
    credit = credited(make(novelty_weight=0.0), batch, observed_at(batch, NEW))
    np.testing.assert_array_equal(credit.weight[1], 0)
    # right, wrong (truncated), right: 1 - 1/3
    np.testing.assert_allclose(credit.advantage[0, 2], 2 / 3, rtol=1e-12)


def test_case_10_a_batch_without_variance_is_harmless():
    batch = shown(batch_of([2, 1], [0, 0], [4, 4]))
    value, slope, diagnostics = update(
        make(), batch, logps(batch, 1), observed_at(batch, [0.2, 0.7]), micro=2
    )
    assert value == 0
    np.testing.assert_array_equal(slope, 0)
    assert all(np.isfinite(x).all() for x in diagnostics.values())


def test_novelty_is_read_off_the_networks_as_by_the_oracle():
    rng = np.random.default_rng(0)
    forms = networks.shapes(layers=3, width=2, hidden=4)
    params = {name: rng.normal(size=form.shape) for name, form in forms.items()}
    features = rng.normal(size=(2, 3, 2))
    error = jax.jit(networks.error)(params, features)

    def pair(network, layer):
        names = [f"{network}/{i}" for i in range(3)]
        return [
            (params[f"{n}/kernel"][layer].tolist(), params[f"{n}/bias"][layer].tolist())
            for n in names
        ]

    logits = {"student": jnp.zeros((2, 5)), "novelty/response_only": error}
    observed = make().observe(logits, jnp.zeros(2, int))
    reading = Prediction().read(logits, jnp.zeros(2, int))
    for row in range(2):
        squares = [
            paper.square_error(pair("target", i), pair("predictor", i), features[row, i].tolist())
            for i in range(3)
        ]
        np.testing.assert_allclose(error[row], squares, rtol=1e-6)
        np.testing.assert_allclose(observed["novelty"][row], paper.novelty(squares), rtol=1e-6)
        np.testing.assert_allclose(reading["square_error"][row], sum(squares), rtol=1e-6)


def test_the_predictor_learns_from_all_valid_rollouts_alike():
    batch = small()
    ((who, lesson),) = make().lessons
    assert (who, lesson) == ("novelty", Prediction())
    credit = lesson.credit(jax.tree.map(jnp.asarray, batch), {})
    weight = np.asarray(credit.weight)
    held = placed(batch)
    assert (weight[~held] == 0).all()
    # 7 of 9 rollouts: one failed, one has no place; truncated and wrong ones count
    expected = np.where(held.any(-1), 1 / 7, 0)
    np.testing.assert_allclose(weight.sum(-1), expected, rtol=1e-6)
    error = jnp.ones(batch.tokens.shape)
    loss, _ = lesson.loss({"square_error": error}, batch, {}, credit)
    np.testing.assert_array_equal(loss, error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("novelty_weight", -0.1),
        ("novelty_weight", math.inf),
        ("length_tokens", 0),
        ("overlong_penalty", -1.0),
        ("overlong_limit_tokens", 0),
        ("overlong_buffer_tokens", 5),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        make(**{field: value})
