"""What a student may copy: right, sound, short, one a problem, always the same."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pool.filtering import REASONS, distil, loops, refusal, survivors
from jaxrl.pool.recorded import RecordedPool, Writer, read
from jaxrl.pool.rollout import ACTION, PROMPT, Failure, StopReason
from tests.papers import exp_dis as paper
from tests.pool.samples import sample

LIMITS = {"limit": 500, "characters": 40, "repeats": 4}


def right(problem="a", length=2, **changes):
    """A rollout that nothing speaks against, with so many tokens of response."""
    total = 1 + length
    columns = {
        "tokens": np.arange(total, dtype=np.uint32),
        "kind": np.array([PROMPT] + [ACTION] * length, np.uint8),
        "step": np.zeros(total, np.int32),
        "logp": np.zeros(total, np.float32),
        "version_index": np.zeros(total, np.uint16),
        "temperature": np.ones(total, np.float32),
    }
    return sample(**columns | {"content_hash": problem, "correct": True, "reward": 1.0} | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"correct": False}, "incorrect"),
        ({"correct": False, "reward": None, "failure": Failure.DATA}, "failed"),
        ({"stop_reason": StopReason.LENGTH}, "unfinished"),
        ({"stop_reason": StopReason.TIME_LIMIT}, "unfinished"),
        ({"length": 0}, "empty"),
        ({"text": "0123456789" * 16}, "looping"),
        ({"text": "0123456789" * 15 + "012345678"}, None),
    ],
)
def test_each_reason_is_found(changes, reason):
    assert refusal(right(**changes), characters=40, repeats=4) == reason
    assert reason is None or reason in REASONS


def test_the_shortest_of_a_problem_survives():
    given_ = [
        right("b", 3, group_id=1, text="long"),
        right("b", 2, group_id=2, text="zz"),
        right("b", 2, group_id=3, text="aa"),  # as short: the text decides
        right("b", 1, group_id=4, correct=False),
        right("a", 5, group_id=5),
    ]
    kept, counts = survivors(given_, **LIMITS)
    assert [rollout.group_id for rollout in kept] == [5, 3]
    expected = {"read": 5, "incorrect": 1, "longer": 2, "over_limit": 0, "kept": 2}
    assert counts == dict.fromkeys(REASONS, 0) | expected
    # neither reward nor novelty ranks
    richer = [right("b", 3, reward=9.0, facts={"novelty": 7}), right("b", 2)]
    assert len(survivors(richer, **LIMITS)[0][0].tokens) == 3


def test_the_limit_counts_problems_in_the_order_of_their_hashes():
    many = [right(problem, group_id=i) for i, problem in enumerate("dbace")]
    kept, counts = survivors(many, **LIMITS | {"limit": 3})
    assert [rollout.content_hash for rollout in kept] == ["a", "b", "c"]
    assert (counts["kept"], counts["over_limit"], counts["longer"]) == (3, 2, 0)


ANY = st.lists(
    st.builds(
        right,
        problem=st.sampled_from("abc"),
        length=st.integers(0, 3),
        correct=st.booleans(),
        text=st.sampled_from(["x", "y", "ab" * 6]),
        group_id=st.integers(0, 2),
        sample=st.integers(0, 3),
        stop_reason=st.sampled_from([StopReason.STOP, StopReason.LENGTH]),
    ),
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(ANY, st.randoms(use_true_random=False), st.integers(1, 3))
def test_e5_at_most_one_a_problem_idempotent_and_in_any_order(rollouts, random, limit):
    numbers = {"limit": limit, "characters": 4, "repeats": 3}
    kept, counts = survivors(rollouts, **numbers)
    problems = [rollout.content_hash for rollout in kept]
    assert len(set(problems)) == len(problems) <= limit
    assert sum(counts.values()) - counts["read"] == counts["read"] == len(rollouts)

    def keys(found):
        return [rollout.digest for rollout in found]

    assert keys(survivors(kept, **numbers)[0]) == keys(kept)
    shuffled = random.sample(rollouts, len(rollouts))
    assert keys(survivors(shuffled, **numbers)[0]) == keys(kept)


@given(st.text("ab", max_size=24), st.integers(1, 3), st.integers(2, 4))
def test_loops_are_found_as_by_the_oracle(text, characters, repeats):
    expected = paper.looping(text, characters, repeats)
    assert loops(text, characters=characters, repeats=repeats) == expected


def test_records_are_distilled_to_the_same_bytes(tmp_path):
    rollouts = [right(p, n, group_id=i) for i, (p, n) in enumerate(itertools.product("ab", (3, 1)))]
    for folder, order in (("one", (0, 1, 2, 3)), ("two", (3, 1, 0, 2))):
        for file in range(2):
            with Writer(tmp_path / folder / f"{file}.rollouts") as writer:
                for i in order[2 * file : 2 * file + 2]:
                    writer.append(rollouts[i])
                writer.append(right("a", 0, run_id="of another run", group_id=9))
    written = []
    for source in ("one", "two", "kept/one"):
        target = tmp_path / "kept" / source
        counts = distil(tmp_path / source, target, run_id="r", **LIMITS)
        assert (counts["kept"], counts["empty"]) == (2, 0)
        written.append((target / "survivors.rollouts").read_bytes())
    assert len(set(written)) == 1
    pool = RecordedPool(tmp_path / "kept/one", seed=0, rollouts_per_group=1, epochs=1)
    groups, _ = pool.take(2, 0)
    assert sorted(group.rollouts[0].content_hash for group in groups) == ["a", "b"]
    assert all(len(group.rollouts[0].tokens) == 2 for group in groups)


def test_nothing_right_leaves_no_record_and_no_records_are_an_error(tmp_path):
    with Writer(tmp_path / "explored" / "step-0.rollouts") as writer:
        writer.append(right(correct=False))
    counts = distil(tmp_path / "explored", tmp_path / "kept", run_id="r", **LIMITS)
    assert (counts["read"], counts["incorrect"], counts["kept"]) == (1, 1, 0)
    assert list(read(tmp_path / "kept" / "survivors.rollouts")) == []
    with pytest.raises(FileNotFoundError, match="nothing"):
        distil(tmp_path / "nothing", tmp_path / "kept", run_id="r", **LIMITS)
