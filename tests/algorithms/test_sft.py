"""Supervised fine-tuning against its oracle."""

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, logps, update
from tests.papers import sft as paper

ALGORITHM = load("sft")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_it_equals_the_oracle_whatever_the_reward(reward):
    valid = [1, 1, 0, 1]
    batch = batch_of([3, 1, 4, 0], [reward] * 4, [0, 1, 2, 3], valid=valid)
    logp = logps(batch, 1)
    value, slope, _ = update(ALGORITHM, batch, logp, {}, micro=1)
    acted = batch.acted.tolist()
    np.testing.assert_allclose(value, paper.loss(logp.tolist(), valid, acted), rtol=1e-6)
    # 3 + 1 action tokens count: -1 / 4 at each, 0 on prompts, padding and the failed rollout
    np.testing.assert_allclose(slope, np.where(acted, -1 / 4, 0), rtol=1e-6)


def test_every_group_is_kept():
    assert ALGORITHM.keep(np.zeros(4), {})
