"""Numbers worked by hand for kernels/steps.py."""

import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.steps import over_tokens, rollout_sum

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
