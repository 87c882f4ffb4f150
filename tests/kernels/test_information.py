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


def one_task(columns, truth, counted=None):
    """(outcome, truth, group, mask) of programs that all belong to one task."""
    outcome = jnp.asarray(columns, float).T
    mask = jnp.ones(outcome.shape, bool) if counted is None else jnp.asarray(counted, bool).T
    return outcome, jnp.asarray(truth, float), jnp.zeros(len(truth), int), mask


@jax.jit
def reward(*arrays):
    return gated(soft_information(*arrays), covariance(*arrays))


def rewards(columns, truth):
    """Gated soft information of each test, as at every program."""
    found = reward(*one_task(columns, truth))
    np.testing.assert_array_equal(found, found[:1].repeat(len(truth), 0))
    return np.asarray(found[0])


def test_by_hand():
    arrays = one_task([[1, 1, 0, 0]], [1, 0.5, 0.5, 0])
    # cov = mean([.5, .5, -.5, -.5] * y) = (.5 + .25 - .25) / 4
    np.testing.assert_allclose(covariance(*arrays)[:, 0], 0.125)
    # P(1, right) = (1 + .5) / 4 = 3/8, P(1, wrong) = 1/8, and the same mirrored; margins 1/2
    expected = 2 * 3 / 8 * math.log(3 / 2) + 2 * 1 / 8 * math.log(1 / 2)
    np.testing.assert_allclose(soft_information(*arrays)[:, 0], expected, rtol=1e-6)
    # levels 2: v = 2, 1, 1, 0. Passing tells v except at v = 1: log 2 - 1/2 log 2
    binned = binned_information(*arrays, levels=2, miller_madow=False)
    np.testing.assert_allclose(binned[:, 0], math.log(2) / 2, rtol=1e-6)
    # three occupied levels, four programs: less 2 / 8
    binned = binned_information(*arrays, levels=2, miller_madow=True)
    np.testing.assert_allclose(binned[:, 0], math.log(2) / 2 - 0.25, rtol=1e-6)
    np.testing.assert_allclose(pass_rate(arrays[0], *arrays[2:])[:, 0], 0.5)


def test_cells_that_do_not_count_are_left_out_of_their_column_alone():
    arrays = one_task([[1, 0, 0], [1, 0, 0]], [1, 0, 1], counted=[[1, 1, 0], [1, 1, 1]])
    # two programs: the test tells everything, log 2; three: a table of [0 1/3; 1/3 1/3]
    expected = [math.log(2), paper.soft_information([(1, 1), (0, 0), (0, 1)])]
    np.testing.assert_allclose(soft_information(*arrays)[0], expected, rtol=1e-6)
    np.testing.assert_allclose(pass_rate(arrays[0], *arrays[2:])[0], [1 / 2, 1 / 3])
    assert binned_information(*arrays, levels=1, miller_madow=False)[0, 0] == pytest.approx(
        math.log(2)
    )


def test_m1_m2_constant_and_flipped_columns_earn_nothing():
    truth = [1 / 3, 2 / 3, 1 / 3, 1]
    columns = [[1] * 4, [0] * 4, [0, 1, 0, 1], [1, 0, 1, 0], [1, 0, 0, 1]]
    found = rewards(columns, truth)
    np.testing.assert_array_equal(found[[0, 1, 3]], 0)
    assert found[2] > found[4] > 0
    assert soft_information(*one_task(columns, truth))[0, 3] > 0.1  # without the gate it earns


def test_zero_covariance_is_exactly_no_information():
    """Fifty tasks whose six passing and six failing programs are equally right."""
    truth = np.random.default_rng(0).integers(0, 8, (50, 1, 6)).repeat(2, 1).reshape(-1) / 7
    outcome = jnp.tile(jnp.repeat(jnp.asarray([1.0, 0.0]), 6), 50)[:, None]
    group, mask = jnp.repeat(jnp.arange(50), 12), jnp.ones(outcome.shape, bool)
    arrays = (outcome, jnp.asarray(truth), group, mask)
    np.testing.assert_array_equal(covariance(*arrays), 0)
    np.testing.assert_array_equal(soft_information(*arrays), 0)


@pytest.mark.parametrize("value", [0, 1, 1 / 3, 0.7])
def test_a_constant_truth_makes_every_test_worthless(value):
    columns = np.random.default_rng(1).random((5, 16)) > 0.4
    np.testing.assert_array_equal(rewards(columns, [value] * 16), 0)


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
    raw = soft_information(*one_task(columns, truth))[0]
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
    """Sixteen distinct truths: the plug-in is the column's entropy for a useless test too."""
    rng = np.random.default_rng(3)
    truth = rng.permutation(16) / 15
    columns = rng.random((8, 16)) > 0.5
    arrays = one_task(columns, truth)
    hard = binned_information(*arrays, levels=15, miller_madow=False)[0]
    np.testing.assert_allclose(hard, [entropy(c.mean()) for c in columns], rtol=1e-5)
    assert (np.asarray(soft_information(*arrays)[0]) < 0.3 * np.asarray(hard)).all()


def test_a_coin_earns_less_with_soft_labels_than_with_bins():
    """Gated means over coins and over threshold tests: 16 programs, truth in eighths."""
    rng = np.random.default_rng(4)
    tasks = 300
    truth = rng.integers(0, 9, (tasks, 16)) / 8
    coins = rng.random((tasks, 16)) > 0.5
    threshold = truth > 0.5
    outcome = jnp.asarray(np.stack([coins, threshold], -1).reshape(-1, 2), float)
    group = jnp.repeat(jnp.arange(tasks), 16)
    arrays = (outcome, jnp.asarray(truth.reshape(-1)), group, jnp.ones(outcome.shape, bool))
    gate = covariance(*arrays)
    ratio = {}
    for name, found in (
        ("soft", soft_information(*arrays)),
        ("binned", binned_information(*arrays, levels=8, miller_madow=False)),
        ("corrected", binned_information(*arrays, levels=8, miller_madow=True)),
    ):
        coin, told = np.asarray(gated(found, gate)).mean(0)
        ratio[name] = told / coin
    assert ratio["soft"] > 20 > ratio["corrected"] > ratio["binned"]


def test_it_equals_the_paper():
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        group = rng.choice([7, 3], 24)
        truth, outcome = rng.integers(0, 5, 24) / 4, rng.random((24, 6)) > 0.4
        mask = rng.random((24, 6)) > 0.2
        arrays = [jnp.asarray(x) for x in (outcome.astype(float), truth, group, mask)]
        found = {
            "covariance": covariance(*arrays),
            "information": soft_information(*arrays),
            "binned": binned_information(*arrays, levels=4, miller_madow=False),
            "miller_madow": binned_information(*arrays, levels=4, miller_madow=True),
            "pass_rate": pass_rate(arrays[0], *arrays[2:]),
        }
    for kind, values in found.items():
        for i in range(24):
            mine = np.flatnonzero(group == group[i])
            passed, known, counted = (x[mine].tolist() for x in (outcome, truth, mask))
            for j in range(6):
                expected = paper.reward_of_test(passed, known, counted, j, kind, False, 4)
                np.testing.assert_allclose(values[i, j], expected, rtol=1e-6, atol=1e-12)


def test_a_role_is_normalised_over_its_own_number():
    # [3, 0, 0, 0]: mean 3/4, std over n = sqrt((27/4)/4) = sqrt(27)/4: sqrt(3) and -1/sqrt(3)
    group, mask = jnp.zeros(5, int), jnp.asarray([True] * 4 + [False])
    x = jnp.asarray([3.0, 0, 0, 0, 50])
    third = 1 / math.sqrt(3)
    expected = [math.sqrt(3), -third, -third, -third, 0]
    found = group_normalize(x, group, mask, bound=3.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # one that differs from fifteen gets sqrt(15) = 3.87, clipped
    x, group, mask = jnp.eye(16)[2], jnp.zeros(16, int), jnp.ones(16, bool)
    assert group_normalize(x, group, mask, bound=math.inf)[2] == pytest.approx(math.sqrt(15))
    assert group_normalize(x, group, mask, bound=3.0)[2] == 3
    np.testing.assert_array_equal(group_normalize(x * 1e-7, group, mask, bound=3.0), 0)
