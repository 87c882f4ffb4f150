"""Numbers worked by hand for kernels/steps.py."""

import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.steps import (
    amplified,
    over_last_token,
    over_tokens,
    rollout_sum,
    step_gain,
    step_over_tokens,
)

ROLLOUT = jnp.asarray([2, 0, 2])  # rows 0 and 2 are branches of rollout 2; rollout 1 has no row
MASK = jnp.asarray([[1, 1], [0, 1], [1, 0]], bool)


def test_rollout_sum():
    x = jnp.asarray([[1.0, 2], [jnp.nan, 4], [8, jnp.nan]])
    np.testing.assert_array_equal(rollout_sum(x, ROLLOUT, MASK, rollouts=3), [4, 0, 11])


def test_an_empty_response_sums_to_zero():
    x, none = jnp.full((3, 2), jnp.nan), jnp.zeros_like(MASK)
    np.testing.assert_array_equal(rollout_sum(x, ROLLOUT, none, rollouts=3), 0)


def test_over_tokens():
    got = over_tokens(jnp.asarray([5.0, 6, 7]), ROLLOUT, MASK)
    np.testing.assert_array_equal(got, [[7, 7], [0, 5], [7, 0]])


def test_over_last_token():
    got = over_last_token(jnp.asarray([5.0, 6, 7]), ROLLOUT, MASK)
    np.testing.assert_array_equal(got, [[0, 7], [0, 5], [7, 0]])  # the last of each branch
    np.testing.assert_array_equal(over_last_token(jnp.ones(3), ROLLOUT, MASK & False), 0 * got)


def test_step_over_tokens():
    # the third rollout has steps 0 and 1 only; -1 is outside of steps, 2 is no step of it
    x = jnp.asarray([[1.0, 2], [3, 4], [5, 6]])
    step = jnp.asarray([[1, 2], [0, 1], [-1, 0]])
    np.testing.assert_array_equal(
        step_over_tokens(x, step, ROLLOUT, jnp.ones_like(MASK)), [[6, 0], [1, 2], [0, 5]]
    )
    np.testing.assert_array_equal(
        step_over_tokens(x, step, ROLLOUT, MASK), [[6, 0], [0, 2], [0, 0]]
    )


def test_step_gain():
    # W = (1 + e^2, e, 0, 2) by hand; nobody was named in the second rollout
    named = jnp.asarray([[[1, 0, 0, 2], [0, 1, 0, 0], [1, 0, 0, 0]], jnp.zeros((3, 4))])
    worth = np.array([1 + np.e**2, np.e, 0, 2])
    np.testing.assert_allclose(step_gain(named), [worth / worth[0], [0] * 4], rtol=1e-6)


def test_a_step_that_only_one_match_names_is_the_measure():
    named = jnp.zeros((1, 5, 3)).at[0, 4, 1].set(1)
    np.testing.assert_array_equal(step_gain(named), [[0, 1, 0]])


def test_a5_amplification_has_bounds_and_never_turns_a_sign():
    rng = np.random.default_rng(0)
    advantage = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32).at[0].set(0)
    gain = step_gain(jnp.asarray(rng.integers(0, 3, (8, 4, 6))))
    got = amplified(advantage, gain, weight=1.0)
    down = advantage <= 0
    np.testing.assert_array_equal(got[down], advantage[down])  # bit for bit
    factor = got[~down] / advantage[~down]
    assert (factor >= 1 - 1e-6).all() and (factor <= 2 + 1e-6).all() and factor.max() > 1.9
    np.testing.assert_array_equal(amplified(advantage, gain, weight=0.0), advantage)
