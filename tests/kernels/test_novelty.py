"""Numbers worked by hand for kernels/novelty.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.novelty import (
    elliptical_novelty,
    neighbour_novelty,
    network_novelty,
    novelty_reward,
)
from tests.papers import exp_dis as paper


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_novelty_is_the_mean_of_the_layers_roots():
    # sqrt(.09 + 1e-8), sqrt(.25 + 1e-8), sqrt(1 + 1e-8): about .3, .5, 1
    got = network_novelty(jnp.asarray([[0.09, 0.25, 1.0], [0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(got, [0.6, 1e-4], rtol=1e-6)
    np.testing.assert_allclose(got[0], paper.novelty([0.09, 0.25, 1.0]), rtol=1e-12)
    slope = jax.grad(lambda x: network_novelty(x).sum())(jnp.zeros((2, 3)))
    np.testing.assert_array_equal(slope, 0)


def test_e1_only_right_answers_earn_novelty():
    new = jnp.asarray([0.4, 0.0, 0.4, jnp.nan])
    correct = jnp.asarray([True, True, False, False])
    np.testing.assert_allclose(novelty_reward(new, correct, weight=0.5), [1.2, 1, -1, -1])
    np.testing.assert_array_equal(novelty_reward(new, correct, weight=0.0), [1, 1, -1, -1])


def test_neighbours_by_hand():
    memory = jnp.asarray([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [jnp.nan, 7.0]])
    features = jnp.asarray([[1.0, 0.0], [1.0, 1.0]])
    mask = jnp.asarray([True, True, True, False])
    # [1, 0]: distances 0, 1, 2; the two nearest have mean 1/2. [1, 1]: 1 - 1/sqrt(2) twice
    got = neighbour_novelty(features, memory, mask, neighbours=2)
    np.testing.assert_allclose(got, [0.5, 1 - 1 / np.sqrt(2)], atol=1e-12)
    # all three, where more are asked for: (0 + 1 + 2) / 3; and nothing without memory
    got = neighbour_novelty(features, memory, mask, neighbours=16)
    np.testing.assert_allclose(got[0], 1.0)
    none = neighbour_novelty(features, memory, jnp.zeros(4, bool), neighbours=2)
    np.testing.assert_array_equal(none, 0)


def test_the_ellipse_by_hand():
    # memory e1, e1: ridge I + [[2, 0], [0, 0]] = diag(3, 1). f = e1: 1/sqrt(3), e2: 1,
    # (1, 1)/sqrt(2): sqrt((1/3 + 1) / 2)
    memory, mask = jnp.asarray([[1.0, 0.0], [5.0, 0.0]]), jnp.ones(2, bool)
    features = jnp.asarray([[4.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    got = elliptical_novelty(features, memory, mask, ridge=1.0)
    np.testing.assert_allclose(got, [3**-0.5, 1, (2 / 3) ** 0.5], rtol=1e-12)
    empty = elliptical_novelty(features, memory, jnp.zeros(2, bool), ridge=4.0)
    np.testing.assert_allclose(empty, 0.5)


def test_the_alternatives_equal_the_oracle():
    rng = np.random.default_rng(0)
    features, memory = rng.normal(size=(5, 3)), rng.normal(size=(6, 3))
    mask = np.array([1, 1, 0, 1, 1, 0], bool)
    arrays = [jnp.asarray(x) for x in (features, memory, mask)]
    kept = memory[mask].tolist()
    near = neighbour_novelty(*arrays, neighbours=2)
    inside = elliptical_novelty(*arrays, ridge=0.7)
    for i, x in enumerate(features.tolist()):
        np.testing.assert_allclose(near[i], paper.neighbour_novelty(x, kept, 2), rtol=1e-6)
        np.testing.assert_allclose(inside[i], paper.elliptical_novelty(x, kept, 0.7), rtol=1e-6)


def test_no_gradient_flows_into_features():
    arrays = jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.ones(4, bool)
    for call in (
        lambda x, *rest: neighbour_novelty(x, *rest, neighbours=2).sum(),
        lambda x, *rest: elliptical_novelty(x, *rest, ridge=1.0).sum(),
    ):
        np.testing.assert_array_equal(jax.grad(call)(*arrays), 0)
