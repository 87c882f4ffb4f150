"""Numbers worked by hand and identities for kernels/variance.py. G1 ... G11: GVPO's own checks.

V1 ... V4: those of group-variance distillation, which is the same distance without a reward.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.variance import (
    accompanied,
    centred_gap,
    gap_weights,
    length_weight,
    stratified_gap,
    stratified_weights,
)

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


def test_strata_by_hand():
    # one group, x = r = logp: policy 0 gives 1, 3 (mean 2), policy 1 gives 4, 6, 8 (mean 6)
    logp = jnp.asarray([1.0, 3.0, 4.0, 6.0, 8.0])
    none = jnp.zeros(5)
    labels = jnp.asarray([0, 0, 1, 1, 1]), jnp.zeros(5, int), jnp.ones(5, bool)
    each, diagnostics = stratified_gap(logp, none, none, *labels, beta=1.0)
    # mean 4.4: squares 11.56 1.96 .16 2.56 12.96 over 5; inside 1 1 times 2, 4 0 4 times 1.5, over
    # 25; half of the sum
    expected = [
        (11.56 / 5 + 2 / 25) / 2,
        (1.96 / 5 + 2 / 25) / 2,
        (0.16 / 5 + 6 / 25) / 2,
        2.56 / 5 / 2,
        (12.96 / 5 + 6 / 25) / 2,
    ]
    np.testing.assert_allclose(each, expected, rtol=1e-12)
    np.testing.assert_allclose(diagnostics["residual"], logp - 4.4, rtol=1e-12)
    weights = stratified_weights(logp, none, none, *labels, beta=1.0)
    np.testing.assert_allclose(weights[0], -(-3.4 / 5 + 2 * -1 / 25), rtol=1e-12)
    np.testing.assert_allclose(weights[3], -(1.6 / 5), rtol=1e-12)


def test_groups_with_a_lone_rollout_of_some_policy_are_not_accompanied():
    group = jnp.asarray([7, 7, 7, 7, 9, 9, 9, 4, 4])
    behaviour = jnp.asarray([0, 0, 5, 5, 0, 0, 5, 0, 0])
    every = jnp.ones(9, bool)
    np.testing.assert_array_equal(accompanied(behaviour, group, every), [1, 1, 1, 1, 0, 0, 0, 1, 1])
    # a failed rollout leaves its policy with one; a lone one that failed is no policy at all
    np.testing.assert_array_equal(
        accompanied(behaviour, group, every.at[jnp.asarray([0, 6])].set(False)),
        [0, 0, 0, 0, 1, 1, 0, 1, 1],
    )


def test_one_policy_is_the_plain_form():
    logp, anchor_logp, reward, group, mask = group_of(5)
    same = jnp.full(5, 3)
    arrays = (logp, anchor_logp, reward)
    value, slope = jax.jit(
        jax.value_and_grad(
            lambda x: stratified_gap(x, *arrays[1:], same, group, mask, beta=BETA)[0].sum()
        )
    )(logp)
    expected, expected_slope = value_and_slope(*arrays, group, mask)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-12)


def test_stratified_weights_have_the_gradient_and_sum_to_zero():
    logp, anchor_logp, reward, group, mask = group_of(6)
    behaviour = jnp.asarray([1, 0, 0, 1, 1, 0])
    rest = (anchor_logp, reward, behaviour, group, mask)
    slope = jax.jit(jax.grad(lambda x: stratified_gap(x, *rest, beta=BETA)[0].sum()))(logp)
    weights = jax.jit(lambda x: stratified_weights(x, *rest, beta=BETA))(logp)
    np.testing.assert_allclose(-BETA * weights, slope, rtol=1e-12)
    assert abs(weights.sum()) < 1e-15


def test_strata_are_unbiased_for_the_variance_under_the_mixture():
    # two rollouts of one policy and three of another, over every group there is
    shares = [2, 3]
    chances = jax.nn.softmax(jnp.asarray([[0.0, 0.5, 1.0], [1.5, -1.0, 0.0]]))
    x = np.array([0.2, -1.0, 0.7])
    seen = np.asarray(list(itertools.product(range(OUTCOMES), repeat=5)))
    behaviour = np.repeat([0, 1], shares)
    chance = np.prod(np.asarray(chances)[behaviour, seen], axis=1)
    flat = jnp.asarray(x[seen].reshape(-1))
    group, none = jnp.repeat(jnp.arange(len(seen)), 5), jnp.zeros(flat.shape)
    labels = jnp.tile(behaviour, len(seen)), group, jnp.ones(flat.shape, bool)

    @jax.jit
    def both(x):
        return (
            stratified_gap(x, none, none, *labels, beta=1.0)[0],
            centred_gap(x, none, none, *labels[1:], beta=1.0)[0],
        )

    def expected(each):
        return (np.asarray(each).reshape(-1, 5).sum(-1) * chance).sum()

    mixture = (np.asarray(chances) * np.array(shares)[:, None]).sum(0) / 5
    variance = (mixture * x**2).sum() - (mixture * x).sum() ** 2
    got, naive = map(expected, both(flat))
    np.testing.assert_allclose(got, variance / 2, rtol=1e-12)
    assert naive > 1.001 * variance / 2  # the spread between the policies counts 5 / 4 times


@functools.partial(jax.jit, static_argnums=3)
def distilled(logp, teacher_logp, length, alpha):
    """Group-variance distillation of one group."""
    gap = length_weight(length, alpha=alpha) * (logp - teacher_logp)
    none, group = jnp.zeros(logp.shape), jnp.zeros(logp.shape, int)
    return centred_gap(gap, none, none, group, jnp.ones(logp.shape, bool), beta=1.0)[0].sum()


distilled_and_slope = jax.jit(jax.value_and_grad(distilled), static_argnums=3)


def test_length_weights_by_hand():
    np.testing.assert_allclose(
        length_weight(jnp.asarray([4.0, 1.0, 0.0]), alpha=0.5), [0.5, 1, 1], rtol=1e-12
    )
    # d = f (l - t) = [.5 * 2, 1 * -1], mean 0: (1 + 1) / 2
    value = distilled(jnp.asarray([-1.0, -3]), jnp.asarray([-3.0, -2]), jnp.asarray([4.0, 1]), 0.5)
    np.testing.assert_allclose(value, 1.0, rtol=1e-12)


def test_v1_nothing_is_left_at_the_teacher():
    logp, _, _, *_ = group_of(4)
    length = jnp.asarray([1.0, 3, 7, 2])
    value, slope = distilled_and_slope(logp, logp, length, 0.5)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


def test_v2_a_constant_on_the_teacher_vanishes_without_length_weights():
    logp, teacher_logp, _, *_ = group_of(4)
    length = jnp.asarray([1.0, 3, 7, 2])
    plain = distilled_and_slope(logp, teacher_logp, length, 0.0)
    moved = distilled_and_slope(logp, teacher_logp + 5, length, 0.0)
    np.testing.assert_allclose(moved[0], plain[0], rtol=1e-12)
    np.testing.assert_allclose(moved[1], plain[1], rtol=1e-12)
    # with them it is no constant any more
    assert distilled(logp, teacher_logp + 5, length, 1.0) != distilled(
        logp, teacher_logp, length, 1.0
    )


def test_v3_on_policy_it_is_the_reverse_kl():
    logits, teacher = jnp.asarray([-0.2, 0.6, 0.0]), jax.nn.log_softmax(jnp.asarray(REF))
    seen = np.asarray(list(itertools.product(range(OUTCOMES), repeat=3)))
    chance = np.prod(np.asarray(jax.nn.softmax(logits))[seen], axis=1)
    group = jnp.repeat(jnp.arange(len(seen)), 3)

    def expected(x):
        logp = jax.nn.log_softmax(x)[seen.reshape(-1)]
        none, mask = jnp.zeros(logp.shape), jnp.ones(logp.shape, bool)
        each, _ = centred_gap(logp, teacher[seen.reshape(-1)], none, group, mask, beta=1.0)
        return (each.reshape(-1, 3).sum(-1) * chance).sum()

    def reverse_kl(x):
        logp = jax.nn.log_softmax(x)
        return (jnp.exp(logp) * (logp - teacher)).sum()

    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(reverse_kl)(logits), rtol=1e-10)


def test_v4_the_teacher_is_the_only_optimum_for_any_length_weights():
    # zero loss means f log(pS / pT) = a for all outcomes, so pS = pT exp(a / f): its sum grows
    # with a, and is 1 at a = 0 alone. Descent from anywhere finds it.
    rng = np.random.default_rng(9)
    teacher = jax.nn.log_softmax(jnp.asarray(rng.normal(size=4)))
    scale = jnp.asarray(rng.random(4) + 0.2)

    def loss(x):
        logp = jax.nn.log_softmax(x)
        none, group, mask = jnp.zeros(4), jnp.zeros(4, int), jnp.ones(4, bool)
        return centred_gap(scale * logp, scale * teacher, none, group, mask, beta=1.0)[0].sum()

    slope = jax.grad(loss)
    descent = jax.jit(lambda x: jax.lax.fori_loop(0, 5000, lambda _, x: x - slope(x), x))
    for start in 3 * rng.normal(size=(3, 4)):
        found = jax.nn.log_softmax(descent(jnp.asarray(start)))
        np.testing.assert_allclose(found, teacher, atol=1e-6)
