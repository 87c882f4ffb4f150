"""Rollouts for the tests of records: one by hand, and a strategy for any."""

import string
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxrl.pool.rollout import ACTION, NOT_SAMPLED, PROMPT, Failure, Rollout, StopReason, Version


def sample(**changes) -> Rollout:
    """Two tokens of prompt, two of response, reward 0.5."""
    values: dict[str, Any] = dict(
        run_id="r",
        group_id=7,
        sample=1,
        attempt=0,
        task_key="sum/1",
        content_hash="abcd",
        split="train",
        source="sums",
        tokens=np.array([5, 6, 7, 2], np.uint32),
        kind=np.array([PROMPT, PROMPT, ACTION, ACTION], np.uint8),
        step=np.array([-1, -1, 0, 0], np.int32),
        logp=np.array([0, 0, -0.5, -0.125], np.float32),
        version_index=np.array([NOT_SAMPLED, NOT_SAMPLED, 0, 0], np.uint16),
        temperature=np.array([1, 1, 0.7, 0.7], np.float32),
        versions=(Version(0, 3, "weights"),),
        reward=0.5,
        reward_components={"score": 0.5},
        correct=False,
        stop_reason=StopReason.STOP,
        failure=Failure.NONE,
        text="7",
        facts={"note": "by hand"},
        times={"sampled": 1.5},
    )
    return Rollout(**(values | changes))


def same(a: Rollout, b: Rollout) -> bool:
    """Equal in every field, arrays by type and bit."""
    for name in Rollout.__dataclass_fields__:
        one, two = getattr(a, name), getattr(b, name)
        if isinstance(one, np.ndarray):
            if one.dtype != two.dtype or one.tobytes() != two.tobytes():
                return False
        elif name == "facts":
            if set(one) != set(two) or not all(np.array_equal(one[key], two[key]) for key in one):
                return False
        elif one != two:
            return False
    return True


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Any rollout that fits together: any length, several versions, facts with arrays, any text."""
    length = draw(st.integers(0, 12))
    versions = draw(
        st.lists(
            st.builds(Version, st.integers(0, 9), st.integers(0, 99), st.text(max_size=4)),
            max_size=3,
        )
    )

    def column(dtype, elements):
        return draw(arrays.arrays(dtype, length, elements=elements))

    index = st.sampled_from([NOT_SAMPLED, *range(len(versions))])
    failure = draw(st.sampled_from(Failure))
    rewarded = failure in (Failure.NONE, Failure.POLICY_TIMEOUT)
    reward = draw(st.floats(-9, 9)) if rewarded else None
    names = st.text(string.ascii_letters, min_size=1, max_size=4)
    plain = st.one_of(st.integers(-9, 9), st.text(max_size=5), st.booleans(), st.none())
    facts: dict[str, Any] = dict(draw(st.dictionaries(names, plain, max_size=3)))
    if draw(st.booleans()):
        facts["passed"] = column(np.float32, st.floats(0, 1, width=32))
    return sample(
        run_id=draw(st.text(max_size=5)),
        group_id=draw(st.integers(0, 2**30)),
        sample=draw(st.integers(0, 64)),
        tokens=column(np.uint32, st.integers(0, 2**32 - 1)),
        kind=column(np.uint8, st.integers(0, 4)),
        step=column(np.int32, st.integers(-1, 99)),
        logp=column(np.float32, st.floats(-50, 0, width=32)),
        version_index=column(np.uint16, index),
        temperature=column(np.float32, st.floats(0.125, 2, width=32)),
        versions=tuple(versions),
        reward=reward,
        reward_components=draw(
            st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=2)
        ),
        correct=draw(st.booleans()),
        stop_reason=draw(st.sampled_from(StopReason)),
        failure=failure,
        text=draw(st.text(max_size=20)),
        facts=facts,
        times=draw(st.dictionaries(names, st.floats(0, 2e9), max_size=2)),
    )
