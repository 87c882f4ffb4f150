"""ArenaFlow against its oracle, and from the tournament's facts to the tokens."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.tasks.arena import hold
from jaxrl.tasks.judged import ScriptedJudge
from tests.algorithms.batches import batch_of, credited, differences, logps, narrow, update
from tests.papers import arena_flow as paper

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": math.inf,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
PLAIN = {"trust": TRUST, "step_weight": 1.0, "scale_by_std": False, "dynamic_sampling": True}
GROUP = [40] * 5 + [7] * 3 + [9]
VALID = [1, 1, 1, 1, 0, 1, 1, 1, 1]
POINTS = [-1.5, 0, -1.5, -3, 0, -1, -1, -1, 0]
ROUNDS, STEPS = 3, 2
# won matches of each rollout: (depth, steps that were named); step 7 does not exist
WINS = [
    [(0, {0}), (1, {1, 7})],
    [(0, {1}), (1, {1}), (2, {0})],
    [(0, set())],
    [],
    [],
    [(2, {1})],
    [(0, {0})],
    [],
    [],
]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("arena_flow", **PLAIN | change)


def small(points=POINTS, wins=WINS):
    """Three prompts, the last with a lone rollout; two steps in each response, and -1 outside."""
    n = len(points)
    batch = batch_of([4, 3, 4, 2, 3, 1, 4, 2, 3], np.zeros(n), GROUP, valid=VALID)
    named = np.zeros((n, ROUNDS, STEPS), int)
    for i, won in enumerate(wins):
        for depth, steps in won:
            for step in steps & set(range(STEPS)):
                named[i, depth, step] += 1
    place = np.arange(batch.tokens.shape[1])
    step = np.broadcast_to(np.where(place < 2, -1, (place - 2) // 2), batch.tokens.shape)
    facts = {"points": np.asarray(points, float), "named": named}
    return dataclasses.replace(batch, step=step, facts=facts)


def oracle_advantage(batch, parameters):
    group, valid = batch.group.tolist(), batch.valid.tolist()
    each = paper.advantages(POINTS, group, valid, parameters["scale_by_std"])
    gain = [paper.gains(won, STEPS) for won in WINS]
    rest = (batch.step.tolist(), batch.acted.tolist(), parameters["step_weight"])
    return paper.amplified(each, gain, *rest)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "change",
    [{}, {"step_weight": 0.0, "scale_by_std": True}, {"step_weight": 0.5}],
    ids=["arena_flow", "arena_rl", "half"],
)
def test_it_equals_the_oracle(change, dtype):
    parameters, tolerance = PLAIN | change, 1e-6 if dtype is np.float64 else 1e-5
    batch, logp = small(), logps(small(), 1)
    observed = {"old_logp": logp + 0.3 * logps(batch, 2) + 0.3, "entropy": logp}
    advantage = oracle_advantage(batch, parameters)

    def oracle(logp):
        arrays = (observed["old_logp"].tolist(), advantage, batch.acted.tolist())
        return paper.loss(logp, *arrays, TRUST["clip_low"], TRUST["clip_high"])

    value, slope, told = update(make(**change), *narrow((batch, logp, observed), dtype), micro=3)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)
    np.testing.assert_allclose(
        slope, differences(oracle, logp), rtol=tolerance, atol=tolerance / 100
    )
    clipped = np.asarray(told["clipped"])[np.asarray(batch.acted)]
    assert 0 < clipped.sum() < clipped.size


def of_rollouts(batch, **change):
    """Advantage of each rollout's tokens."""
    return np.asarray(credited(make(**change), batch, {}).advantage)


def test_a1_advantages_of_a_group_sum_to_0_before_amplification():
    batch = small()
    each = of_rollouts(batch, step_weight=0.0)[:, 2]  # every rollout has a token there
    for prompt in (40, 7, 9):
        np.testing.assert_allclose(each[batch.group == prompt].sum(), 0, atol=1e-12)
    np.testing.assert_allclose(each[:4], [0, 0.5, 0, -0.5], atol=1e-12)  # ranks 1.5, 0, 1.5, 3
    np.testing.assert_array_equal(each[4:], 0)  # not valid; all level; alone


def test_a5_steps_count_up_to_twice_for_winners_and_never_for_losers():
    batch = small()
    plain, got = of_rollouts(batch, step_weight=0.0), of_rollouts(batch)
    up = plain > 0
    np.testing.assert_array_equal(got[~up], plain[~up])  # bit for bit
    assert ((got[up] >= plain[up]) & (got[up] <= 2 * plain[up] * (1 + 1e-12))).all()
    # the champion's step 0 was named in the final, e^2, step 1 before, 1 + e
    second = (1 + np.e) / np.e**2
    np.testing.assert_allclose(got[1, 2:5] / plain[1, 2:5], [2, 2, 1 + second], rtol=1e-6)
    assert got.sum() >= plain.sum()


def test_a_losers_named_steps_change_nothing():
    wins = [*WINS]
    wins[3] = [(2, {0, 1})]  # the last of its group once won something
    np.testing.assert_array_equal(of_rollouts(small(wins=wins))[3], of_rollouts(small())[3])


@pytest.mark.parametrize("topology", ["round_robin", "swiss", "double_elimination"])
def test_moving_rollouts_moves_their_credit_along(topology):
    """From a tournament held over ids in another order to the advantages of the rows."""
    quality = dict(enumerate([0.1, 0.9, 0.3, 0.7, 0.5, 0.2, 0.8, 0.6]))
    judge = ScriptedJudge(quality, dict.fromkeys(quality, (0,)), 0.8, 0.1, False, "judge")

    def advantages(order):
        held = hold(
            judge,
            {i: True for i in order},
            topology=topology,
            swiss_rounds=3,
            seed=3,
            replays=1,
        )
        batch = batch_of([2] * 8, np.zeros(8), [5] * 8)
        facts = {
            "points": np.array([-held.rank[i] for i in order]),
            "named": np.stack([held.named(i, 8, 1) for i in order]),
        }
        return of_rollouts(dataclasses.replace(batch, facts=facts))[:, 2]

    order = [3, 0, 7, 1, 6, 2, 5, 4]
    np.testing.assert_allclose(advantages(order), advantages(range(8))[order], rtol=1e-12)


def test_facts_are_asked_for_as_they_are_used():
    assert make().needs == ("points", "named")
    assert make(step_weight=0.0).needs == ("points",)


def test_dynamic_sampling_refuses_groups_in_which_all_are_level():
    level, told = {"points": [-1.5] * 4}, {"points": [0, -1, -2.5, -2.5]}
    rewards = np.zeros(4)  # the verifier has no say
    assert not make().keep(rewards, level) and make().keep(rewards, told)
    assert make(dynamic_sampling=False).keep(rewards, level)
    rewards[3] = np.nan  # has no place in the ranking of those that are trained
    assert not make().keep(rewards, {"points": [-1.0, -1.0, -1.0, -3.0]})
    assert make().keep(rewards, {"points": [-1.0, 0.0, -1.0, None]})
    assert not make().keep(np.full(4, np.nan), told)


@pytest.mark.parametrize("value", [-0.1, math.inf])
def test_a_bad_field_is_named(value):
    with pytest.raises(ValueError, match="algorithm.step_weight="):
        make(step_weight=value)
