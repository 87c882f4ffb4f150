"""Numbers worked by hand for kernels/divergences.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.divergences import forward_kl, k1, k2, k3, reverse_kl, reverse_kl_loss

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
    np.testing.assert_allclose(got, 5.0016667e-7, rtol=1e-3)


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
