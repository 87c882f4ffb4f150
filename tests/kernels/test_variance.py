"""Numbers worked by hand and identities for kernels/variance.py. G1 ... G11: GVPO's own checks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.variance import centred_gap, gap_weights

BETA = 0.3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def group_of(k, seed=0):
    """logp, anchor_logp, reward, group, mask of one group."""
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(-10 * rng.random(k)),
        jnp.asarray(-10 * rng.random(k)),
        jnp.asarray(rng.random(k)),
        jnp.zeros(k, int),
        jnp.ones(k, bool),
    )


@jax.jit
def loss(*arrays):
    return centred_gap(*arrays, beta=BETA)[0].sum()


slope_of = jax.jit(jax.grad(loss))
value_and_slope = jax.jit(jax.value_and_grad(loss))


def test_by_hand():
    anchor, reward = jnp.asarray([-2.0, -2.0]), jnp.asarray([1.0, 0.0])
    group, mask = jnp.asarray([6, 6]), jnp.asarray([True, True])
    # At the anchor r = 0, e = -c(R) = [-.5, .5]: .25 / (2 * (2 - 1)) each
    each, diagnostics = centred_gap(anchor, anchor, reward, group, mask, beta=0.5)
    np.testing.assert_allclose(each, [0.125, 0.125])
    np.testing.assert_allclose(diagnostics["residual"], [-0.5, 0.5])
    # r = .5 * [1, -1]: c(r) = c(R), nothing left
    logp = jnp.asarray([-1.0, -3.0])
    each, diagnostics = centred_gap(logp, anchor, reward, group, mask, beta=0.5)
    np.testing.assert_allclose(each, [0, 0])
    np.testing.assert_allclose(diagnostics["implicit_reward"], [0.5, -0.5])
    # w = -e = [.5, -.5] at the anchor, over k - 1 = 1
    np.testing.assert_allclose(
        gap_weights(anchor, anchor, reward, group, mask, beta=0.5), [0.5, -0.5]
    )


def test_g1_finite_differences_equal_the_gradient_identity():
    logp, *rest = group_of(5)
    weights = gap_weights(logp, *rest, beta=BETA)
    step = 1e-5
    for i in range(5):
        move = step * (jnp.arange(5) == i)
        slope = (loss(logp + move, *rest) - loss(logp - move, *rest)) / (2 * step)
        np.testing.assert_allclose(slope, -BETA * weights[i], rtol=1e-6)
    np.testing.assert_allclose(slope_of(logp, *rest), -BETA * weights, rtol=1e-12)


def test_g2_weights_sum_to_zero():
    assert abs(gap_weights(*group_of(7), beta=BETA).sum()) < 1e-15


def test_g3_the_mean_may_be_detached():
    logp, anchor_logp, reward, *rest = group_of(4)

    def detached(logp):
        implicit = BETA * (logp - anchor_logp)
        residual = implicit - jax.lax.stop_gradient(implicit.mean()) - (reward - reward.mean())
        return (residual**2).sum() / 2 / 3

    np.testing.assert_allclose(
        jax.grad(detached)(logp), slope_of(logp, anchor_logp, reward, *rest), rtol=1e-12
    )


def test_g3_an_attached_weight_would_be_another_loss():
    arrays = group_of(4)
    weights = jax.grad(lambda x: gap_weights(x, *arrays[1:], beta=BETA).sum())(arrays[0])
    np.testing.assert_array_equal(weights, 0)


def test_g4_constants_vanish():
    logp, anchor_logp, reward, group, mask = group_of(4)
    plain = value_and_slope(logp, anchor_logp, reward, group, mask)
    moved = value_and_slope(logp, anchor_logp - 7, reward + 3, group, mask)
    np.testing.assert_allclose(moved[0], plain[0], rtol=1e-12)
    np.testing.assert_allclose(moved[1], plain[1], rtol=1e-12)


def test_g5_an_incomplete_group_centres_on_the_valid():
    logp, anchor_logp, reward, group, mask = group_of(4)
    mask = mask.at[1].set(False)
    valid = jnp.flatnonzero(mask)
    value, slope = value_and_slope(logp, anchor_logp, reward, group, mask)
    small = [x[valid] for x in (logp, anchor_logp, reward, group, mask)]
    expected, expected_slope = value_and_slope(*small)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(slope[valid], expected_slope, rtol=1e-12)
    assert slope[1] == 0


def test_equal_rewards_still_pull_to_the_anchor():
    logp, anchor_logp, reward, *rest = group_of(4)
    slope = slope_of(logp, anchor_logp, jnp.zeros_like(reward), *rest)
    gap = logp - anchor_logp
    # beta^2 / (k - 1) (gap_i - mean): down where the policy has gone up
    np.testing.assert_allclose(slope, BETA**2 / 3 * (gap - gap.mean()), rtol=1e-10)


def test_duplicates_have_equal_residuals():
    arrays = [x[jnp.asarray([0, 1, 1, 2])] for x in group_of(3)]
    residual = centred_gap(*arrays, beta=BETA)[1]["residual"]
    assert residual[1] == residual[2] != 0


OUTCOMES = 3
REF = np.array([0.3, -0.5, 0.1])
GAIN = np.array([1.0, 0.0, 0.4])


def every_group(k, logits, behaviour):
    """Expected loss over all groups of k outcomes drawn from ``behaviour``."""
    seen = jnp.asarray(list(itertools.product(range(OUTCOMES), repeat=k)))
    gain = jnp.asarray(GAIN)
    logp, ref_logp = jax.nn.log_softmax(logits), jax.nn.log_softmax(REF)
    chance = jnp.exp(jax.nn.log_softmax(behaviour)[seen].sum(-1))
    flat = seen.reshape(-1)
    group = jnp.repeat(jnp.arange(len(seen)), k)
    mask = jnp.ones(flat.shape, bool)
    each, _ = centred_gap(logp[flat], ref_logp[flat], gain[flat], group, mask, beta=BETA)
    return (each.reshape(-1, k).sum(-1) * chance).sum()


def test_g6_nothing_is_left_at_the_optimum():
    optimum = REF + GAIN / BETA
    value, slope = jax.jit(jax.value_and_grad(lambda x: every_group(3, x, REF)))(optimum)
    assert value < 1e-28
    np.testing.assert_allclose(slope, 0, atol=1e-14)
    assert jax.jit(every_group, static_argnums=0)(3, REF, REF) > 1e-2


@pytest.mark.parametrize("k", [2, 3])
def test_g7_on_policy_it_is_the_regularised_objective(k):
    logits = jnp.asarray([-0.2, 0.6, 0.0])

    def objective(x):
        logp = jax.nn.log_softmax(x)
        return (jnp.exp(logp) * (GAIN - BETA * (logp - jax.nn.log_softmax(REF)))).sum()

    slope = jax.jit(jax.grad(lambda x: every_group(k, x, logits)))(logits)
    np.testing.assert_allclose(slope, -BETA * jax.grad(objective)(logits), rtol=1e-10)


@pytest.mark.parametrize("k", [2, 3])
def test_the_expected_loss_is_half_the_variance(k):
    logits, behaviour = jnp.asarray([-0.2, 0.6, 0.0]), jnp.asarray([0.0, 0.5, 1.0])
    chance = jax.nn.softmax(behaviour)
    x = BETA * (jax.nn.log_softmax(logits) - jax.nn.log_softmax(REF)) - GAIN
    variance = (chance * x**2).sum() - (chance * x).sum() ** 2
    expected = jax.jit(every_group, static_argnums=0)(k, logits, behaviour)
    np.testing.assert_allclose(expected, variance / 2, rtol=1e-12)
