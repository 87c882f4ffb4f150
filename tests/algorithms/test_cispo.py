"""CISPO against its oracle."""

import math

import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, logps, update
from tests.algorithms.oracles import agree, listed, observed_of, small
from tests.papers import cispo as paper

PLAIN = {"ratio_cap": 5.0, "ratio_floor": 0.0, "mismatch_cap": math.inf}


@pytest.mark.parametrize(
    "change", [{}, {"ratio_cap": 1.2, "ratio_floor": 0.8, "mismatch_cap": 1.5}], ids=str
)
def test_it_equals_the_oracle(change):
    parameters, batch = PLAIN | change, small()
    rest = listed(
        logps(batch, 1),
        observed_of(batch)["old_logp"],
        batch.sampler_logp,
        batch.reward,
        batch.group,
        batch.valid,
        batch.acted,
    )
    agree(load("cispo", **parameters), batch, lambda x: paper.loss(x, *rest, p=parameters))


def test_case_24_no_token_is_lost_and_the_weight_is_a_constant():
    # A = +-1 / sqrt(2), two tokens each of four: ratios 1e8 and e^-20 too, slope -min(r, 5) A / 4
    batch = batch_of([2, 2], [1.0, 0.0], [0, 0])
    observed = observed_of(batch)
    logp = np.array(observed["old_logp"])
    logp[:, 2] += np.log(1e8)
    logp[:, 3] -= 19
    algorithm = load("cispo", **PLAIN)
    _, slope, _ = update(algorithm, batch, logp, observed, micro=2)
    a = np.array([1, -1]) / np.sqrt(2)
    np.testing.assert_allclose(slope[:, 2], -5 * a / 4, rtol=1e-5)
    np.testing.assert_allclose(slope[:, 3], -np.exp(-19) * a / 4, rtol=1e-4)


def test_case_24_on_policy_the_weight_is_one():
    batch = small()
    observed = observed_of(batch)
    algorithm = load("cispo", **PLAIN | {"ratio_cap": 1.0, "ratio_floor": 1.0})
    credit = credited(algorithm, batch, observed)
    _, slope, told = update(algorithm, batch, observed["old_logp"], observed, micro=6)
    np.testing.assert_allclose(slope, -credit.advantage * credit.weight, rtol=1e-6)
    np.testing.assert_array_equal(told["clipped"], 0)


@pytest.mark.parametrize(
    ("field", "value"), [("ratio_cap", 0.2), ("ratio_floor", 1.1), ("mismatch_cap", 0.5)]
)
def test_bad_fields_are_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        load("cispo", **PLAIN | {field: value})
