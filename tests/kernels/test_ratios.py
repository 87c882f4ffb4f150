"""Numbers worked by hand for kernels/ratios.py."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.ratios import (
    band_ratio,
    rollout_band,
    rollout_mask,
    rollout_ratio,
    token_ratio,
    truncated_ratio,
    truncated_rollout_ratio,
)
from jaxrl.kernels.surrogates import clipped_surrogate

LN4 = np.log(4)


def row(*x):
    return jnp.asarray([x], jnp.float32)


def test_case_2_the_ratio_on_policy_is_one_at_any_temperature():
    logp = row(-0.018150)
    np.testing.assert_array_equal(token_ratio(logp, logp), 1)
    # T = .5 in the trainer against T = 1 in the sampler would be exp(-.126928 + .018150)
    np.testing.assert_allclose(token_ratio(row(-0.126928), logp), [[0.896929]], atol=1e-5)


def test_case_11_a_sentinel_in_the_padding_is_harmless():
    weight = row(1, 0)

    def loss(logp):
        token_loss, _ = clipped_surrogate(
            token_ratio(logp, row(-0.5, -1e4)), row(1, 1), clip_low=0.2, clip_high=0.2
        )
        return (token_loss * weight).sum()

    value, slope = jax.value_and_grad(loss)(row(-0.5, 0))
    assert value == -1
    np.testing.assert_array_equal(slope, [[-1, 0]])


def test_case_26_mismatch_weights():
    logp, sampler_logp = row(-2, -2 + LN4, -2 - LN4), row(-2, -2, -2)
    truncated = truncated_ratio(logp, sampler_logp, cap=2.0)
    np.testing.assert_allclose(truncated, [[1, 2, 0.25]], rtol=1e-6)  # min(e^d, 2)
    band = band_ratio(logp, sampler_logp, low=0.5, high=2.0)
    np.testing.assert_allclose(band, [[1, 0, 0]], rtol=1e-6)  # 4 and .25 lie outside [.5, 2]


def test_case_26_mismatch_weights_carry_no_gradient():
    sampler_logp = row(-2, -2, -2)
    for slope in (
        jax.grad(lambda x: truncated_ratio(x, sampler_logp, cap=2.0).sum())(sampler_logp),
        jax.grad(lambda x: band_ratio(x, sampler_logp, low=0.5, high=2.0).sum())(sampler_logp),
    ):
        np.testing.assert_array_equal(slope, 0)


def test_an_infinite_cap_is_unbiased():
    # two outcomes, sampler [.8, .2], trainer [.5, .5]: E_sampler[rho f] = E_trainer[f]
    sampler, trainer, f = np.array([0.8, 0.2]), np.array([0.5, 0.5]), np.array([3.0, -1.0])
    rho = truncated_ratio(row(*np.log(trainer)), row(*np.log(sampler)), cap=np.inf)[0]
    np.testing.assert_allclose((sampler * rho * f).sum(), (trainer * f).sum(), rtol=1e-6)


def test_case_28_no_ratio_overflows():
    logp, old_logp = row(0, -100, 5e4), row(-100, 0, -5e4)
    ratio = token_ratio(logp, old_logp)
    np.testing.assert_allclose(ratio, np.exp([[20, -20, 20]]), rtol=1e-5)
    slope = jax.grad(lambda x: token_ratio(x, old_logp).sum())(logp)
    np.testing.assert_array_equal(slope, 0)  # beyond the clamp


def test_rollout_ratio():
    # rollout 3: rows 0 and 2, log-ratios .2, .4 and .6, mean .4; rollout 1: row 1, log-ratio -.1
    old_logp = -jnp.ones((3, 2))
    gap = jnp.asarray([[0.2, 0.4], [-0.1, 9.0], [9.0, 0.6]])
    mask = jnp.asarray([[1, 1], [1, 0], [0, 1]], bool)
    rollout = jnp.asarray([3, 1, 3])

    def ratio(logp):
        return rollout_ratio(logp, old_logp, rollout, mask)

    s, t = np.exp(0.4), np.exp(-0.1)
    np.testing.assert_allclose(ratio(old_logp + gap), [[s, s], [t, 1], [1, s]], rtol=1e-5)
    # each token's own log-prob carries the slope s of its own entry
    slope = jax.grad(lambda x: ratio(x).sum())(old_logp + gap)
    np.testing.assert_allclose(slope, [[s, s], [t, 0], [0, s]], rtol=1e-5)


# rollout 3: rows 0 and 2, log-ratios .2, .4 and .6; rollout 1: row 1, log-ratio -.1
OLD = -jnp.ones((3, 2))
NEW = OLD + jnp.asarray([[0.2, 0.4], [-0.1, 9.0], [9.0, 0.6]])
MASK = jnp.asarray([[1, 1], [1, 0], [0, 1]], bool)
ROLLOUT = jnp.asarray([3, 1, 3])


def test_products_over_a_rollout_are_not_means():
    # product e^1.2 = 3.32, above the cap; e^-.1; 1 where nothing counts
    got = truncated_rollout_ratio(NEW, OLD, ROLLOUT, MASK, cap=2.0)
    np.testing.assert_allclose(got, [[2, 2], [np.exp(-0.1), 1], [1, 2]], rtol=1e-5)
    got = truncated_rollout_ratio(NEW, OLD, ROLLOUT, MASK, cap=np.inf)
    np.testing.assert_allclose(got[0], np.exp([1.2, 1.2]), rtol=1e-5)


def test_whole_rollouts_are_kept_or_dropped():
    # geometric means e^.4 = 1.49 and e^-.1 = .905
    got = rollout_band(NEW, OLD, ROLLOUT, MASK, low=0.8, high=1.4)
    np.testing.assert_array_equal(got, [[0, 0], [1, 1], [1, 0]])
    got = rollout_band(NEW, OLD, ROLLOUT, MASK, low=0.95, high=1.5)
    np.testing.assert_array_equal(got, [[1, 1], [0, 1], [1, 1]])


def test_bad_rollouts_that_were_left_behind_are_dropped():
    # the policy has moved away by -.4 (rollout 3) and by .1 (rollout 1) nats a token
    advantage = jnp.asarray([[-1.0, 1], [-1, -1], [-1, -1]])
    got = rollout_mask(NEW, OLD, advantage, ROLLOUT, MASK, limit=0.05)
    np.testing.assert_array_equal(got, [[1, 1], [0, 1], [1, 1]])
    # the other way round rollout 3 is .4 behind: its tokens with A < 0 go
    got = rollout_mask(OLD, NEW, advantage, ROLLOUT, MASK, limit=0.3)
    np.testing.assert_array_equal(got, [[0, 1], [1, 1], [1, 0]])
    np.testing.assert_array_equal(
        rollout_mask(OLD, NEW, advantage, ROLLOUT, MASK, limit=0.5), np.ones((3, 2))
    )
