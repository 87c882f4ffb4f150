"""GRPO against its oracle."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, differences, logps, ragged, update
from tests.papers import grpo as paper

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": math.inf,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
CAPPED = {"mismatch": "truncate", "mismatch_high": 1.5}
PLAIN = {
    "trust": TRUST,
    "kl_weight": 0.0,
    "scale_by_std": True,
    "full_group": 0.0,
    "mask_limit": math.inf,
    "dynamic_sampling": False,
    "weighting": "rollout_mean",
    "length_tokens": 0,
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def small(seed=3):
    rng = np.random.default_rng(seed)
    return batch_of([2, 1, 3, 0, 2, 3], rng.random(6), [4, 4, 4, 1, 1, 9], valid=[1, 1, 0, 1, 1, 1])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"scale_by_std": False, "weighting": "fixed_length", "length_tokens": 3},
        {"weighting": "token_mean", "trust": TRUST | {"clip_high": 0.28, "dual_clip": 1.5}},
        {"weighting": "rollout_sum_mean", "kl_weight": 0.3},
        {"trust": TRUST | CAPPED, "kl_weight": 0.3},
        {"full_group": 3.0, "mask_limit": 0.1},
    ],
    ids=lambda change: "-".join(change) or "plain",
)
def test_it_equals_the_oracle(change):
    parameters = PLAIN | change
    batch = small()
    logp, old_logp, ref_logp = (logps(batch, seed) for seed in (1, 2, 3))

    def oracle(logp):
        return paper.loss(
            logp,
            old_logp.tolist(),
            batch.sampler_logp.tolist(),
            ref_logp.tolist(),
            batch.reward.tolist(),
            batch.group.tolist(),
            batch.valid.tolist(),
            batch.acted.tolist(),
            parameters,
        )

    algorithm = load("grpo", **parameters)
    observed = {"old_logp": old_logp, "entropy": ref_logp, "ref_logp": ref_logp}
    value, slope, diagnostics = update(algorithm, batch, logp, observed, micro=2)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=1e-6)
    np.testing.assert_allclose(slope, differences(oracle, logp), rtol=1e-6, atol=1e-8)
    clipped = np.asarray(diagnostics["clipped"])[np.asarray(batch.acted)]
    assert 0 < clipped.sum() < clipped.size  # both branches were tried


def test_case_2_on_policy_the_gradient_is_the_advantage():
    batch = small()
    logp = logps(batch, 1)
    observed = {"old_logp": logp, "entropy": logp}
    algorithm = load("grpo", **PLAIN)
    value, slope, diagnostics = update(algorithm, batch, logp, observed, micro=6)
    credit = credited(algorithm, batch, observed)
    np.testing.assert_array_equal(diagnostics["ratio"], 1)
    np.testing.assert_array_equal(diagnostics["clipped"], 0)
    np.testing.assert_allclose(slope, -credit.advantage * credit.weight, rtol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 1000.1])
def test_case_16_equal_rewards_give_no_gradient(reward):
    batch = batch_of([2, 1, 3], [reward] * 3, [4, 4, 4])
    observed = {"old_logp": logps(batch, 2), "entropy": logps(batch, 2)}
    value, slope, _ = update(load("grpo", **PLAIN), batch, logps(batch, 1), observed, micro=3)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


def test_case_26_mismatch_weights_in_the_loss():
    # trainer over sampler [1, 4, 1/4], cap 2, ratio to old 1. Two rollouts with rewards 1, -1 about
    # their mean: A = 1 for the first, so its token losses are -[1, 2, .25], and so are their slopes
    batch = batch_of([3, 3], [2.0, 0.0], [0, 0])
    old_logp = batch.sampler_logp + jnp.log(jnp.asarray([1, 1, 1, 4, 0.25, 1]))
    parameters = PLAIN | {
        "scale_by_std": False,
        "trust": TRUST | {"mismatch": "truncate", "mismatch_high": 2.0},
        "weighting": "fixed_length",
        "length_tokens": 1,
    }
    observed = {"old_logp": old_logp, "entropy": old_logp}
    value, slope, diagnostics = update(
        load("grpo", **parameters), batch, old_logp, observed, micro=2
    )
    np.testing.assert_allclose(2 * slope[0, 2:5], [-1, -2, -0.25], rtol=1e-6)
    np.testing.assert_allclose(diagnostics["mismatch"][0, 2:5], [1, 2, 0.25], rtol=1e-6)
    np.testing.assert_array_equal(diagnostics["mismatch_truncated"][0, 2:5], [0, 1, 0])


def test_case_28_a_kl_term_asks_for_the_reference_and_only_then():
    assert load("grpo", **PLAIN).observers == (("student", "plain"),)
    with_kl = load("grpo", **PLAIN | {"kl_weight": 0.1})
    assert ("reference", "plain") in with_kl.observers
    logits = {"student": jnp.zeros((2, 3)), "reference/plain": jnp.ones((2, 3))}
    assert set(with_kl.observe(logits, jnp.zeros(2, int))) == {"old_logp", "ref_logp", "entropy"}


@pytest.mark.parametrize("micro", [1, 4])
def test_cases_19_and_20_micro_batches_change_nothing(micro):
    batch = ragged()
    observed = {name: logps(batch, 2) for name in ("old_logp", "entropy", "ref_logp")}
    for weighting in ("token_mean", "rollout_mean", "rollout_sum_mean"):
        algorithm = load("grpo", **PLAIN | {"kl_weight": 0.1, "weighting": weighting})
        whole = update(algorithm, batch, logps(batch, 1), observed, micro=12)
        parts = update(algorithm, batch, logps(batch, 1), observed, micro=micro)
        np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
        np.testing.assert_allclose(parts[1], whole[1], rtol=1e-6)


@pytest.mark.parametrize("rewards", [[1, 0, 1], [1, 1], [0, 0, 0], [1, np.nan, 0], [np.nan, 1]])
def test_d4_mixed_groups_are_those_that_have_advantages(rewards):
    valid = np.isfinite(rewards)
    batch = batch_of([1] * len(rewards), np.nan_to_num(rewards), [3] * len(rewards), valid=valid)
    moved = bool(np.asarray(credited(load("grpo", **PLAIN), batch, {}).advantage).any())
    algorithm = load("grpo", **PLAIN | {"dynamic_sampling": True})
    assert algorithm.keep(np.asarray(rewards, float), {}) is moved
    assert load("grpo", **PLAIN).keep(np.asarray(rewards, float), {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kl_weight", -0.1),
        ("full_group", 1.0),
        ("mask_limit", 0.0),
        ("weighting", "seq"),
        ("length_tokens", 8),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        load("grpo", **PLAIN | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip_low", 1.0), ("clip_high", -0.1), ("dual_clip", 1.0), ("mismatch_high", 0.5)],
)
def test_a_bad_bound_is_named(field, value):
    with pytest.raises(ValueError, match=f"trust.{field}="):
        load("grpo", **PLAIN | {"trust": TRUST | {field: value}})


def test_missing_and_unknown_fields_are_named():
    trust = {k.replace("p_high", "phigh"): v for k, v in TRUST.items()}
    with pytest.raises(TypeError, match=r"unknown: \['cliphigh'\]; missing: \['clip_high'\]"):
        load("grpo", **PLAIN | {"trust": trust})
    with pytest.raises(TypeError, match=r"unknown: \['scalebystd'\]; missing: \['scale_by_std'\]"):
        load("grpo", **{k.replace("scale_by_", "scaleby"): v for k, v in PLAIN.items()})
    with pytest.raises(ValueError, match="algorithm.name='grop' is unknown; allowed: .*dapo, "):
        load("grop")
