"""The rules of age, on numbers: how many groups to open, when waiting will do, what dropping
shifts."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pool import staleness
from jaxrl.pool.ranges import Ranges
from jaxrl.pool.rollout import ACTION, INJECTED, PROMPT, Version
from tests.pool.samples import sample


def simulate(durations: list[int], steps: int, batch: int, limit: int, every: int) -> list[int]:
    """A trainer that waits, over groups that need so many ticks, each with its own worker: the ages
    of all groups that it took. A deadlock is a RuntimeError."""
    live: dict[int, int] = {}  # id: version that it was opened with
    ready: set[int] = set()
    running: list[tuple[int, int]] = []  # (tick when it is done, id)
    ages, opened, now, newest = [], 0, 0, 0
    for step in range(steps):
        while True:
            versions = list(live.values())
            for _ in range(staleness.waiting_room(versions, newest, step, batch, limit)):
                live[opened] = newest
                heapq.heappush(running, (now + durations[opened % len(durations)], opened))
                opened += 1
            order = sorted(live, key=lambda number: (live[number], number))
            fit = [number for number in order if number in ready][:batch]
            left = [live[number] for number in order if number not in fit]
            if len(fit) == batch and staleness.feasible(left, step + 1, batch, limit):
                break
            if not running:
                raise RuntimeError(f"step {step} waits for ever: {live}, ready {ready}")
            now, done = heapq.heappop(running)
            ready.add(done)
        for number in fit:
            ages.append(step - live.pop(number))
            ready.discard(number)
        if (step + 1) % every == 0:
            newest = step + 1
    return ages


@settings(max_examples=150, deadline=None)
@given(
    durations=st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
    batch=st.integers(1, 5),
    limit=st.integers(0, 5),
    cadence=st.integers(1, 6),
)
def test_waiting_never_deadlocks_and_nothing_grows_too_old(durations, batch, limit, cadence):
    """Over any durations: every step gets a whole batch, no group older than K, none dropped."""
    every = min(cadence, limit + 1)
    ages = simulate(durations, steps=25, batch=batch, limit=limit, every=every)
    assert len(ages) == 25 * batch
    assert 0 <= min(ages) and max(ages) <= limit


def test_a_check_of_the_oldest_alone_would_deadlock_or_break_the_bound():
    """Three groups of one deadline, B = 2: the oldest is young enough, and one will be too old."""
    assert not staleness.feasible([3, 3, 3], step=5, batch=2, limit=2)
    assert staleness.feasible([3, 3, 4, 4, 5, 5], step=5, batch=2, limit=2)
    assert not staleness.feasible([2], step=5, batch=2, limit=2)
    assert staleness.feasible([], step=5, batch=2, limit=0)
    assert not staleness.feasible([4, 4, 4, 4, 4, 5, 5], step=5, batch=2, limit=2)


def test_a_synchronous_pool_has_one_batch_under_way():
    assert staleness.room([], step=7, batch=4, limit=0) == 4
    assert staleness.room([7, 7, 7], step=7, batch=4, limit=0) == 1
    assert staleness.waiting_room([7, 7], newest=7, step=7, batch=4, limit=0) == 2
    assert staleness.room([5] * 3, step=7, batch=4, limit=2) == 9


def test_rare_weights_open_only_what_can_be_taken_in_time():
    """Weights of every second step, K = 1: in the step between, a new group would be too old."""
    assert staleness.waiting_room([0, 0], newest=0, step=1, batch=2, limit=1) == 0
    assert staleness.room([0, 0], step=1, batch=2, limit=1) == 2


def test_ages_are_of_trained_tokens_and_those_of_a_given_up_lineage_are_k():
    rollout = sample(
        kind=np.array([PROMPT, ACTION, ACTION, ACTION], np.uint8),
        logp=np.array([0, -1, -1, -1], np.float32),
        version_index=np.array([65535, 0, 1, 2], np.uint16),
        versions=(Version(0, 4, "a"), Version(0, 9, "gone"), Version(1, 7, "b")),
    )
    ages = staleness.ages(rollout, step=8, resumed=Version(1, 6, "c"), limit=5)
    assert ages.tolist() == [4, 5, 1]
    first = staleness.ages(rollout, step=8, resumed=Version(0, 0, "x"), limit=5)
    assert first.tolist() == [4, 5, 1]  # a version from the future is never a negative age


def test_tokens_over_age_stay_in_the_context_and_are_not_trained():
    rollout = sample(
        kind=np.array([PROMPT, ACTION, ACTION, ACTION], np.uint8),
        logp=np.array([0, -1, -2, -3], np.float32),
        version_index=np.array([65535, 0, 1, 1], np.uint16),
        versions=(Version(0, 1, "a"), Version(0, 2, "b")),
    )
    young, count = staleness.untrain_old(rollout, oldest=2)
    assert young.kind.tolist() == [PROMPT, INJECTED, ACTION, ACTION] and count == 1
    assert young.tokens.tolist() == rollout.tokens.tolist()
    assert staleness.untrain_old(rollout, oldest=1) == (rollout, 0)


def test_the_meter_reports_a_planted_shift():
    """Durations that tell the difficulty, the slowest fifth dropped: the meter says by how much
    what is left is quicker, and easier, than what was asked."""
    random = np.random.default_rng(0)
    log_s = random.normal(2.0, 0.7, 5000)
    reward = np.clip(0.8 - 0.3 * (log_s - 2.0), 0, 1)  # hard ones are slow
    dropped = log_s > np.quantile(log_s, 0.8)
    meter = staleness.DropMeter()
    for one, mean, lost in zip(log_s, reward, dropped, strict=True):
        meter.add(math.exp(one), [float(mean)] * 3, dropped=bool(lost))
    told = meter.readings()
    assert told["drop_frac"] == pytest.approx(0.2)
    expected = log_s[~dropped].mean() - log_s.mean()
    assert told["drop_log_seconds_shift"] == pytest.approx(expected) and expected < -0.2
    expected = reward[~dropped].mean() - reward.mean()
    assert told["drop_reward_shift"] == pytest.approx(expected) and expected > 0.05
    again = staleness.DropMeter.of(meter.state())
    assert again.readings() == told


def test_a_meter_without_drops_reports_no_shift():
    meter = staleness.DropMeter()
    assert set(meter.readings().values()) == {0.0}
    meter.add(3.0, [1.0], dropped=False)
    meter.add(9.0, [], dropped=True)  # nothing of it was sealed: its reward is not known
    told = meter.readings()
    assert told["drop_frac"] == 0.5 and told["drop_log_seconds_shift"] < 0
    assert told["drop_reward_shift"] == 0


@given(st.lists(st.integers(0, 40)), st.integers(0, 45))
def test_ranges_are_sets(numbers, end):
    ranges = Ranges()
    for number in numbers:
        ranges.add(number)
    pairs = list(ranges)
    assert sorted(set(numbers)) == [n for first, last in pairs for n in range(first, last + 1)]
    assert all(b - a > 1 for (_, a), (b, _) in zip(pairs, pairs[1:], strict=False))
    assert len(ranges) == len(set(numbers)) and all(n in ranges for n in numbers)
    assert list(ranges.gaps(end)) == [n for n in range(end) if n not in set(numbers)]
    assert list(Ranges(pairs)) == pairs
