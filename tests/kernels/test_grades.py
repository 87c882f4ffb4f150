"""Numbers worked by hand for kernels/grades.py."""

import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.grades import overlong_penalty
from tests.papers import dapo as paper


def test_overlong_penalty():
    # limit 10, buffer 4: 0 up to 6, then -(L - 6) / 4 * 2, -2 from 10 on
    length = jnp.asarray([0, 6, 7, 9, 10, 12])
    got = overlong_penalty(length, limit=10, buffer=4, penalty=2.0)
    np.testing.assert_allclose(got, [0, 0, -0.5, -1.5, -2, -2], rtol=1e-6)


def test_overlong_penalty_falls_without_a_jump_and_equals_the_paper():
    length = jnp.arange(40)
    got = np.asarray(overlong_penalty(length, limit=30, buffer=10, penalty=0.5))
    steps = np.diff(got)
    assert (steps <= 0).all() and steps.min() >= -0.05 - 1e-6  # penalty / buffer a token
    np.testing.assert_allclose(got, [paper.overlong(n, 30, 10, 0.5) for n in range(40)], atol=1e-6)
