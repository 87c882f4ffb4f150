"""Numbers worked by hand for kernels/grades.py, and what its advantages keep for any grades."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.grades import (
    length_penalty,
    overlong_penalty,
    quality_product,
    redistributed,
    segment_scale,
    usable_quality,
)
from tests.papers import dapo
from tests.papers import mimo as paper


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
    np.testing.assert_allclose(got, [dapo.overlong(n, 30, 10, 0.5) for n in range(40)], atol=1e-6)


def one_group(kernel, quality, passed, **numbers):
    """The kernel on a single group, beside rollouts that do not count, in float64."""
    spare = 8 - len(passed)  # one size of arrays: operations compile once
    with jax.enable_x64(True):
        got = kernel(
            jnp.asarray([*quality, *[jnp.nan] * spare], jnp.float64),
            jnp.asarray([*passed, *[1] * spare], bool),
            jnp.full(8, 4),
            jnp.arange(8) < len(passed),
            **numbers,
        )
        return np.asarray(got)[: len(passed)]


def handed_out(quality, passed, cap):
    return one_group(redistributed, quality, passed, cap=cap)


@pytest.mark.parametrize(
    ("quality", "passed", "cap", "expected"),
    [
        # A = (1/3, 1/3, -2/3), lam = (2/3) / (1/3 + 1/6) = 4/3
        ([1, 0.5, 1], [1, 1, 0], np.inf, [4 / 9, 2 / 9, -2 / 3]),
        # A = +-1/2, lam = 1 / (.5 * 1.25) = 1.6
        ([1, 0.25, 1, 1], [1, 1, 0, 0], np.inf, [0.8, 0.2, -0.5, -0.5]),
        # capped: .75, .1875, -.5, -.5 before the mean, -.015625, is taken off
        ([1, 0.25, 1, 1], [1, 1, 0, 0], 1.5, [0.765625, 0.203125, -0.484375, -0.484375]),
        ([1, 0.25, 1, 1], [1, 1, 0, 0], 1.2, [0.6625, 0.2125, -0.4375, -0.4375]),
        # lam 20/3, cap 2: .4/3, .2/3, -2/3 have sum -1.4/3; failures get less blame, as intended
        ([0.2, 0.1, 1], [1, 1, 0], 2.0, np.array([1.3, 1, -2.3]) / 4.5),
        ([0.3, 0.3, 1], [1, 1, 0], 1.5, [1 / 3, 1 / 3, -2 / 3]),  # tied: as it was
        ([0.3, 1, 1], [1, 0, 0], 1.5, [2 / 3, -1 / 3, -1 / 3]),  # a single pass: as it was
        ([0.3, 0.7], [1, 1], 1.5, [0, 0]),
        ([0.3, 0.7], [0, 0], 1.5, [0, 0]),
        ([0.3], [1], 1.5, [0]),
    ],
)
def test_redistribution(quality, passed, cap, expected):
    np.testing.assert_allclose(handed_out(quality, passed, cap), expected, rtol=1e-12, atol=1e-15)


def random_groups(trials, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(trials):
        passed = np.zeros(8, bool)
        passed[: rng.integers(2, 8)] = True  # mixed, at least two passes
        yield rng.choice([0.05, 0.2, 0.4, 0.85, 0.9, 1.0], 8), rng.permutation(passed)


@pytest.mark.parametrize("cap", [1.0, 1.2, 1.5, 3.0, np.inf])
def test_redistribution_keeps_signs_sums_and_order_for_any_cap(cap):
    for quality, passed in random_groups(15):
        got = handed_out(quality, passed, cap)
        assert abs(got.sum()) < 1e-9
        assert (got[passed] > 0).all() and (got[~passed] < 0).all()
        if np.ptp(quality[passed]) > 0:
            np.testing.assert_allclose(
                got, paper.closed_form(quality, passed, cap), rtol=1e-9, atol=1e-12
            )
            order = np.argsort(quality[passed], kind="stable")
            assert (np.diff(got[passed][order]) >= -1e-12).all()
        if cap == np.inf:  # what the passes have in all is theirs to share, failures keep theirs
            rate = passed.mean()
            np.testing.assert_allclose(got[passed].sum(), passed.sum() * (1 - rate), rtol=1e-9)
            np.testing.assert_allclose(got[~passed], -rate, rtol=1e-9)


def test_full_marks_leave_advantages_as_they_are():
    for _, passed in random_groups(5):
        got = handed_out(np.ones(8), passed, 1.5)
        np.testing.assert_allclose(got, passed - passed.mean(), rtol=1e-12)


def test_an_exploit_has_the_advantage_of_a_failure():
    # taken out of the passes before any statistic: the third passed by cheating, the last failed
    quality = [1, 0.5, 1, 1]
    got = handed_out(quality, [1, 1, 0, 0], 1.5)
    assert got[2] == got[3] < 0
    # deciding after the statistics would have had a pass rate of 3/4
    assert handed_out(quality, [1, 1, 1, 0], 1.5)[0] != got[0]


def test_one_missing_grade_makes_the_groups_grades_unusable():
    # the first group lacks a grade, the second has one out of range, the third is whole
    group = jnp.asarray([1, 1, 1, 2, 2, 3, 3, 3])
    passed = jnp.asarray([1, 1, 0, 1, 1, 1, 1, 0], bool)
    graded = jnp.asarray([1, 0, 1, 1, 1, 1, 1, 0], bool)
    with jax.enable_x64(True):
        quality = jnp.asarray([0.5, 0.2, 0.7, 1.5, 0.3, 0.25, 1, 0.3])
        got = usable_quality(quality, graded, passed, group, jnp.arange(8) >= 0)
        np.testing.assert_array_equal(got, [1, 1, 1, 1, 1, 0.25, 1, 1])
        # who does not count lacks nothing
        got = usable_quality(quality, graded, passed, group, jnp.arange(8) != 1)
        np.testing.assert_array_equal(got[:3], [0.5, 1, 1])


def test_the_product_is_zero_at_failures_and_at_most_the_pass():
    # std of (1, .5) over n is .25
    got = one_group(quality_product, [1, 0.5, 1], [1, 1, 0], least_spread=0.25)
    np.testing.assert_array_equal(got, [1, 0.5, 0])
    got = one_group(quality_product, [1, 0.5, 1], [1, 1, 0], least_spread=0.26)
    np.testing.assert_array_equal(got, [1, 1, 0])
    got = one_group(quality_product, [1, 1, 0.2], [1, 1, 0], least_spread=0.0)
    np.testing.assert_array_equal(got, [1, 1, 0])


def test_a_product_that_hardly_differs_falls_back_to_the_pass():
    got = one_group(quality_product, [0.93, 0.931, 0.5], [1, 1, 0], least_spread=0.01)
    np.testing.assert_array_equal(got, [1, 1, 0])


LENGTH = {"penalty": 0.2, "quantile": 0.3, "slack": 0.2, "full": 2.0, "power": 1.5}


def charged(length, passed, **change):
    return one_group(length_penalty, length, passed, **(LENGTH | {"pass_rate": 0.5} | change))


def test_length_penalty():
    # passes 10, 10, 10, 20, 32: place .3 * 4 = 1.2 of the sorted lengths is 10. Excess over it,
    # less .2: 0, .8 and 2, over 1.8: (4/9)^1.5 = 8/27 of .2, then all of it. The failure is long
    got = charged([10, 10, 10, 20, 32, 99], [1, 1, 1, 1, 1, 0])
    np.testing.assert_allclose(got, [0, 0, 0, 1.6 / 27, 0.2, 0], rtol=1e-6)


def test_length_is_no_matter_where_passes_are_rare():
    assert not charged([1, 9, 1, 1], [1, 1, 0, 0]).any()  # half of them is not more than half
    assert charged([1, 9, 1, 1], [1, 1, 0, 0], pass_rate=0.4).any()


SEGMENTS = {"harsher": 2.0, "most": 2.0, "least": 0.5}


def scaled(advantage, flagged, group, **change):
    advantage = jnp.asarray(advantage, jnp.float32)
    mask = jnp.ones(advantage.shape, bool)
    flagged, group = jnp.asarray(flagged, bool), jnp.asarray(group)
    return segment_scale(advantage, flagged, group, mask, **(SEGMENTS | change))


def test_segment_scale():
    advantage = [[1, 1, 1, 1], [-2, -2, -2, -2]]
    flagged = [[1, 0, 0, 0], [1, 0, 0, 0]]
    # H+ = 1, C+ = 3: 4/3 each. H- = 2, C- = 6: twice 2, and 2/3 of 2
    got = scaled(advantage, flagged, [5, 5])
    np.testing.assert_allclose(got[0], [0, 4 / 3, 4 / 3, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(got[1], [-4, -4 / 3, -4 / 3, -4 / 3], rtol=1e-6)
    np.testing.assert_allclose(got.sum(-1), [4, -8], rtol=1e-6)  # sums of both signs stay


def test_segment_scale_has_bounds():
    # H+ = 3, C+ = 1: 4, held at 2. H- = 3, C- = 1: 1 - 3 = -2, held at .5: no sign turns
    got = scaled([[1, 1, 1, 1], [-1, -1, -1, -1]], [[1, 1, 1, 0], [1, 1, 1, 0]], [5, 5])
    np.testing.assert_allclose(got, [[0, 0, 0, 2], [-2, -2, -2, -0.5]], rtol=1e-6)


def test_segment_scale_without_clean_tokens_and_across_groups():
    # all flagged: nothing to make up for it; another group's tokens do not
    got = scaled([[1, 1], [3, 3], [0, 0]], [[1, 1], [0, 0], [1, 0]], [5, 6, 6])
    np.testing.assert_array_equal(got, [[0, 0], [3, 3], [0, 0]])
