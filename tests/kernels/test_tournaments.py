"""Numbers worked by hand for kernels/tournaments.py."""

import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.groups import group_center
from jaxrl.kernels.tournaments import rank_reward, tournament_rank

GROUP = jnp.asarray([7, 2, 7, 7, 2, 9, 7, 3, 3])
POINTS = jnp.asarray([5.0, 1, 8, 5, 1, 4, -2, jnp.nan, 6])
MASK = jnp.asarray([1, 1, 1, 1, 1, 1, 1, 0, 1], bool)


def test_equal_points_share_the_mean_of_their_places():
    # group 7: 8 first, the two 5 share places 1 and 2, -2 last; group 2 is tied; 9 and 3 are alone
    np.testing.assert_array_equal(
        tournament_rank(POINTS, GROUP, MASK), [1.5, 0.5, 0, 1.5, 0.5, 0, 3, 0, 0]
    )


def test_rank_reward():
    # 1 - rank / 3 in group 7; nobody won in a tied group and in groups of one
    got = rank_reward(POINTS, GROUP, MASK)
    np.testing.assert_allclose(got, [0.5, 0, 1, 0.5, 0, 0, 0, 0, 0], atol=1e-7)
    np.testing.assert_allclose(group_center(got, GROUP, MASK)[GROUP == 7].sum(), 0, atol=1e-6)


def test_what_does_not_count_takes_no_place():
    group, points = jnp.zeros(4, int), jnp.asarray([4.0, 3, 2, 1])
    mask = jnp.asarray([0, 1, 1, 1], bool)
    np.testing.assert_array_equal(tournament_rank(points, group, mask), [0, 0, 1, 2])
    np.testing.assert_array_equal(rank_reward(points, group, mask), [0, 1, 0.5, 0])


def test_moving_rollouts_moves_their_results_along():
    order = np.random.default_rng(0).permutation(9)
    got = rank_reward(POINTS[order], GROUP[order], MASK[order])
    np.testing.assert_array_equal(got, rank_reward(POINTS, GROUP, MASK)[order])


def test_only_the_order_of_the_points_matters():
    got = rank_reward(jnp.exp(POINTS) * 1e3, GROUP, MASK)
    np.testing.assert_array_equal(got, rank_reward(POINTS, GROUP, MASK))
