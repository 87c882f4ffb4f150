"""Numbers worked by hand for kernels/returns.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.returns import CACHED_ROWS, clipped_value, gae, return_to_go, whiten

ONE = jnp.ones((1, 3), bool)
GAP = jnp.asarray([[1, 0, 1, 0, 1, 0]], bool)  # a tool's output between, padding after


def row(*x):
    return jnp.asarray([x], jnp.float32)


def test_return_to_go():
    # from the end: 4; 2 + .5 * 4 = 4; 1 + .5 * 4 = 3
    np.testing.assert_array_equal(return_to_go(row(1, 2, 4), ONE, discount=0.5), [[3, 4, 4]])
    np.testing.assert_array_equal(return_to_go(row(1, 2, 4), ONE, discount=0.0), [[1, 2, 4]])
    np.testing.assert_array_equal(return_to_go(row(0, 0, 4), ONE, discount=1.0), [[4, 4, 4]])


def test_masked_tokens_are_no_steps():
    got = return_to_go(row(1, 9, 2, 9, 4, 9), GAP, discount=0.5)
    np.testing.assert_array_equal(got, [[3, 0, 4, 0, 4, 0]])
    reward, value = row(0, 9, 0, 9, 1, 9), row(0.5, 9, 0.25, 9, 0.75, 9)
    got = gae(reward, value, GAP, discount=0.5, trace=0.5)
    alone = gae(row(0, 0, 1), row(0.5, 0.25, 0.75), ONE, discount=0.5, trace=0.5)
    np.testing.assert_array_equal(got[:, ::2], alone)
    np.testing.assert_array_equal(got[:, 1::2], 0)


def test_gae():
    # d = 0 + .5 * .25 - .5 = -.375; .5 * .75 - .25 = .125; 1 - .75 = .25
    # A = .25; .125 + .25 * .25 = .1875; -.375 + .25 * .1875 = -.328125
    got = gae(row(0, 0, 1), row(0.5, 0.25, 0.75), ONE, discount=0.5, trace=0.5)
    np.testing.assert_allclose(got, [[-0.328125, 0.1875, 0.25]], rtol=1e-6)


@pytest.mark.parametrize("rows", [CACHED_ROWS - 1, CACHED_ROWS, CACHED_ROWS + 1, 3 * CACHED_ROWS])
def test_many_rows_are_what_each_is_alone(rows):
    rng = np.random.default_rng(rows)
    reward, value = (jnp.asarray(rng.normal(size=(rows, 6)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((rows, 6)) < 0.7)
    numbers = {"discount": 0.9, "trace": 0.5}

    def loss(kernel, *arrays):
        return (kernel(*arrays) * value).sum()

    for kernel in (
        lambda r, v, m: return_to_go(r, m, discount=0.9),
        lambda r, v, m: gae(r, v, m, **numbers),
    ):
        each = [kernel(*(x[i : i + 1] for x in (reward, value, mask)))[0] for i in range(rows)]
        np.testing.assert_array_equal(kernel(reward, value, mask), each)
        slope = jax.grad(functools.partial(loss, kernel))(reward, value, mask)
        # a token's own reward counts once, and every earlier one of the row sees less of it
        bumped = (loss(kernel, reward.at[0, 2].add(1), value, mask)) - loss(
            kernel, reward, value, mask
        )
        np.testing.assert_allclose(slope[0, 2], bumped, atol=1e-4)


def test_the_ends_of_the_trace():
    rng = np.random.default_rng(0)
    reward, value = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((4, 6)) < 0.7)
    got = gae(reward, value, mask, discount=0.9, trace=1.0)
    whole = return_to_go(reward, mask, discount=0.9)
    np.testing.assert_allclose(got, jnp.where(mask, whole - value, 0), atol=1e-5)
    # a value that is right leaves nothing to be surprised by
    np.testing.assert_allclose(gae(reward, whole, mask, discount=0.9, trace=0.7), 0, atol=1e-5)


def test_whitened_tokens_have_mean_0_and_variance_1():
    # labels 7 (rows 0, 2) and 1 (row 1); tokens 1, 3, 5 and 2, 2, 8 under the mask
    x = jnp.asarray([[1.0, 3, np.nan], [2, 2, 8], [5, np.inf, 0]])
    mask = jnp.asarray([[1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
    got = whiten(x, jnp.asarray([7, 1, 7]), mask)
    # mean 3, variance 8 / 2 = 4; mean 4, variance (4 + 4 + 16) / 2 = 12
    np.testing.assert_allclose(got[0], [-1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(got[1], np.array([-2, -2, 4]) / np.sqrt(12), rtol=1e-6)
    np.testing.assert_allclose(got[2], [1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("mask", [[1, 0, 0], [1, 1, 1], [0, 0, 0]])
def test_one_token_or_equal_tokens_whiten_to_nothing(mask):
    got = whiten(row(0.1, 0.1, 0.1), jnp.zeros(1, int), jnp.asarray([mask], bool))
    np.testing.assert_array_equal(got, 0)


def test_clipped_value():
    # old 0, bound .5. V = .2 goal 1: (.2 - 1)^2 / 2 = .32, slope -.8. V = .9 goal 1: held at .5,
    # .125, no slope. V = .9 goal 0: .405 (.125 when held is less), slope .9. V = .5 goal 2: 1.125
    value, goal = row(0.2, 0.9, 0.9, 0.5), row(1, 1, 0, 2)

    def loss(value, old, goal):
        token_loss, diagnostics = clipped_value(value, old, goal, clip=0.5)
        return token_loss.sum(), (token_loss, diagnostics)

    slopes, (token_loss, diagnostics) = jax.grad(loss, (0, 1, 2), has_aux=True)(
        value, jnp.zeros((1, 4)), goal
    )
    np.testing.assert_allclose(token_loss, [[0.32, 0.125, 0.405, 1.125]], rtol=1e-6)
    np.testing.assert_allclose(slopes[0], [[-0.8, 0, 0.9, -1.5]], rtol=1e-6)
    assert not slopes[1].any() and not slopes[2].any()
    np.testing.assert_array_equal(diagnostics["value_clipped"], [[0, 1, 0, 0]])
    plain, _ = clipped_value(value, jnp.zeros((1, 4)), goal, clip=np.inf)
    np.testing.assert_allclose(plain, (value - goal) ** 2 / 2, rtol=1e-6)
