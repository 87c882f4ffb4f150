"""RLOO against its oracle."""

import math

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, differences, logps, update
from tests.papers import rloo as paper


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def small():
    rng = np.random.default_rng(3)
    return batch_of([2, 1, 3, 0, 2, 3], rng.random(6), [4, 4, 4, 1, 1, 9], valid=[1, 1, 0, 1, 1, 1])


@pytest.mark.parametrize("cap", [math.inf, 1.5])
def test_it_equals_the_oracle(cap):
    batch = small()
    logp, old_logp = logps(batch, 1), logps(batch, 2)

    def oracle(logp):
        return paper.loss(
            logp,
            old_logp.tolist(),
            batch.sampler_logp.tolist(),
            batch.reward.tolist(),
            batch.group.tolist(),
            batch.valid.tolist(),
            batch.acted.tolist(),
            cap,
        )

    algorithm = load("rloo", mismatch_cap=cap)
    observed = {"old_logp": old_logp} if algorithm.observers else {}
    value, slope, _ = update(algorithm, batch, logp, observed, micro=2)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=1e-6)
    np.testing.assert_allclose(slope, differences(oracle, logp), rtol=1e-6, atol=1e-8)
    assert np.abs(slope).max() > 0.1


def test_advantages_equal_the_oracle_and_a_lone_rollout_has_none():
    batch = small()
    credit = credited(load("rloo", mismatch_cap=math.inf), batch, {})
    expected = paper.advantages(batch.reward.tolist(), batch.group.tolist(), batch.valid.tolist())
    np.testing.assert_allclose(credit.advantage[:, 2], np.where(batch.acted[:, 2], expected, 0))
    assert expected[5] == 0  # alone with its prompt


@pytest.mark.parametrize("cap", [0.5, math.nan])
def test_a_bad_cap_is_named(cap):
    with pytest.raises(ValueError, match="algorithm.mismatch_cap"):
        load("rloo", mismatch_cap=cap)
