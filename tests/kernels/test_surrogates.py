"""Numbers worked by hand for kernels/surrogates.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.surrogates import (
    clipped_surrogate,
    detached_ratio,
    dual_clip,
    policy_gradient,
    signed_band,
)


def row(*x):
    return jnp.asarray([x], jnp.float32)


def both(ratio, advantage, low=0.2, high=0.2, cap=3.0):
    """Loss, d loss / d ratio, diagnostics."""

    def loss(ratio):
        token_loss, diagnostics = clipped_surrogate(
            ratio, row(*advantage), clip_low=low, clip_high=high
        )
        token_loss, dual = dual_clip(token_loss, row(*advantage), cap=cap)
        return token_loss.sum(), (token_loss, diagnostics | dual)

    slope, (token_loss, diagnostics) = jax.grad(loss, has_aux=True)(row(*ratio))
    return token_loss[0], slope[0], diagnostics


def test_case_25_clip_and_dual_clip():
    advantage = [1, 1, -1, -1, -1, 0, 0]
    ratio = [1.5, 0.5, 0.5, 1.5, 10, 0.1, 10]
    token_loss, slope, diagnostics = both(ratio, advantage)
    # -min(1.5, 1.2); -.5; -max(-.5, -.8); 1.5; min(10, 3); 0; 0
    np.testing.assert_allclose(token_loss, [-1.2, -0.5, 0.8, 1.5, 3, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(slope, [0, -1, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(diagnostics["clipped"], [[1, 0, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(diagnostics["dual_clipped"], [[0, 0, 0, 0, 1, 0, 0]])


def test_case_25_the_clip_fraction_counts_the_chosen_branch():
    _, _, diagnostics = both([1.5, 0.5], [1, 1])
    assert diagnostics["clipped"].mean() == 0.5


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "low", "high"), [(1.2, 0.2, 0.2), (0.8, 0.2, 0.2), (1.0, 0, 0)])
def test_an_exact_tie_at_a_clip_boundary_keeps_the_whole_gradient(ratio, low, high, advantage):
    # jnp.minimum and jnp.clip would each halve it: -.75 with eps .2, -.625 with eps 0
    _, slope, diagnostics = both([ratio], [advantage], float(low), float(high))
    np.testing.assert_array_equal(slope, [-advantage])
    np.testing.assert_array_equal(diagnostics["clipped"], 0)


def test_no_dual_clip():
    token_loss, slope, _ = both([1e8, 10], [-1, 0], cap=np.inf)
    np.testing.assert_allclose(token_loss, [1e8, 0])
    np.testing.assert_array_equal(slope, [1, 0])


def test_the_sides_are_clipped_apart():
    token_loss, slope, _ = both([1.27, 1.29, 0.79], [1, 1, -1], 0.2, 0.28)
    np.testing.assert_allclose(token_loss, [-1.27, -1.28, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(slope, [-1, 0, 0])


def test_policy_gradient():
    logp, advantage = row(-0.5, -2), row(3, -1)
    token_loss, _ = policy_gradient(logp, advantage)
    np.testing.assert_allclose(token_loss, [[1.5, -2]])  # 3 * .5, -1 * 2
    slopes = jax.grad(lambda x, a: policy_gradient(x, a)[0].sum(), argnums=(0, 1))(logp, advantage)
    np.testing.assert_array_equal(slopes[0], [[-3, 1]])
    np.testing.assert_array_equal(slopes[1], 0)


BAND = {"positive_low": 0.5, "positive_high": 2.0, "negative_low": 0.25, "negative_high": 4.0}


def banded(ratio, advantage, **change):
    """Loss, d loss / d logp, diagnostics, at logp = -1."""

    def loss(logp):
        token_loss, diagnostics = signed_band(logp, row(*ratio), row(*advantage), **(BAND | change))
        return token_loss.sum(), (token_loss, diagnostics)

    slope, (token_loss, diagnostics) = jax.grad(loss, has_aux=True)(row(*[-1.0] * len(ratio)))
    return token_loss[0], slope[0], diagnostics


def test_signed_band_drops_and_does_not_clamp():
    ratio = [0.4, 0.5, 2, 2.1, 0.2, 0.25, 4, 4.1]
    advantage = [3, 3, 3, 3, -1, -1, -1, -1]
    token_loss, slope, diagnostics = banded(ratio, advantage)
    # -r A inside of the band, its ends included, 0 outside
    np.testing.assert_allclose(slope, [0, -1.5, -6, 0, 0, 0.25, 4, 0], rtol=1e-6)
    np.testing.assert_allclose(token_loss, [0, 1.5, 6, 0, 0, -0.25, -4, 0], rtol=1e-6)
    np.testing.assert_array_equal(diagnostics["dropped"], [[1, 0, 0, 1, 1, 0, 0, 1]])


@pytest.mark.parametrize(
    ("sign", "name"),
    [(1, "negative_low"), (1, "negative_high"), (-1, "positive_low"), (-1, "positive_high")],
)
def test_bounds_of_one_sign_do_not_touch_the_other(sign, name):
    ratio, advantage = [0.3, 0.7, 1.5, 3.0], [sign * 1.0] * 4
    moved = banded(ratio, advantage, **{name: 1.0})
    np.testing.assert_array_equal(moved[1], banded(ratio, advantage)[1])
    own = name.replace("positive", "x").replace("negative", "positive").replace("x", "negative")
    assert (banded(ratio, advantage, **{own: 1.0})[1] != moved[1]).any()


@pytest.mark.parametrize("logp", [-0.5, -1.0, -3.0])
def test_case_24_the_weight_is_detached(logp):
    # on-policy, A = 1: slope -1 for every logp. Not detached: -.5, 0 and +2
    def loss(x):
        return detached_ratio(x, jnp.exp(x - logp), row(1), low=0.0, high=5.0)[0].sum()

    np.testing.assert_array_equal(jax.grad(loss)(row(logp)), [[-1]])


def test_case_24_the_bounds_are_absolute_and_no_token_is_lost():
    # weights min(r, 5): .1, 1, 5 and 5; A -1, 2, 1, -1
    ratio, advantage, logp = row(0.1, 1, 7, 1e8), row(-1, 2, 1, -1), row(-1, -2, -3, -4)

    def loss(x, low):
        token_loss, diagnostics = detached_ratio(x, ratio, advantage, low=low, high=5.0)
        return token_loss.sum(), (token_loss, diagnostics)

    slope, (token_loss, diagnostics) = jax.grad(loss, has_aux=True)(logp, 0.0)
    np.testing.assert_allclose(slope, [[0.1, -2, -5, 5]], rtol=1e-6)
    np.testing.assert_allclose(token_loss, [[-0.1, 4, 15, -20]], rtol=1e-6)
    np.testing.assert_array_equal(diagnostics["clipped"], [[0, 0, 1, 1]])
    np.testing.assert_allclose(jax.grad(loss, has_aux=True)(logp, 0.8)[0][0, 0], 0.8, rtol=1e-6)
