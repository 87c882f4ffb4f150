"""What a rollout refuses, what names it, and that kinds are the device's."""

import dataclasses

import numpy as np
import pytest

from jaxrl import batch
from jaxrl.pool import rollout as records
from jaxrl.pool.rollout import (
    COLUMNS,
    Failure,
    RaggedError,
    Rollout,
    StopReason,
    Version,
    check_schema,
    digest_of,
    judged,
)
from tests.pool.samples import sample


def test_kinds_have_the_same_numbers_on_disk_and_on_the_device():
    for name in ("PAD", "PROMPT", "ACTION", "FEEDBACK", "INJECTED"):
        assert getattr(records, name) == getattr(batch, name)


@pytest.mark.parametrize("name", COLUMNS)
def test_arrays_of_other_lengths_are_ragged(name):
    whole = sample()
    whole.check()
    short = dataclasses.replace(whole, **{name: getattr(whole, name)[:-1]})
    with pytest.raises(RaggedError, match=f"'{name}': {len(whole.tokens) - 1}"):
        short.check()


@pytest.mark.parametrize("name", COLUMNS)
def test_arrays_of_other_types_are_named(name):
    other = dataclasses.replace(sample(), **{name: getattr(sample(), name).astype(np.float64)})
    with pytest.raises(ValueError, match=f"^{name} is float64"):
        other.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logp": np.array([0, 0, np.nan, -1], np.float32)},
            "logp=nan; allowed: finite, at most 0",
        ),
        ({"logp": np.array([0, 0, 0.25, -1], np.float32)}, "logp=0.25"),
        ({"logp": np.array([0, 0, -np.inf, -1], np.float32)}, "logp=-inf"),
        ({"temperature": np.array([1, 1, 0, 0], np.float32)}, "temperature=0.0; allowed: > 0"),
        ({"kind": np.array([1, 1, 2, 9], np.uint8)}, "kind=9 is unknown"),
        (
            {"version_index": np.array([65535, 65535, 0, 1], np.uint16)},
            "version_index=1; allowed: < 1",
        ),
        ({"reward": float("nan")}, "reward=nan"),
        ({"reward": None}, "reward=None with failure='none'"),
        ({"failure": Failure.DATA}, "reward=0.5 with failure='data'"),
        ({"failure": Failure.INFRA}, "reward=0.5 with failure='infra'"),
        ({"tokens": [1, 2, 3, 4]}, "tokens is list; allowed: uint32"),
        ({"tokens": np.zeros((2, 2), np.uint32)}, "tokens is uint32"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(sample(), **change).check()


def test_a_failure_of_the_policy_may_carry_a_reward():
    dataclasses.replace(sample(), failure=Failure.POLICY_TIMEOUT).check()
    dataclasses.replace(sample(), failure=Failure.DATA, reward=None).check()


def test_the_key_names_run_group_sample_and_attempt_and_nothing_else():
    one = sample()
    keys = {one.idempotency_key}
    for change in ({"run_id": "s"}, {"group_id": 8}, {"sample": 2}, {"attempt": 3}):
        keys.add(dataclasses.replace(one, **change).idempotency_key)
    assert len(keys) == 5
    assert dataclasses.replace(one, text="other", reward=0.0).idempotency_key == one.idempotency_key
    # No border between the parts can be shifted.
    a = dataclasses.replace(one, run_id="r1", group_id=1)
    b = dataclasses.replace(one, run_id="r", group_id=11)
    assert a.idempotency_key != b.idempotency_key


def test_the_digest_is_of_what_was_observed():
    one = sample()
    same = dataclasses.replace(one, group_id=9, sample=3, times={"sampled": 5.0}, run_id="other")
    assert same.digest == one.digest
    changes = (
        {"tokens": np.array([5, 6, 7, 1], np.uint32)},
        {"logp": np.array([0, 0, -0.5, -0.25], np.float32)},
        {"versions": (Version(0, 3, "other"),)},
        {"reward": 0.25},
        {"stop_reason": StopReason.LENGTH},
    )
    digests = {dataclasses.replace(one, **change).digest for change in changes}
    assert len(digests | {one.digest}) == 1 + len(changes)
    assert digest_of([one, same]) != digest_of([one])


@pytest.mark.parametrize("version", [3, 99])
def test_a_newer_schema_is_refused_as_such(version):
    with pytest.raises(
        ValueError, match=f"schema_version={version} is newer than this jaxrl reads"
    ):
        check_schema(version)


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.5])
def test_what_is_no_schema_version_is_refused(version):
    with pytest.raises(ValueError, match=r"allowed: 1\.\.2"):
        check_schema(version)


def test_a_record_without_a_field_or_column_is_refused_by_name():
    one = sample()
    header, columns = one.to_header(), one.to_columns()
    with pytest.raises(ValueError, match="record lacks reward"):
        Rollout.from_header({k: v for k, v in header.items() if k != "reward"}, columns)
    with pytest.raises(ValueError, match="record lacks logp"):
        Rollout.from_header(header, {k: v for k, v in columns.items() if k != "logp"})


def test_a_group_is_judged_by_rewards_and_facts():
    one = dataclasses.replace(sample(), facts={"tests": 3})
    two = dataclasses.replace(sample(), reward=None, failure=Failure.DATA, facts={})
    rewards, facts = judged([one, two])
    np.testing.assert_array_equal(rewards, [0.5, np.nan])
    assert facts == {"tests": [3, None]}
