"""Numbers worked by hand for kernels/divergences.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.divergences import (
    excess,
    floored_logits,
    floored_logp,
    forward_kl,
    generalised_jsd,
    k1,
    k2,
    k3,
    reverse_kl,
    reverse_kl_loss,
    sampled_jsd_advantage,
    top_k_tail,
)

REF = np.log([0.8, 0.2])
TRUE_KL = 0.223144  # .5 log(.5 / .8) + .5 log(.5 / .2)
TRUE_SLOPE = -0.346574  # p0 p1 ((log p0 - log q0) - (log p1 - log q1)) = .25 log(.2 / .8)


def expected_slope(kernel):
    """Value and d/dtheta of the loss term at theta = 0, logits [theta, 0], tokens drawn from it."""

    def loss(theta):
        logp = jax.nn.log_softmax(jnp.asarray([0.0, 0.0]) + theta * jnp.asarray([1.0, 0.0]))
        seen = jax.lax.stop_gradient(jnp.exp(logp))
        return (seen * kernel(logp[None], jnp.asarray(REF, jnp.float32)[None])[0]).sum()

    return jax.value_and_grad(loss)(0.0)


def on_policy_loss(logp, ref_logp):
    return reverse_kl_loss(logp, jax.lax.stop_gradient(logp), ref_logp)


@pytest.mark.parametrize(
    ("kernel", "slope"), [(k1, 0.0), (k2, TRUE_SLOPE), (k3, -0.3), (on_policy_loss, TRUE_SLOPE)]
)
def test_case_27_what_each_estimator_does_as_a_loss(kernel, slope):
    assert expected_slope(kernel)[1] == pytest.approx(slope, abs=1e-5)


def test_as_a_reward_k1_teaches_and_k3_starves_close_to_the_teacher():
    """E[reward grad log p]: -k1 has minus the gradient of KL(p, q), -k3 that plus KL(q, p)'s."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        logits, away = (jnp.asarray(rng.normal(size=(1, 7))) for _ in range(2))
        logp, sizes = jax.nn.log_softmax(logits), []
        for distance in (1.0, 0.1, 0.01):
            ref_logits = logits + distance * away
            ref_logp = jax.nn.log_softmax(ref_logits)
            reverse, forward = (
                jax.grad(lambda x, f=f, ref=ref_logits: f(x, ref).sum())(logits)
                for f in (reverse_kl, forward_kl)
            )
            pulls = []
            for reward in (-k1(logp, ref_logp), -k3(logp, ref_logp)):
                weighted = jnp.exp(logp) * reward  # E[reward grad log p], by hand of a softmax
                pulls.append(weighted - jnp.exp(logp) * weighted.sum())
            np.testing.assert_allclose(pulls[0], -reverse, rtol=1e-6, atol=1e-12)
            np.testing.assert_allclose(pulls[1], forward - reverse, rtol=1e-6, atol=1e-12)
            sizes.append(float(jnp.linalg.norm(pulls[1]) / jnp.linalg.norm(pulls[0])))
        # ten times closer, k3's share is ten times less
        assert 5 < sizes[1] / sizes[2] < 20 and sizes[2] < 0.02


@pytest.mark.parametrize("kernel", [k1, k3, on_policy_loss])
def test_case_27_unbiased_values(kernel):
    assert expected_slope(kernel)[0] == pytest.approx(TRUE_KL, abs=1e-5)


def test_case_27_the_loss_stays_unbiased_off_policy():
    # tokens from the old policy [.3, .7]; policy softmax([.4, 0])
    old = jnp.log(jnp.asarray([0.3, 0.7]))

    def logits(theta):
        return jnp.asarray([theta, 0.0])

    def sampled(theta):
        logp = jax.nn.log_softmax(logits(theta))
        ref = jnp.asarray(REF, jnp.float32)
        return (jnp.exp(old) * reverse_kl_loss(logp[None], old[None], ref[None])[0]).sum()

    def exact(theta):
        return reverse_kl(logits(theta)[None], jnp.asarray(REF, jnp.float32)[None])[0]

    np.testing.assert_allclose(
        jax.value_and_grad(sampled)(0.4), jax.value_and_grad(exact)(0.4), rtol=1e-5
    )


def test_case_28_overflow():
    logp, zero = jnp.full((1, 1), -100.0), jnp.zeros((1, 1))
    np.testing.assert_allclose(k3(logp, zero), np.exp(20) - 20 - 1, rtol=1e-6)  # 4.851652e8
    np.testing.assert_allclose(k2(logp, zero), 5000)  # 100^2 / 2
    for kernel in (k1, k2, k3, on_policy_loss):
        value, slope = jax.value_and_grad(lambda x, f=kernel: f(x, zero).sum())(logp)
        assert np.isfinite(value) and np.isfinite(slope).all()
    slope = jax.grad(lambda x: on_policy_loss(x, zero).sum())(logp)
    np.testing.assert_allclose(slope, -20)  # the bound: clamped log-ratio times ratio 1


def test_k3_is_accurate_close_to_the_reference():
    # x = 1e-3: exp(x) - 1 - x = x^2 / 2 + x^3 / 6
    got = k3(jnp.zeros((1, 1)), jnp.full((1, 1), 1e-3))
    np.testing.assert_allclose(got, 5.0016667e-7, rtol=1e-6)


def test_the_excess_of_an_exponential_keeps_its_digits_everywhere():
    sizes = np.concatenate([np.geomspace(1e-6, 20, 500), [0.49999997, 0.5, 0.50000006]])
    x = np.concatenate([-sizes, sizes]).astype(np.float32)
    wide = x.astype(np.longdouble)
    right = sum(wide**n / math.factorial(n) for n in range(2, 90))  # |x|^90 / 90! < 1e-21
    far = np.abs(x) > 1  # where the terms of a negative x cancel, and exp(x) - 1 - x does not
    right = np.where(far, np.expm1(wide) - wide, right)
    np.testing.assert_allclose(excess(jnp.asarray(x)), right, rtol=1e-6)
    slope = jax.vmap(jax.grad(excess))(jnp.asarray(x))
    np.testing.assert_allclose(slope, np.expm1(wide), rtol=1e-6)
    assert excess(jnp.zeros(())) == 0 == jax.grad(excess)(jnp.zeros(()))


def test_exact_divergences():
    # p = [1/2, 1/2], q = [1/4, 3/4]
    p, q = jnp.zeros((1, 2)), jnp.log(jnp.asarray([[0.25, 0.75]]))
    # KL(p, q) = 1/2 log 2 + 1/2 log(2/3); KL(q, p) = 1/4 log(1/2) + 3/4 log(3/2)
    np.testing.assert_allclose(reverse_kl(p, q), [0.5 * np.log(4 / 3)], rtol=1e-5)
    right = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    np.testing.assert_allclose(forward_kl(p, q), [right], rtol=1e-5)
    np.testing.assert_allclose(reverse_kl(p + 3, p), [0], atol=1e-6)


def test_an_impossible_token_costs_nothing():
    # p = [1, 0], q = [1/2, 1/2]: KL(p, q) = log 2
    p, q = jnp.asarray([[0.0, -jnp.inf]]), jnp.zeros((1, 2))
    np.testing.assert_allclose(reverse_kl(p, q), [np.log(2)], rtol=1e-6)
    assert np.isinf(forward_kl(p, q)).all()


def two_policies(seed=0, positions=4, tokens=7):
    """Logits [position vocab] of a student and a teacher."""
    rng = np.random.default_rng(seed)
    return tuple(2 * rng.normal(size=(positions, tokens)) for _ in range(2))


def as_written(logits, ref_logits, alpha):
    """The divergences by their definitions, for automatic differentiation."""
    p, ref = jax.nn.softmax(logits), jax.nn.softmax(ref_logits)
    mean = (1 - alpha) * p + alpha * ref
    if alpha in (0, 1):
        over, under = (ref, p) if alpha == 0 else (p, ref)
        return (over * jnp.log(over / under)).sum(-1)
    p_kl, ref_kl = ((x * jnp.log(x / mean)).sum(-1) for x in (p, ref))
    return (1 - alpha) * p_kl + alpha * ref_kl


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_written_slopes_are_those_of_the_definitions(alpha):
    with jax.enable_x64(True):
        logits, ref_logits = map(jnp.asarray, two_policies())
        both = [
            jax.value_and_grad(lambda x, f=f: f(x).sum())(logits)
            for f in (
                lambda x: generalised_jsd(x, ref_logits, alpha=alpha),
                lambda x: as_written(x, ref_logits, alpha),
            )
        ]
        np.testing.assert_allclose(both[0][0], both[1][0], rtol=1e-10)
        np.testing.assert_allclose(both[0][1], both[1][1], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_nothing_pulls_a_policy_off_an_equal_one(alpha):
    logits = jnp.asarray(two_policies()[0], jnp.float32)

    def loss(logits, teacher):
        whole = generalised_jsd(logits, teacher, alpha=alpha)
        student, bucketed = (top_k_tail(x, teacher, k=3) for x in (logits, teacher))
        return (whole + generalised_jsd(student, bucketed, alpha=alpha)).sum()

    value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(logits, logits)
    assert value == pytest.approx(0, abs=1e-6)
    for slope in slopes:  # bit for bit: Adam would make steps of rounding
        np.testing.assert_array_equal(slope, 0)
    np.testing.assert_array_equal(sampled_jsd_advantage(logits, logits, alpha=alpha), 0)


def test_no_gradient_flows_into_the_teacher():
    logits, ref_logits = map(jnp.asarray, two_policies())
    for alpha in (0.0, 0.5, 1.0):
        slope = jax.grad(lambda x, a=alpha: generalised_jsd(logits, x, alpha=a).sum())(ref_logits)
        np.testing.assert_array_equal(slope, 0)


def test_generalised_jsd_by_hand():
    # p = [1/2, 1/2], ref = [1/4, 3/4], alpha = 1/4: m = 3/4 p + 1/4 ref = [7/16, 9/16]
    p, ref = jnp.zeros((1, 2)), jnp.log(jnp.asarray([[0.25, 0.75]]))
    p_kl = 0.5 * np.log(8 / 7) + 0.5 * np.log(8 / 9)
    ref_kl = 0.25 * np.log(4 / 7) + 0.75 * np.log(4 / 3)
    right = 0.75 * p_kl + 0.25 * ref_kl
    np.testing.assert_allclose(generalised_jsd(p, ref, alpha=0.25), [right], rtol=1e-5)


def test_the_scale_jumps_at_both_ends():
    with jax.enable_x64(True):
        logits, ref_logits = map(jnp.asarray, two_policies())
        near = generalised_jsd(logits, ref_logits, alpha=1e-6)
        np.testing.assert_allclose(near / 1e-6, forward_kl(logits, ref_logits), rtol=1e-3)
        near = generalised_jsd(logits, ref_logits, alpha=1 - 1e-6)
        np.testing.assert_allclose(near / 1e-6, reverse_kl(logits, ref_logits), rtol=1e-3)
        logp, ref_logp = jnp.asarray([[-2.0]]), jnp.asarray([[-1.0]])
        for alpha in (0.0, 1.0):
            end = sampled_jsd_advantage(logp, ref_logp, alpha=alpha)
            near = sampled_jsd_advantage(logp, ref_logp, alpha=abs(alpha - 1e-6))
            np.testing.assert_allclose(near / 1e-6, end, rtol=1e-4)


def test_the_sampled_advantage_by_hand():
    # p(y) = 1/4, ref(y) = 1/2: rho = 2
    logp, ref_logp = jnp.log(jnp.full((1, 1), 0.25)), jnp.log(jnp.full((1, 1), 0.5))
    for alpha, right in ((0.5, 0.5 * np.log(1.5)), (1.0, np.log(2)), (0.0, 1.0)):
        got = sampled_jsd_advantage(logp, ref_logp, alpha=alpha)
        np.testing.assert_allclose(got, [[right]], rtol=1e-6)
    # bounded below, by (1 - alpha) log(1 - alpha), however impossible the token
    got = sampled_jsd_advantage(logp, jnp.full((1, 1), -1e4), alpha=0.5)
    np.testing.assert_allclose(got, [[0.5 * np.log(0.5)]], rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_the_sampled_advantage_has_its_digits_at_any_distance(alpha):
    """Near 0, where 1 - alpha + alpha rho is 1 to the last bit, across the series' end, and far."""
    size = np.concatenate([10.0 ** np.arange(-30, 0), np.linspace(0.3, 0.7, 99), [1, 3, 20, 90]])
    gap = np.concatenate([size, -size]).astype(np.float32)
    far = np.asarray(gap, np.longdouble)
    above = np.maximum(far, 0) + np.log1p(
        np.where(far > 0, 1 - alpha, alpha) * np.expm1(-np.abs(far))
    )
    right = (1 - alpha) * np.where(np.abs(far) < 1e-9, alpha * far, above)
    got = sampled_jsd_advantage(jnp.zeros((1, gap.size)), jnp.asarray(gap)[None], alpha=alpha)
    np.testing.assert_allclose(got[0], right.astype(np.float64), rtol=3e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_k4_the_sampled_advantage_has_the_gradient_of_the_whole_vocabulary(alpha):
    with jax.enable_x64(True):
        logits, ref_logits = map(jnp.asarray, two_policies())
        p, ref = jax.nn.softmax(logits), jax.nn.log_softmax(ref_logits)

        def enumerated(logits):
            logp = jax.nn.log_softmax(logits)
            return -(p * sampled_jsd_advantage(logp, ref, alpha=alpha) * logp).sum()

        exact = jax.grad(lambda x: generalised_jsd(x, ref_logits, alpha=alpha).sum())(logits)
        np.testing.assert_allclose(jax.grad(enumerated)(logits), exact, rtol=1e-8, atol=1e-12)


def test_top_k_keeps_the_rest_in_one_bucket():
    # the two largest of ref are tokens 2 and 0; of p that is [.3, .5], and .2 for the others
    p = jnp.log(jnp.asarray([[0.5, 0.15, 0.3, 0.05]]))
    ref = jnp.log(jnp.asarray([[0.3, 0.2, 0.4, 0.1]]))
    np.testing.assert_allclose(jnp.exp(top_k_tail(p, ref, k=2)), [[0.3, 0.5, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(top_k_tail(ref, ref, k=2)), [[0.4, 0.3, 0.3]], rtol=1e-6)
    # KL(p, ref) over the buckets: .3 log(3/4) + .5 log(5/3) + .2 log(2/3)
    right = 0.3 * np.log(3 / 4) + 0.5 * np.log(5 / 3) + 0.2 * np.log(2 / 3)
    got = reverse_kl(top_k_tail(p, ref, k=2), top_k_tail(ref, ref, k=2))
    np.testing.assert_allclose(got, [right], rtol=1e-5)


def test_without_the_tail_two_policies_could_look_alike():
    # kept tokens 0 and 1 are alike up to scale: renormalised, their KL is 0
    p, ref = (jnp.log(jnp.asarray([x])) for x in ([0.1, 0.1, 0.8], [0.4, 0.4, 0.2]))
    kept = [top_k_tail(x, ref, k=2)[:, :2] for x in (p, ref)]
    np.testing.assert_allclose(reverse_kl(*kept), [0], atol=1e-6)
    assert reverse_kl(*(top_k_tail(x, ref, k=2) for x in (p, ref)))[0] > 0.8


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_buckets_never_add_divergence_and_single_ones_keep_it(alpha):
    logits, ref_logits = map(jnp.asarray, two_policies(positions=8))
    whole = generalised_jsd(logits, ref_logits, alpha=alpha)
    for k, chosen in ((2, logits), (2, ref_logits), (6, logits)):
        buckets = [top_k_tail(x, chosen, k=k) for x in (logits, ref_logits)]
        got = generalised_jsd(*buckets, alpha=alpha)
        assert (got <= whole + 1e-6).all()
    np.testing.assert_allclose(got, whole, rtol=1e-4, atol=1e-6)  # the tail is one token


def test_top_k_that_leaves_no_tail_is_refused():
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"k={k}; allowed: 1 to 6"):
            top_k_tail(*map(jnp.asarray, two_policies()), k=k)


def test_a_teacher_rules_nothing_out():
    logits, taken = (
        jnp.asarray([[0.0, -100.0], [0.0, 0.0], [0.0, -jnp.inf]]),
        jnp.asarray([1, 1, 1]),
    )
    # log 1e-10 = -23.025851
    right = [-23.025851, np.log(0.5), -23.025851]
    np.testing.assert_allclose(floored_logp(logits, taken), right, rtol=1e-6)
    right = [[0, -23.025851], [0, 0], [0, -23.025851]]  # log 2 - 23.03 < 0: the second is untouched
    np.testing.assert_allclose(floored_logits(logits), right, rtol=1e-6)
    assert np.isfinite(reverse_kl(jnp.zeros((3, 2)), floored_logits(logits))).all()
