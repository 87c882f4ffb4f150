"""Numbers worked by hand for kernels/contrast.py. K1 ... K4: the method's own checks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.contrast import contrastive_advantage

ALPHAS = pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9, 1.0])


def drawn(seed=0, shape=(6, 9)):
    """Log-probs of the policy, and of the teacher shown what is right and what is wrong."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(-rng.exponential(size=shape), jnp.float32) for _ in range(3)]


def test_by_hand():
    # p = 1/4; shown right 1/2 (rho 2), shown wrong 1/8 (rho 1/2)
    logp, right, wrong = (jnp.log(jnp.full((1, 1), x)) for x in (1 / 4, 1 / 2, 1 / 8))
    # alpha = 1/2: A = 1/2 log(1/2 + rho / 2); 1/2 (1/2 log 1.5 - 1/2 log .75) = 1/4 log 2
    got = contrastive_advantage(logp, right, wrong, alpha=0.5)
    np.testing.assert_allclose(got, [[0.25 * np.log(2)]], rtol=1e-5)
    # reverse KL: 1/2 log(right / wrong) = 1/2 log 4 = log 2
    got = contrastive_advantage(logp, right, wrong, alpha=1.0)
    np.testing.assert_allclose(got, [[np.log(2)]], rtol=1e-6)


@ALPHAS
def test_k1_two_equal_teachers_say_nothing(alpha):
    logp, right, _ = drawn()
    np.testing.assert_array_equal(contrastive_advantage(logp, right, right, alpha=alpha), 0)


@ALPHAS
def test_k2_swapping_the_teachers_flips_it(alpha):
    logp, right, wrong = drawn()
    a = contrastive_advantage(logp, right, wrong, alpha=alpha)
    np.testing.assert_array_equal(contrastive_advantage(logp, wrong, right, alpha=alpha), -a)
    assert np.abs(a).max() > 0.01


def test_k3_in_the_reverse_kl_limit_the_policy_cancels():
    logp, right, wrong = drawn()
    a = contrastive_advantage(logp, right, wrong, alpha=1.0)
    np.testing.assert_array_equal(contrastive_advantage(logp - 3, right, wrong, alpha=1.0), a)
    a = contrastive_advantage(logp, right, wrong, alpha=0.5)
    moved = contrastive_advantage(logp - 3, right, wrong, alpha=0.5)
    assert np.abs(moved - a).max() > 0.1


def test_what_both_teachers_shift_alike_cancels_in_that_limit_only():
    logp, right, wrong = drawn()
    for alpha, least, most in ((1.0, 0, 1e-6), (0.5, 0.1, 9)):
        a = contrastive_advantage(logp, right, wrong, alpha=alpha)
        shifted = contrastive_advantage(logp, right + 1.5, wrong + 1.5, alpha=alpha)
        assert least <= np.abs(shifted - a).max() <= most


def test_close_to_the_limit_it_is_the_limit_rescaled():
    logp, right, wrong = drawn()
    near = contrastive_advantage(logp, right, wrong, alpha=0.999) / 0.001
    np.testing.assert_allclose(
        near, contrastive_advantage(logp, right, wrong, alpha=1.0), rtol=0.1, atol=0.05
    )
