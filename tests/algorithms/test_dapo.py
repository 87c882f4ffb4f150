"""DAPO against its oracle."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, differences, logps, update
from tests.papers import dapo as paper

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": math.inf,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
CAPPED = {"mismatch": "truncate", "mismatch_high": 1.5}
PLAIN = {
    "trust": TRUST,
    "dynamic_sampling": True,
    "overlong_penalty": 0.0,
    "overlong_limit_tokens": 4,
    "overlong_buffer_tokens": 3,
    "drop_truncated": False,
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def small():
    rng = np.random.default_rng(3)
    return batch_of(
        [2, 4, 3, 0, 2, 3],
        rng.random(6),
        [4, 4, 4, 1, 1, 9],
        valid=[1, 1, 0, 1, 1, 1],
        truncated=[0, 1, 0, 0, 0, 0],
    )


def observed_at(batch):
    return {"old_logp": logps(batch, 2), "entropy": logps(batch, 2)}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"overlong_penalty": 0.7},
        {"drop_truncated": True, "trust": TRUST | {"dual_clip": 1.5}},
        {"trust": TRUST | CAPPED, "overlong_penalty": 0.7, "drop_truncated": True},
    ],
    ids=lambda change: "-".join(change) or "plain",
)
def test_it_equals_the_oracle(change):
    parameters = PLAIN | change
    batch, old_logp = small(), observed_at(small())["old_logp"]

    def oracle(logp):
        return paper.loss(
            logp,
            old_logp.tolist(),
            batch.sampler_logp.tolist(),
            batch.reward.tolist(),
            batch.group.tolist(),
            batch.valid.tolist(),
            batch.truncated.tolist(),
            batch.acted.tolist(),
            parameters,
        )

    logp = logps(batch, 1)
    value, slope, _ = update(load("dapo", **parameters), batch, logp, observed_at(batch), micro=2)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=1e-6)
    np.testing.assert_allclose(slope, differences(oracle, logp), rtol=1e-6, atol=1e-8)


def test_without_its_switches_it_is_grpo_under_token_mean():
    batch = small()
    grpo = load(
        "grpo",
        trust=TRUST,
        kl_weight=0.0,
        scale_by_std=True,
        full_group=0.0,
        mask_limit=math.inf,
        dynamic_sampling=False,
        weighting="token_mean",
        length_tokens=0,
    )
    arguments = (batch, logps(batch, 1), observed_at(batch))
    a = update(load("dapo", **PLAIN), *arguments, micro=6)
    b = update(grpo, *arguments, micro=6)
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])


def test_the_penalty_comes_before_the_group_statistics():
    # equal rewards, lengths 1 and 4: limit 4, buffer 3, so the long one loses the whole penalty and
    # A = [1, -1] / sqrt(2)
    batch = batch_of([1, 4], [1.0, 1.0], [0, 0])
    credit = credited(load("dapo", **PLAIN | {"overlong_penalty": 1.0}), batch, {})
    np.testing.assert_allclose(credit.advantage[:, 2], np.array([1, -1]) / np.sqrt(2), rtol=1e-6)


def test_a_truncated_rollout_stays_in_the_statistics_but_is_not_counted():
    batch = batch_of([2, 2, 2], [1.0, 0.0, 0.0], [0, 0, 0], truncated=[0, 0, 1])
    kept = credited(load("dapo", **PLAIN), batch, {})
    dropped = credited(load("dapo", **PLAIN | {"drop_truncated": True}), batch, {})
    np.testing.assert_array_equal(dropped.advantage, kept.advantage)
    assert jnp.all(dropped.weight[2] == 0)
    np.testing.assert_allclose(dropped.weight[:2, 2:4], 1 / 4)  # 2 + 2 tokens, not 6


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([1, 0, 1], True), ([1, 1, 1], False), ([0, 0], False), ([1, np.nan], False), ([], False)],
)
def test_dynamic_sampling_tests_the_rewards_of_the_verifier(rewards, kept):
    rewards = np.asarray(rewards, float)
    assert load("dapo", **PLAIN).keep(rewards, {}) is kept
    assert load("dapo", **PLAIN | {"dynamic_sampling": False}).keep(rewards, {}) is True
    if np.isfinite(rewards).all() and rewards.size:
        assert paper.keep(rewards.tolist()) is kept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("overlong_penalty", -1.0),
        ("overlong_limit_tokens", 0),
        ("overlong_buffer_tokens", 5),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        load("dapo", **PLAIN | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip_low", -0.1), ("clip_high", -0.1), ("dual_clip", 0.5), ("mismatch_high", 0.0)],
)
def test_a_bad_bound_is_named(field, value):
    with pytest.raises(ValueError, match=f"trust.{field}="):
        load("dapo", **PLAIN | {"trust": TRUST | {field: value}})
