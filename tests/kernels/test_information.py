"""Numbers worked by hand for kernels/information.py. M1 ... M5: CoVer's own checks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.groups import group_normalize
from jaxrl.kernels.information import (
    binned_information,
    covariance,
    gated,
    pass_rate,
    soft_information,
)
from tests.papers import cover as paper

PROGRAMS, TESTS, TASKS, LEVELS = 16, 8, 300, 8


@jax.jit
def everything(*arrays):
    """What all kernels say, by name; compiled once a shape."""
    outcome, _, group, mask = arrays
    gate = covariance(*arrays)
    soft = soft_information(*arrays)
    return {
        "covariance": gate,
        "information": soft,
        "gated": gated(soft, gate),
        "binned": binned_information(*arrays, levels=LEVELS, miller_madow=False),
        "miller_madow": binned_information(*arrays, levels=LEVELS, miller_madow=True),
        "pass_rate": pass_rate(outcome, group, mask),
    }


def of_task(columns, truth, counted=None):
    """What is found of each test by name, from programs that all belong to one task. What is left
    of the fixed shape does not count."""
    columns = np.asarray(columns, float).T
    programs, tests = columns.shape
    outcome, mask = np.zeros((PROGRAMS, TESTS)), np.zeros((PROGRAMS, TESTS), bool)
    outcome[:programs, :tests] = columns
    mask[:programs, :tests] = True if counted is None else np.asarray(counted, bool).T
    arrays = (outcome, np.resize(np.asarray(truth, float), PROGRAMS), np.zeros(PROGRAMS, int), mask)
    found = everything(*map(jnp.asarray, arrays))
    for values in found.values():  # what is found of a test stands at every program
        np.testing.assert_array_equal(values, values[:1].repeat(PROGRAMS, 0))
    return {name: np.asarray(values[0, :tests]) for name, values in found.items()}


def rewards(columns, truth):
    """Gated soft information of each test."""
    return of_task(columns, truth)["gated"]


def test_by_hand():
    found = of_task([[1, 1, 0, 0]], [1, 0.5, 0.5, 0])
    # cov = mean([.5, .5, -.5, -.5] * y) = (.5 + .25 - .25) / 4
    np.testing.assert_allclose(found["covariance"], 0.125)
    # P(1, right) = (1 + .5) / 4 = 3/8, P(1, wrong) = 1/8, and the same mirrored; margins 1/2
    expected = 2 * 3 / 8 * math.log(3 / 2) + 2 * 1 / 8 * math.log(1 / 2)
    np.testing.assert_allclose(found["information"], expected, rtol=1e-6)
    # eighths: v = 8, 4, 4, 0. Passing tells v except at v = 4: log 2 - 1/2 log 2
    np.testing.assert_allclose(found["binned"], math.log(2) / 2, rtol=1e-6)
    # three occupied levels, four programs: less 2 / 8
    np.testing.assert_allclose(found["miller_madow"], math.log(2) / 2 - 0.25, rtol=1e-6)
    np.testing.assert_allclose(found["pass_rate"], 0.5)


def test_cells_that_do_not_count_are_left_out_of_their_column_alone():
    found = of_task([[1, 0, 0], [1, 0, 0]], [1, 0, 1], counted=[[1, 1, 0], [1, 1, 1]])
    # two programs: the test tells everything, log 2; three: a table of [0 1/3; 1/3 1/3]
    expected = [math.log(2), paper.soft_information([(1, 1), (0, 0), (0, 1)])]
    np.testing.assert_allclose(found["information"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["pass_rate"], [1 / 2, 1 / 3])
    np.testing.assert_allclose(found["binned"][0], math.log(2), rtol=1e-6)


def test_m1_m2_constant_and_flipped_columns_earn_nothing():
    truth = [1 / 3, 2 / 3, 1 / 3, 1]
    columns = [[1] * 4, [0] * 4, [0, 1, 0, 1], [1, 0, 1, 0], [1, 0, 0, 1]]
    found = rewards(columns, truth)
    np.testing.assert_array_equal(found[[0, 1, 3]], 0)
    assert found[2] > found[4] > 0
    assert of_task(columns, truth)["information"][3] > 0.1  # without the gate it earns


def of_tasks(outcome, truth):
    """What is found of two tests [task program test] of each of many tasks, by name."""
    group = np.arange(TASKS).repeat(PROGRAMS)
    outcome, truth = outcome.reshape(-1, 2).astype(float), truth.reshape(-1)
    return everything(*map(jnp.asarray, (outcome, truth, group, np.ones(outcome.shape, bool))))


def test_zero_covariance_is_exactly_no_information():
    """Tasks whose eight passing and eight failing programs are equally right."""
    half = np.random.default_rng(0).integers(0, 8, (TASKS, 8)) / 7
    passed = np.arange(PROGRAMS) < 8
    outcome = np.broadcast_to(np.stack([passed, ~passed], -1), (TASKS, PROGRAMS, 2))
    found = of_tasks(outcome, np.concatenate([half, half], -1))
    np.testing.assert_array_equal(found["covariance"], 0)
    np.testing.assert_array_equal(found["information"], 0)


@pytest.mark.parametrize("value", [0, 1, 1 / 3, 0.7])
def test_a_constant_truth_makes_every_test_worthless(value):
    columns = np.random.default_rng(1).random((5, PROGRAMS)) > 0.4
    np.testing.assert_array_equal(rewards(columns, [value] * PROGRAMS), 0)


def test_one_program_tells_nothing():
    np.testing.assert_array_equal(rewards([[1], [0]], [1]), 0)


def entropy(p):
    return -sum(x * math.log(x) for x in (p, 1 - p) if x > 0)


def test_m3_order_of_programs_does_not_matter_and_entropies_bound_it():
    rng = np.random.default_rng(2)
    truth, columns = rng.random(16), rng.random((6, 16)) > 0.5
    found = rewards(columns, truth)
    order = rng.permutation(16)
    np.testing.assert_allclose(rewards(columns[:, order], truth[order]), found, rtol=1e-5)
    raw = of_task(columns, truth)["information"]
    for j in range(6):
        assert raw[j] <= min(entropy(columns[j].mean()), entropy(truth.mean())) + 1e-6


def test_m4_a_test_that_tells_right_from_wrong_has_the_entropy_of_the_truth():
    truth = np.asarray([1, 0, 0, 1, 0, 0, 0, 0.0])
    np.testing.assert_allclose(rewards([truth], truth), entropy(1 / 4), rtol=1e-6)


def test_m5_the_gate_is_strict():
    information = jnp.asarray([[0.3, 0.3, 0.3]])
    np.testing.assert_allclose(
        gated(information, jnp.asarray([[0.0, 1e-5, -1e-5]])), [[0, 0.3, 0]], rtol=1e-6
    )


def test_the_bins_of_distinct_values_measure_the_column_and_not_the_test():
    """Eight distinct truths: the plug-in is the column's entropy for a useless test too."""
    rng = np.random.default_rng(3)
    truth, columns = rng.permutation(8) / 7, rng.random((TESTS, 8)) > 0.5
    found = of_task(columns, truth)
    np.testing.assert_allclose(
        found["binned"], [entropy(c.sum() / 8) for c in columns], rtol=1e-5, atol=1e-6
    )
    assert found["information"].sum() < 0.3 * found["binned"].sum()


def test_a_coin_earns_less_with_soft_labels_than_with_bins():
    """Gated means over coins and over threshold tests: 16 programs, truth in eighths."""
    rng = np.random.default_rng(4)
    truth = rng.integers(0, 9, (TASKS, PROGRAMS)) / 8
    outcome = np.stack([rng.random((TASKS, PROGRAMS)) > 0.5, truth > 0.5], -1)
    found = of_tasks(outcome, truth)
    ratio = {}
    for name in ("information", "binned", "miller_madow"):
        coin, told = np.where(found["covariance"] > 0, found[name], 0).mean(0)
        ratio[name] = told / coin
    assert ratio["information"] > 20 > ratio["miller_madow"] > ratio["binned"]


def test_it_equals_the_paper():
    rng = np.random.default_rng(5)
    group = rng.choice([7, 3], 24)
    truth, outcome = rng.integers(0, 9, 24) / 8, rng.random((24, 6)) > 0.4
    mask = rng.random((24, 6)) > 0.2
    with jax.enable_x64(True):
        found = everything(*map(jnp.asarray, (outcome.astype(float), truth, group, mask)))
        del found["gated"]
    for kind, values in found.items():
        for i in range(24):
            mine = np.flatnonzero(group == group[i])
            passed, known, counted = (x[mine].tolist() for x in (outcome, truth, mask))
            for j in range(6):
                expected = paper.reward_of_test(passed, known, counted, j, kind, False, LEVELS)
                np.testing.assert_allclose(values[i, j], expected, rtol=1e-6, atol=1e-12)


def test_a_role_is_normalised_over_its_own_number():
    # [3, 0, 0, 0]: mean 3/4, std over n = sqrt((27/4)/4) = sqrt(27)/4: sqrt(3) and -1/sqrt(3)
    # one that differs from fifteen gets sqrt(15) = 3.87, clipped at 3.5; 1e-7 is rounding
    x = np.zeros(41)
    x[[0, 4, 6, 22]] = 3, 50, 1, 1e-7
    group = np.repeat([5, 0, 9], [5, 16, 20])
    mask = np.arange(41) != 4
    found = np.asarray(group_normalize(*map(jnp.asarray, (x, group, mask)), bound=3.5))
    third = 1 / math.sqrt(3)
    np.testing.assert_allclose(found[:5], [math.sqrt(3), -third, -third, -third, 0], rtol=1e-6)
    np.testing.assert_allclose(found[[5, 6]], [-1 / math.sqrt(15), 3.5], rtol=1e-6)
    np.testing.assert_array_equal(found[21:], 0)
