"""Numbers worked by hand for kernels/trust.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.trust import Trust, mismatch_weight, trusted_surrogate

LN4 = np.log(4)
TRUST = Trust(0.2, 0.2, 3.0, "truncate", 0.0, 2.0)
ROLLOUT = jnp.zeros(1, jnp.int32)
SAMPLER = jnp.asarray([[-2.0, -2, -2]])
OLD = SAMPLER + jnp.asarray([[0, LN4, -LN4]])  # rho 1, 4, 1/4
ALL = jnp.ones((1, 3), bool)


def row(*x):
    return jnp.asarray([x], jnp.float32)


def surrogate(logp, old_logp, sampler_logp, advantage, trust=TRUST):
    mask = jnp.ones(logp.shape, bool)
    return trusted_surrogate(logp, old_logp, sampler_logp, advantage, ROLLOUT, mask, trust=trust)


def slope(logp, *others, trust=TRUST):
    return jax.grad(lambda x: surrogate(x, *others, trust=trust)[0].sum())(logp)


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected", "hit"),
    [
        ("truncate", 0.0, 2.0, [1, 2, 0.25], [0, 1, 0]),  # min(rho, 2)
        ("band", 0.5, 2.0, [1, 0, 0], [0, 1, 1]),  # 4 and 1/4 lie outside
        ("rollout_truncate", 0.0, 2.0, [1, 1, 1], [0, 0, 0]),  # 1 * 4 / 4
        ("rollout_band", 0.999, 1.001, [1, 1, 1], [0, 0, 0]),  # exp(0)
    ],
)
def test_case_26_weights_say_which_tokens_were_hit(kind, low, high, expected, hit):
    trust = dataclasses.replace(TRUST, mismatch=kind, mismatch_low=low, mismatch_high=high)
    token_loss, diagnostics = surrogate(OLD, OLD, SAMPLER, row(1, 1, 1), trust)
    np.testing.assert_allclose(token_loss, -row(*expected), rtol=1e-6)  # ratio to old is 1
    np.testing.assert_allclose(diagnostics["mismatch"], row(*expected), rtol=1e-6)
    name = "mismatch_dropped" if kind.endswith("band") else "mismatch_truncated"
    np.testing.assert_array_equal(diagnostics[name], row(*hit))  # 1/3 truncated, 2/3 masked
    # the weight has no gradient of its own: it scales that of the surrogate
    found = slope(OLD, OLD, SAMPLER, row(1, 1, 1), trust=trust)
    np.testing.assert_allclose(found, -row(*expected), rtol=1e-6)


def test_case_26_whole_rollouts():
    # two tokens a rollout, log-ratios (.3, .1) and (-.7, .1): products e^.4, e^-.6, means .2, -.3
    sampler_logp = -2 * jnp.ones((2, 2))
    old_logp = sampler_logp + jnp.asarray([[0.3, 0.1], [-0.7, 0.1]])
    arrays = (old_logp, sampler_logp, jnp.arange(2), jnp.ones((2, 2), bool))
    weight, _ = mismatch_weight(*arrays, kind="rollout_truncate", low=0.0, high=1.2)
    np.testing.assert_allclose(weight, [[1.2, 1.2], [np.exp(-0.6)] * 2], rtol=1e-6)
    weight, diagnostics = mismatch_weight(*arrays, kind="rollout_band", low=0.8, high=1.25)
    np.testing.assert_array_equal(weight, [[1, 1], [0, 0]])  # e^.2 = 1.22, e^-.3 = .74
    np.testing.assert_array_equal(diagnostics["mismatch_dropped"], [[0, 0], [1, 1]])


def test_no_correction():
    trust = dataclasses.replace(TRUST, mismatch="none")
    token_loss, diagnostics = surrogate(OLD, OLD, SAMPLER, row(1, 1, 1), trust)
    np.testing.assert_array_equal(token_loss, -1)
    assert "mismatch" not in diagnostics


@pytest.mark.parametrize("kind", ["truncate", "rollout_truncate"])
def test_no_mismatch_means_a_weight_of_exactly_one(kind):
    weight, _ = mismatch_weight(OLD, OLD, ROLLOUT, ALL, kind=kind, low=0.0, high=np.inf)
    np.testing.assert_array_equal(weight, 1)


def test_case_25_clip_and_dual_clip():
    ratio, advantage = [1.5, 0.5, 0.5, 1.5, 10, 0.1, 10], row(1, 1, -1, -1, -1, 0, 0)
    old_logp = jnp.full((1, 7), -1.0)
    logp = old_logp + jnp.log(row(*ratio))
    token_loss, diagnostics = surrogate(logp, old_logp, old_logp, advantage)
    np.testing.assert_allclose(token_loss, row(-1.2, -0.5, 0.8, 1.5, 3, 0, 0), rtol=1e-6)
    # by logp: the slope by the ratio times the ratio
    found = slope(logp, old_logp, old_logp, advantage)
    np.testing.assert_allclose(found, row(0, -0.5, 0, 1.5, 0, 0, 0), rtol=1e-6)
    np.testing.assert_array_equal(diagnostics["clipped"], row(1, 0, 1, 0, 0, 0, 0))
    np.testing.assert_array_equal(diagnostics["dual_clipped"], row(0, 0, 0, 0, 1, 0, 0))


def test_case_13_the_mask_is_no_advantage():
    # swapped, the sums would divide by 1 - 1
    logp = row(-1, -1)
    token_loss, _ = surrogate(logp, logp, logp, row(1, -1))
    assert token_loss.sum() == 0
    with pytest.raises(Exception, match="mask"):  # a float mask is refused by the type check
        trusted_surrogate(logp, logp, logp, row(1, 1), ROLLOUT, row(1, -1), trust=TRUST)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_low", 1.0),
        ("clip_high", -0.1),
        ("dual_clip", 1.0),
        ("mismatch", "mask"),
        ("mismatch_low", 0.5),  # of a cap: nothing would be dropped
        ("mismatch_high", 0.9),
    ],
)
def test_bad_fields_are_named(field, value):
    with pytest.raises(ValueError, match=rf"trust\.{field}="):
        dataclasses.replace(TRUST, **{field: value})
