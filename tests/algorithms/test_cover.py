"""CoVer against its oracle. M7 and the invariants of coders and testers; M1 ... M5 are
tests/kernels/test_information.py's, M6 tests/tasks/test_matrix.py's."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, differences, logps, update
from tests.papers import cover as paper

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 1.5,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
PLAIN = {
    "trust": TRUST,
    "kl_weight": 0.3,
    "reward": "information",
    "gate": True,
    "levels": 0,
    "reward_duplicates": False,
    "tester_share": 0.3,
    "advantage_clip": 1.2,
}
CODERS, TESTERS = 4, 3
SIZE = CODERS + TESTERS


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def task(truth, passed, counted=None, selected=(1, 1, 1), rewarded=(1, 1, 1)):
    """Facts of one group: coders first, as the pool has them."""
    counted = np.ones_like(passed) if counted is None else counted
    cells = np.zeros((SIZE, 2, TESTERS), np.int32)
    cells[:CODERS, 0], cells[:CODERS, 1] = passed, counted
    return {
        "role": np.repeat([0, 1], [CODERS, TESTERS]),
        "truth": np.concatenate([truth, np.zeros(TESTERS)]),
        "cells": cells,
        "test_index": np.concatenate([np.full(CODERS, -1), np.arange(TESTERS)]),
        "selected": np.concatenate([np.ones(CODERS, int), selected]),
        "rewarded": np.concatenate([np.ones(CODERS, int), rewarded]),
    }


def batch_with(tasks, *, valid=None, minibatch=None):
    rows = SIZE * len(tasks)
    rng = np.random.default_rng(4)
    batch = batch_of(
        rng.integers(0, 4, rows),
        rng.random(rows),  # of no concern to CoVer
        np.repeat(np.arange(len(tasks)) * 5 + 2, SIZE),
        valid=valid,
        minibatch=minibatch,
    )
    facts = {name: np.concatenate([one[name] for one in tasks]) for name in tasks[0]}
    return dataclasses.replace(batch, facts=facts)


GOOD = np.asarray([[1, 0, 1], [1, 1, 0], [0, 1, 1], [0, 0, 0]])
TRUTH = np.asarray([1, 0.75, 0.25, 0])


def several():
    """Two updates: a plain task and one without a telling test; cells, tests and rollouts that do
    not count, copies that fill up, and programs that are all equal."""
    rng = np.random.default_rng(8)
    counted = rng.random((CODERS, TESTERS)) > 0.2
    valid = np.ones(4 * SIZE, bool)
    valid[[1, SIZE + 5, 3 * SIZE]] = False
    return batch_with(
        [
            task(TRUTH, GOOD),
            task(TRUTH, 1 - GOOD[:, [0, 0, 0]]),
            task(TRUTH[::-1], GOOD[:, [0, 1, 1]], counted, selected=(1, 1, 0), rewarded=(1, 0, 1)),
            task(np.full(CODERS, 0.5), GOOD),
        ],
        valid=valid,
        minibatch=np.repeat([0, 0, 1, 1], SIZE),
    )


def rows_of(batch, minibatch):
    """As the oracle wants them."""
    facts = batch.facts
    return [
        {
            "group": int(batch.group[i]),
            "role": ("coder", "tester")[facts["role"][i]],
            "valid": bool(batch.valid[i]) and int(batch.minibatch[i]) == minibatch,
            "passed": facts["cells"][i][0].tolist(),
            "counted": facts["cells"][i][1].tolist(),
            "truth": float(facts["truth"][i]),
            "test": int(facts["test_index"][i]),
            "selected": bool(facts["selected"][i]),
            "rewarded": bool(facts["rewarded"][i]),
        }
        for i in range(len(batch.valid))
    ]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"reward": "miller_madow", "levels": 4, "gate": False, "reward_duplicates": True},
        {"reward": "binned", "levels": 4, "kl_weight": 0.0},
        {"reward": "covariance", "advantage_clip": math.inf, "tester_share": 1.0},
        {"reward": "pass_rate", "gate": False},
    ],
    ids=lambda change: "-".join(map(str, change.values())) or "plain",
)
def test_it_equals_the_oracle(change):
    parameters = PLAIN | change
    batch = several()
    logp, old_logp, ref_logp = (logps(batch, seed) for seed in (1, 2, 3))
    rows = [rows_of(batch, number) for number in (0, 1)]

    def oracle(logp):
        arguments = (logp, old_logp.tolist(), ref_logp.tolist())
        acted = batch.acted.tolist()
        return sum(paper.loss(*arguments, each, acted, parameters | TRUST) for each in rows)

    algorithm = load("cover", **parameters)
    observed = {"old_logp": old_logp, "entropy": ref_logp, "ref_logp": ref_logp}
    value, slope, diagnostics = update(algorithm, batch, logp, observed, micro=4 * SIZE)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=1e-6)
    if not change:
        np.testing.assert_allclose(slope, differences(oracle, logp), rtol=1e-6, atol=2e-8)
        clipped = np.asarray(diagnostics["clipped"])[np.asarray(batch.acted)]
        assert 0 < clipped.sum() < clipped.size  # both branches were tried
        parts = update(algorithm, batch, logp, observed, micro=4)  # cuts groups and roles
        np.testing.assert_allclose(parts[0], value, rtol=1e-6)
        np.testing.assert_allclose(parts[1], slope, rtol=1e-6, atol=1e-12)
        with jax.enable_x64(False):
            narrow = update(algorithm, batch, logp, observed, micro=4 * SIZE)
        np.testing.assert_allclose(narrow[1], slope, rtol=1e-5, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def told_by(algorithm, batch):
    return algorithm.told(batch)


def credit_of(batch, **change):
    return credited(load("cover", **PLAIN | change), batch, {})


def per_rollout(batch, change=None):
    """Advantage and total weight of each rollout."""
    credit = credit_of(batch, **(change or {}))
    advantage = np.asarray(credit.advantage)
    return advantage.max(1) + advantage.min(1), np.asarray(credit.weight).sum(1)


def full(*tasks, valid=None):
    """One or two tasks with answers of two tokens everywhere; a second one that is missing is
    invalid, so that all have one shape."""
    batch = batch_with([*tasks, tasks[0]][:2])
    rows = len(batch.valid)
    valid = np.arange(rows) < SIZE * len(tasks) if valid is None else valid
    plain = batch_of([2] * rows, [0.0] * rows, batch.group, valid=valid)
    return dataclasses.replace(plain, facts=batch.facts)


def test_by_hand():
    # programs .75 and .25 of a test that tells one from the other, one that all pass, one flipped
    passed = np.asarray([[1, 1, 0], [0, 1, 1], [1, 1, 0], [0, 1, 1]])
    batch = full(task([0.75, 0.25, 0.75, 0.25], passed))
    advantage, weight = per_rollout(batch, {"advantage_clip": 3.0})
    advantage, weight = advantage[:SIZE], weight[:SIZE]
    np.testing.assert_allclose(advantage[:CODERS], [1, -1, 1, -1])
    # rewards [I, 0, 0] whatever I is: mean I/3, std I sqrt(2)/3
    np.testing.assert_allclose(advantage[CODERS:], np.asarray([2, -1, -1]) / math.sqrt(2))
    np.testing.assert_allclose(weight, [0.7 / 4] * 4 + [0.3 / 3] * 3)
    table = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)  # 3/8, 1/8, 1/8, 3/8
    np.testing.assert_allclose(
        told_by(load("cover", **PLAIN), batch)[CODERS:SIZE], [table, 0, 0], rtol=1e-6
    )


def test_m7_rewards_of_one_role_never_change_the_others_advantages():
    plain = per_rollout(full(task(TRUTH, GOOD)))[0]
    others = full(task(TRUTH, GOOD[:, ::-1], selected=(1, 1, 0), rewarded=(0, 1, 1)))
    np.testing.assert_array_equal(per_rollout(others)[0][:CODERS], plain[:CODERS])
    # a truth on another scale that orders programs alike: tests earn other amounts, and the
    # coders' own advantages are those of the truth alone
    lower = per_rollout(full(task(TRUTH / 2, GOOD)))[0]
    np.testing.assert_allclose(lower[:CODERS], plain[:CODERS], rtol=1e-6)


def test_tests_that_were_not_selected_are_absent_and_not_negative():
    batch = full(task(TRUTH, GOOD, selected=(1, 0, 1)))
    advantage, weight = per_rollout(batch)
    assert advantage[CODERS + 1] == weight[CODERS + 1] == 0
    np.testing.assert_allclose(weight[:SIZE], [0.7 / 4] * 4 + [0.15, 0, 0.15])


def test_roles_weigh_their_shares_however_many_they_are():
    valid = np.ones(2 * SIZE, bool)
    valid[[0, 1, SIZE + 5]] = False
    batch = full(task(TRUTH, GOOD), task(TRUTH, GOOD), valid=valid)
    _, weight = per_rollout(batch)
    coder = batch.facts["role"] == 0
    np.testing.assert_allclose([weight[coder].sum(), weight[~coder].sum()], [0.7, 0.3])
    _, weight = per_rollout(batch, {"tester_share": 0.0})
    np.testing.assert_allclose([weight[coder].sum(), weight[~coder].sum()], [1, 0])


def test_a_role_without_spread_leaves_its_task_and_the_denominators():
    flat = task(np.full(CODERS, 0.5), GOOD)  # no test tells anything of equal programs
    alone, both = full(task(TRUTH, GOOD)), full(task(TRUTH, GOOD), flat)
    for mine, others in zip(per_rollout(both), per_rollout(alone), strict=True):
        np.testing.assert_allclose(mine, others)
        assert not mine[SIZE:].any()


@pytest.mark.parametrize("truth", [0.0, 1.0])
def test_nothing_is_learnt_where_no_program_or_every_program_is_right(truth):
    credit = credit_of(full(task(np.full(CODERS, truth), GOOD)))
    np.testing.assert_array_equal(credit.weight, 0)
    np.testing.assert_array_equal(credit.advantage, 0)


def test_copies_that_fill_up_earn_nothing_unless_asked():
    batch = full(task(TRUTH, GOOD[:, [0, 0, 1]], rewarded=(1, 0, 1)))
    told = told_by(load("cover", **PLAIN), batch)[CODERS:SIZE]
    assert told[0] > told[1] == 0
    told = told_by(load("cover", **PLAIN | {"reward_duplicates": True}), batch)[CODERS:SIZE]
    assert told[0] == told[1] > 0


def test_cells_that_do_not_count_change_nothing():
    counted = np.ones_like(GOOD)
    counted[2, 1] = 0
    flipped = GOOD.copy()
    flipped[2, 1] = 1 - flipped[2, 1]
    one, two = (full(task(TRUTH, passed, counted)) for passed in (GOOD, flipped))
    np.testing.assert_array_equal(per_rollout(one)[0], per_rollout(two)[0])
    assert (per_rollout(one)[0] != per_rollout(full(task(TRUTH, GOOD)))[0]).any()


def test_order_of_programs_does_not_matter():
    order = np.asarray([2, 0, 3, 1])
    plain, moved = (full(task(TRUTH[o], GOOD[o])) for o in (np.arange(4), order))
    advantage = per_rollout(plain)[0]
    np.testing.assert_allclose(per_rollout(moved)[0][:CODERS], advantage[order], rtol=1e-6)
    np.testing.assert_allclose(per_rollout(moved)[0][CODERS:], advantage[CODERS:], rtol=1e-6)


def test_a_single_telling_test_is_clipped():
    batch = full(task([1, 1, 0, 0], [[1, 0, 1], [1, 0, 1], [0, 0, 1], [0, 0, 1]]))
    assert per_rollout(batch)[0][CODERS] == pytest.approx(1.2)  # sqrt(2) without


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kl_weight", -0.1),
        ("reward", "entropy"),
        ("levels", 4),
        ("tester_share", 1.1),
        ("advantage_clip", 0.0),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        load("cover", **PLAIN | {field: value})


def test_a_gate_asks_for_a_reward_that_knows_the_truth():
    with pytest.raises(ValueError, match="algorithm.gate=True; allowed: false for 'pass_rate'"):
        load("cover", **PLAIN | {"reward": "pass_rate"})
    with pytest.raises(ValueError, match="algorithm.levels=0"):
        load("cover", **PLAIN | {"reward": "binned"})
