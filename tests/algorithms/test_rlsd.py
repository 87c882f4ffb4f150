"""RLSD against its oracle."""

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, differences, logps, narrow, shown, update
from tests.algorithms.test_opd import TRUST
from tests.papers import rlsd as paper

PLAIN = {
    "teacher": "teacher",
    "share": 0.6,
    "band": 0.3,
    "scale_by_std": True,
    "trust": TRUST,
}
HELD = [1, 1, 1, 1, 0, 1]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("rlsd", **PLAIN | change)


def small(seed=3):
    reward = np.random.default_rng(seed).random(6)
    batch = batch_of([2, 1, 3, 1, 2, 3], reward, [4, 4, 4, 1, 1, 9], valid=[1, 1, 0, 1, 1, 1])
    return shown(batch, with_solution=HELD)


def observed_of(batch):
    names = ("old_logp", "entropy", "teacher_logp")
    return {name: logps(batch, 2 + i) for i, name in enumerate(names)}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "change", [{}, {"teacher": "self", "scale_by_std": False}], ids=["teacher", "self"]
)
def test_it_equals_the_oracle(change, dtype):
    parameters, tolerance = PLAIN | change, 1e-6 if dtype is np.float64 else 1e-5
    batch = small()
    logp, observed = logps(batch, 1), observed_of(batch)
    held = HELD if parameters["teacher"] == "self" else [1] * 6

    def oracle(logp):
        rest = [observed[name].tolist() for name in ("old_logp", "teacher_logp")]
        rest += [x.tolist() for x in (batch.reward, batch.group, batch.valid, batch.acted)]
        return paper.loss(*[logp, *rest, held, parameters])

    value, slope, _ = update(make(**change), *narrow((batch, logp, observed), dtype), micro=2)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)
    np.testing.assert_allclose(
        slope, differences(oracle, logp), rtol=tolerance, atol=tolerance / 100
    )
    assert np.abs(slope).max() > 0.01


def test_the_verifiers_sign_stays_and_equal_rewards_teach_nothing():
    batch = small()
    observed = observed_of(batch)
    plain = credited(make(share=0.0), batch, observed).advantage
    for change in ({"share": 1.0, "band": 0.99}, {"teacher": "reference"}):
        advantage = credited(make(**change), batch, observed).advantage
        np.testing.assert_array_equal(np.sign(advantage), np.sign(plain))
        assert np.abs(advantage - plain).max() > 0.01
    alike = shown(batch_of([2, 1], [0.1, 0.1], [4, 4]), with_solution=[1, 1])
    np.testing.assert_array_equal(credited(make(), alike, observed_of(alike)).advantage, 0)


def test_without_a_share_it_is_grpo():
    batch, logp = small(), logps(small(), 1)
    observed = observed_of(batch)
    grpo = load(
        "grpo",
        trust=TRUST,
        kl_weight=0.0,
        scale_by_std=True,
        full_group=0.0,
        mask_limit=float("inf"),
        dynamic_sampling=False,
        weighting="rollout_mean",
        length_tokens=0,
    )
    a = update(make(share=0.0), batch, logp, observed, micro=6)
    b = update(grpo, batch, logp, observed, micro=6)
    np.testing.assert_array_equal(a[1], b[1])


def test_who_the_teacher_is():
    assert make().observers[1] == ("teacher", "plain")
    assert make(teacher="self").observers[1] == ("self", "with_solution")


@pytest.mark.parametrize(("field", "value"), [("teacher", "x"), ("share", 1.1), ("band", 1.0)])
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        make(**{field: value})
