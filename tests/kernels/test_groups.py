"""Numbers worked by hand for kernels/groups.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.groups import (
    group_center,
    group_max,
    group_mean,
    group_quantile,
    group_scale,
    group_sum,
    leave_one_out,
    size_factor,
)


def call(kernel, x, group, mask=None):
    mask = [True] * len(x) if mask is None else mask
    return np.asarray(
        kernel(jnp.asarray(x, jnp.float32), jnp.asarray(group), jnp.asarray(mask, bool))
    )


@pytest.mark.parametrize("kernel", [group_center, group_scale, leave_one_out])
def test_case_16_a_group_of_one_has_no_advantage(kernel):
    np.testing.assert_array_equal(call(kernel, [0.7], [4]), [0])
    # one valid rollout beside a failed one is a group of one too
    np.testing.assert_array_equal(call(kernel, [0.7, np.nan], [4, 4], [1, 0]), [0, 0])


@pytest.mark.parametrize("kernel", [group_center, group_scale, leave_one_out])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000.1, -1e6 / 7])
def test_case_16_equal_rewards_have_exactly_no_advantage(kernel, reward):
    np.testing.assert_array_equal(call(kernel, [reward] * 7, [1] * 7), [0] * 7)


def test_case_17_the_group_is_the_prompt_instance():
    a, b = 11, 2
    got = call(group_center, [1, 0, 1, 1], [a, a, b, b])
    np.testing.assert_allclose(got, [0.5, -0.5, 0, 0], atol=1e-6)  # mean of a .5, of b 1
    order = [2, 0, 3, 1]
    moved = call(group_center, [1, 1, 1, 0], [b, a, b, a])
    np.testing.assert_allclose(moved, got[order], atol=1e-6)


def test_sums_and_means():
    x, group, mask = [1, 2, 4, 8], [3, 3, 3, 9], [1, 1, 0, 1]
    np.testing.assert_array_equal(call(group_sum, x, group, mask), [3, 3, 3, 8])
    np.testing.assert_array_equal(call(group_mean, x, group, mask), [1.5, 1.5, 1.5, 8])


def test_largest():
    x, group, mask = [-3, -1, 9, 5], [-7, -7, -7, 2**31 - 1], [1, 1, 0, 0]
    np.testing.assert_array_equal(call(group_max, x, group, mask), [-1, -1, -1, 0])


def test_scaled_advantages_have_deviation_one():
    # rewards 0, 0, 3: mean 1, variance (1 + 1 + 4) / 2 = 3
    got = call(group_scale, [0, 0, 3], [1, 1, 1])
    np.testing.assert_allclose(got, np.array([-1, -1, 2]) / np.sqrt(3), rtol=1e-6)
    assert got.std(ddof=1) == pytest.approx(1, rel=1e-6)
    assert got.sum() == pytest.approx(0, abs=1e-6)


def test_scaled_advantages_ignore_unit_and_origin_of_the_reward():
    x = np.array([0.0, 1.0, 0.25, 0.5])
    np.testing.assert_allclose(
        call(group_scale, 40 * x + 7, [1] * 4), call(group_scale, x, [1] * 4), rtol=1e-4
    )


def test_leave_one_out():
    # rewards 1, 0, 0: 1 - 0 = 1; 0 - (1 + 0) / 2 = -.5. Also n / (n - 1) = 3 / 2 of the centred
    x, group = [1, 0, 0], [5, 5, 5]
    np.testing.assert_allclose(call(leave_one_out, x, group), [1, -0.5, -0.5], rtol=1e-6)
    np.testing.assert_allclose(
        call(leave_one_out, x, group), 1.5 * call(group_center, x, group), rtol=1e-6
    )


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
def test_group_quantile_is_numpys(fraction):
    rng = np.random.default_rng(0)
    x, group, mask = rng.normal(size=30), rng.integers(0, 6, 30), rng.random(30) < 0.6
    group[0], mask[0] = 77, False  # a group in which nobody counts
    got = np.asarray(
        group_quantile(jnp.asarray(x), jnp.asarray(group), jnp.asarray(mask), fraction=fraction)
    )
    for number in set(group.tolist()):
        counted = x[(group == number) & mask]
        expected = np.quantile(counted, fraction) if counted.size else 0
        np.testing.assert_allclose(got[group == number], expected, rtol=1e-5)


def test_groups_of_any_size_get_the_scale_of_a_full_one():
    # groups of 2, 3 and 1 and a failed rollout: n / (n - 1) = 2, 3/2, 0; times 1 - 1/4 for full 4
    group, mask = [1, 1, 2, 2, 2, 5, 2], [1, 1, 1, 1, 1, 1, 0]
    arrays = (jnp.asarray(group), jnp.asarray(mask, bool))
    whole = np.array([2, 2, 1.5, 1.5, 1.5, 0, 0])
    np.testing.assert_allclose(size_factor(*arrays, full=np.inf), whole, rtol=1e-6)
    np.testing.assert_allclose(size_factor(*arrays, full=4.0), 0.75 * whole, rtol=1e-6)
    # n / (n - 1) turns the centred reward into the leave-one-out advantage
    x = [1.0, 0.0, 0.5, 0.2, 0.9, 3.0, 9.0]
    np.testing.assert_allclose(
        whole * call(group_center, x, group, mask), call(leave_one_out, x, group, mask), rtol=1e-6
    )
