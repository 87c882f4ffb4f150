"""What becomes a row, what is refused and counted, and where everything lands."""

import dataclasses
import math

import numpy as np
import pytest

from jaxrl.batch import ACTION, PAD, PROMPT
from jaxrl.pool.rollout import Failure, StopReason
from jaxrl.train.collate import bucket, collate
from tests.train.toy import group, rollout

QUIET = {
    "rejected_ragged": 0,
    "rejected_long": 0,
    "rejected_duplicate": 0,
    "rejected_unscored": 0,
    "nonfinite_logp": 0,
    "nonfinite_reward": 0,
    "failed": 0,
    "duplicate_frac": 0,
}


def collated(groups, *, size=2, step_groups=None, minibatches=1, buckets=(4, 8), needs=()):
    return collate(
        groups,
        token_buckets=buckets,
        groups_per_step=step_groups or len(groups),
        rollouts_per_group=size,
        minibatches=minibatches,
        needs=needs,
        algorithm="toy",
    )


def two(first, second=None):
    """One group: the rollout in question, and a sound one beside it."""
    return [group(7, [first, second or rollout(7, 1, [1, 2], [3], 1.0)])]


def test_a_rollout_becomes_a_row_and_padding_is_harmless():
    groups = [
        group(7, [rollout(7, 0, [1, 2], [3, 4, 5], 1.0, logp=[-0.5, -1, -2], temperature=0.7)]),
        group(9, [rollout(9, 0, [6], [7], 0.5), rollout(9, 1, [6], [5, 4], 0.0)]),
    ]
    batch, counts = collated(groups)
    assert counts == QUIET
    np.testing.assert_array_equal(batch.tokens[0], [1, 2, 3, 4, 5, 0, 0, 0])
    np.testing.assert_array_equal(batch.position[0], [0, 1, 2, 3, 4, 0, 0, 0])
    np.testing.assert_array_equal(batch.segment[0], [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(batch.kind[0], [PROMPT] * 2 + [ACTION] * 3 + [PAD] * 3)
    np.testing.assert_array_equal(batch.step[0], [-1, -1, 0, 0, 0, -1, -1, -1])
    np.testing.assert_allclose(batch.sampler_logp[0], [0, 0, -0.5, -1, -2, 0, 0, 0])
    np.testing.assert_array_equal(batch.version[0], [-1, -1, 3, 3, 3, -1, -1, -1])
    np.testing.assert_allclose(batch.temperature[0], [1, 1, 0.7, 0.7, 0.7, 1, 1, 1])
    np.testing.assert_array_equal(batch.group, [7, 7, 9, 9])  # the missing sibling keeps its slot
    np.testing.assert_array_equal(batch.valid, [True, False, True, True])
    np.testing.assert_array_equal(batch.reward, np.array([1, 0, 0.5, 0], np.float32))
    np.testing.assert_array_equal(batch.rollout, [0, 1, 2, 3])
    assert (batch.kind[1] == PAD).all() and (batch.temperature[1] == 1).all()


def test_ids_and_logps_of_different_lengths_are_refused_not_repaired():
    """Case 7: 3 ids with 2 log-probs -> rejected_ragged = 1. Two ids stay two ids."""
    ragged = dataclasses.replace(
        rollout(7, 0, [], [0, 1, 2], 1.0), logp=np.array([-1, -1], np.float32)
    )
    batch, counts = collated(two(ragged))
    assert counts["rejected_ragged"] == 1
    assert batch.valid.sum() == 1
    batch, _ = collated(two(dataclasses.replace(rollout(7, 0, [5], [0, 1], 1.0), text="ab")))
    np.testing.assert_array_equal(batch.tokens[0], [5, 0, 1, 0])


@pytest.mark.parametrize("column", ["kind", "step", "version_index", "temperature"])
def test_any_column_may_be_the_ragged_one(column):
    good = rollout(7, 0, [1], [2, 3], 1.0)
    bad = dataclasses.replace(good, **{column: getattr(good, column)[:-1]})
    assert collated(two(bad))[1]["rejected_ragged"] == 1


def test_too_long_is_refused_and_never_cut():
    """Case 6: an over-long row is rejected and counted."""
    batch, counts = collated(two(rollout(7, 0, [1] * 6, [2] * 3, 1.0)))  # 9 tokens, bucket 8
    assert counts["rejected_long"] == 1
    assert batch.tokens.shape == (2, 4)  # the bucket of what is left
    assert batch.valid.sum() == 1


def test_the_same_sample_twice_is_refused():
    batch, counts = collated(two(rollout(7, 1, [1], [2], 1.0)))
    assert counts["rejected_duplicate"] == 1
    assert batch.valid.sum() == 1


def test_an_action_that_nothing_comes_before_is_refused():
    assert collated(two(rollout(7, 0, [], [2, 3], 1.0)))[1]["rejected_unscored"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_no_number_is_refused(value):
    batch, counts = collated(two(rollout(7, 0, [1], [2, 3], 1.0, logp=[-1, value])))
    assert counts["nonfinite_logp"] == 1
    assert np.isfinite(batch.sampler_logp).all()


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_makes_no_failed_answer(reward):
    batch, counts = collated(two(rollout(7, 0, [1], [2], reward)))
    assert counts["nonfinite_reward"] == 1
    np.testing.assert_array_equal(batch.valid, [False, True])
    np.testing.assert_array_equal(batch.reward, [0, 1])


@pytest.mark.parametrize("failure", [Failure.INFRA, Failure.ENV, Failure.DATA, Failure.JUDGE])
def test_a_failure_trains_nothing_whatever_reward_leaked(failure):
    for reward in (None, 0.0, 1.0):
        batch, counts = collated(two(rollout(7, 0, [1], [2], reward, failure=failure)))
        assert counts["failed"] == 1
        np.testing.assert_array_equal(batch.valid, [False, True])
        assert not batch.acted[0].any()


def test_the_policys_own_timeout_keeps_the_reward_that_was_given():
    failure = Failure.POLICY_TIMEOUT
    batch, counts = collated(two(rollout(7, 0, [1], [2], 0.0, failure=failure)))
    assert batch.valid.all() and counts["failed"] == 0
    batch, counts = collated(two(rollout(7, 0, [1], [2], None, failure=failure)))
    np.testing.assert_array_equal(batch.valid, [False, True])
    assert counts["failed"] == 1


def test_truncation_is_carried():
    stops = [StopReason.STOP, StopReason.LENGTH, StopReason.CONTEXT_LIMIT, StopReason.TIME_LIMIT]
    rollouts = [rollout(7, i, [1], [2], 1.0, stop=stop) for i, stop in enumerate(stops)]
    batch, _ = collated([group(7, rollouts)], size=4)
    np.testing.assert_array_equal(batch.truncated, [False, True, True, False])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_greedy_samples_are_refused_for_training(temperature):
    with pytest.raises(ValueError, match="temperature=.*allowed: > 0 .greedy"):
        collated(two(rollout(7, 0, [1], [2], 1.0, temperature=temperature)))


def test_duplicate_frac():
    """Case 37: a group of 4 with equal ids -> .75; the same answer in another group is no
    duplicate."""
    same = [group(g, [rollout(g, i, [1], [2], 1.0) for i in range(4)]) for g in (7, 9)]
    assert collated(same, size=4)[1]["duplicate_frac"] == 0.75
    distinct = [group(7, [rollout(7, i, [1], [2 + i], 1.0) for i in range(4)])]
    assert collated(distinct, size=4)[1]["duplicate_frac"] == 0


@pytest.mark.parametrize(
    ("longest", "size"), [(317, 384), (128, 128), (129, 256), (1, 128), (0, 128)]
)
def test_bucket(longest, size):
    """Case 38."""
    assert bucket(longest, [128, 256, 384]) == size


def test_no_bucket_is_large_enough():
    with pytest.raises(ValueError, match="385 tokens.*384"):
        bucket(385, [128, 256, 384])


def test_nothing_was_taken():
    batch, counts = collated([], step_groups=3)
    assert batch.tokens.shape == (6, 4)
    assert not batch.valid.any() and not batch.acted.any()
    assert counts == QUIET
    assert len(set(batch.group)) == 3  # empty slots are groups of their own, and of nobody else's
    assert (batch.group < 0).all()


def test_a_short_take_is_spread_over_the_updates():
    groups = [group(g, [rollout(g, i, [1], [2], 1.0) for i in range(2)]) for g in (7, 8, 9)]
    batch, _ = collated(groups, step_groups=8, minibatches=2)
    np.testing.assert_array_equal(batch.minibatch, [0] * 8 + [1] * 8)
    assert [batch.valid[batch.minibatch == m].sum() for m in (0, 1)] == [2, 4]
    full = groups + [group(g, [rollout(g, i, [1], [2], 1.0) for i in range(2)]) for g in (1,)]
    batch, _ = collated(full, minibatches=2)
    np.testing.assert_array_equal(batch.group, [7, 7, 8, 8, 9, 9, 1, 1])  # order kept


def test_whole_records_move():
    """Case 18: ids 0..3, lengths [1, 4, 2, 3], reward = id; in any order each row keeps its
    reward."""
    lengths = [1, 4, 2, 3]
    records = {i: rollout(i, 0, [i + 1], [i + 1] * n, float(i)) for i, n in enumerate(lengths)}
    for order in (sorted(records, key=lambda i: lengths[i]), [3, 1, 0, 2], [0, 1, 2, 3]):
        batch, _ = collated([group(i, [records[i]]) for i in order], size=1, minibatches=2)
        for row in range(4):
            assert batch.reward[row] == batch.group[row] == batch.tokens[row, 0] - 1
            assert batch.acted[row].sum() == lengths[batch.group[row]]


def test_needed_facts_are_carried():
    first = {"grade": 0.5, "token_teacher": np.array([0, -1, -2], np.float32)}
    second = {"grade": 1.0, "token_teacher": np.array([0, -3], np.float32), "unasked": "text"}
    asked = two(
        rollout(7, 0, [1], [2, 3], 1.0, facts=first), rollout(7, 1, [1], [2], 1.0, facts=second)
    )
    batch, _ = collated(asked, needs=("grade", "token_teacher"))
    np.testing.assert_array_equal(batch.facts["grade"], np.array([0.5, 1], np.float32))
    np.testing.assert_array_equal(batch.facts["token_teacher"], [[0, -1, -2, 0], [0, -3, 0, 0]])
    assert set(batch.facts) == {"grade", "token_teacher"}


def test_a_vector_is_not_taken_for_tokens_because_rollouts_are_as_long():
    """Three named steps, and rollouts of three tokens."""
    first, second = {"named": [1, 0, 2]}, {"named": np.array([0, 0, 5])}
    asked = two(
        rollout(7, 0, [1], [2, 3], 1.0, facts=first), rollout(7, 1, [1], [4, 2], 1.0, facts=second)
    )
    batch, _ = collated(asked, needs=("named",))
    np.testing.assert_array_equal(batch.facts["named"], [[1, 0, 2], [0, 0, 5]])


def test_a_token_fact_of_another_length_is_named():
    asked = two(*(rollout(7, i, [1], [2], 1.0, facts={"token_flag": [1, 0, 1]}) for i in range(2)))
    with pytest.raises(ValueError, match=r"'token_flag' of group 7 sample 0 has shape \(3,\)"):
        collated(asked, needs=("token_flag",))


@pytest.mark.parametrize("grades", [(1, 0.5), (0.5, 1)])
def test_a_whole_number_beside_a_fraction_cuts_nothing_off(grades):
    records = [rollout(7, i, [1], [2], 1.0, facts={"grade": x}) for i, x in enumerate(grades)]
    batch, _ = collated(two(*records), needs=("grade",))
    np.testing.assert_array_equal(batch.facts["grade"], grades)
    assert batch.facts["grade"].dtype == np.float32


@pytest.mark.parametrize("fact", ["7", None, ["a", "b"]])
def test_a_fact_that_is_no_number_is_named(fact):
    asked = two(*(rollout(7, i, [1], [2], 1.0, facts={"solution": fact}) for i in range(2)))
    with pytest.raises(ValueError, match="fact 'solution' of group 7 sample 0 is .*numbers"):
        collated(asked, needs=("solution",))


def test_a_missing_fact_is_named_and_so_is_the_algorithm():
    with pytest.raises(
        ValueError, match="'toy' needs the fact 'grade'.*group 7 sample 0.*\\['other'\\]"
    ):
        collated(two(rollout(7, 0, [1], [2], 1.0, facts={"other": 1})), needs=("grade",))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [group(7, [rollout(7, i, [1], [2], 1.0) for i in range(3)])],
            "3 rollouts; allowed: at most",
        ),
        ([group(7, []), group(8, []), group(9, [])], "3 groups were taken; allowed: at most"),
        ([group(7, []), group(7, [])], "group id 7; allowed.*each once a take"),
        ([group(2**31, [])], "group id 2147483648; allowed"),
        ([group(-1, [])], "group id -1; allowed"),
        ([group(7, [rollout(8, 0, [1], [2], 1.0)])], "a rollout of group 8 lies in group 7"),
    ],
)
def test_what_no_pool_may_hand_over(groups, words):
    with pytest.raises(ValueError, match=words):
        collated(groups, step_groups=2)


def test_updates_are_cut_at_group_borders():
    with pytest.raises(
        ValueError, match="train.minibatches=2; allowed: divisors of train.groups=3"
    ):
        collated([], step_groups=3, minibatches=2)
