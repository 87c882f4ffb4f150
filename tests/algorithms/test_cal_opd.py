"""Cal-OPD against its oracle. C1 ... C7: the method's own checks, see tests/kernels too."""

import math

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import (
    batch_of,
    credited,
    differences,
    logps,
    narrow,
    ragged,
    shown,
    update,
)
from tests.algorithms.test_opd import SAMPLED, TRUST
from tests.papers import cal_opd as paper

TEACHERS = ("teacher_logp", "right_logp", "wrong_logp")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(width=1.5):
    return load("cal_opd", width=width, trust=TRUST)


def probed(batch, rows=None):
    rows = np.ones(batch.valid.shape) if rows is None else rows
    return shown(batch, judged_right=rows, judged_wrong=np.ones(batch.valid.shape))


def observed_of(batch):
    """The start of a take, and three readings of a teacher, the second below the floor once."""
    names = ("old_logp", "entropy", *TEACHERS)
    return {name: logps(batch, 2 + i) for i, name in enumerate(names)}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_it_equals_the_oracle(dtype):
    tolerance = 1e-6 if dtype is np.float64 else 1e-5
    rows = [1, 1, 0, 1, 1]
    batch = probed(
        batch_of([3, 4, 3, 2, 2], np.zeros(5), [4, 4, 1, 1, 2], valid=[1, 1, 1, 0, 1]), rows
    )
    logp, observed = logps(batch, 1), observed_of(batch)
    parameters = {"width": 1.5, "trust": TRUST}

    def oracle(logp):
        rest = [observed[name].tolist() for name in ("old_logp", *TEACHERS)]
        return paper.loss(*[logp, *rest, batch.acted.tolist(), rows, parameters])

    algorithm = make()
    given = narrow((batch, logp, observed), dtype)
    value, slope, diagnostics = update(algorithm, *given, micro=5)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)
    np.testing.assert_allclose(
        slope, differences(oracle, logp), rtol=tolerance, atol=tolerance / 100
    )
    trained = np.asarray(batch.acted)[[0, 1, 4]]
    active = np.asarray(diagnostics["active"])[[0, 1, 4]][trained]
    assert 0 < active.sum() < active.size  # some tokens are quiet, and count
    np.testing.assert_array_equal(slope[2:4], 0)  # no probe; failed


def test_c1_without_width_it_is_opd_bit_for_bit():
    batch, logp = probed(ragged()), logps(ragged(), 1)
    observed = observed_of(batch)
    assert np.abs(observed["teacher_logp"] - observed["old_logp"]).min() > 1e-5
    a = update(make(0.0), batch, logp, observed, micro=12)
    b = update(load("opd", **SAMPLED), batch, logp, observed, micro=12)
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])


def test_c2_a_token_inside_its_interval_has_no_gradient():
    # one token; the teacher's interval around -1 is [-1.2, -.5]
    batch = probed(batch_of([1], [0.0], [0]))
    for logp, slope in ((-0.8, 0.0), (-1.2, 0.0), (-1.3, -0.1), (-0.3, 0.2)):
        start = np.full(batch.tokens.shape, logp)
        levels = {"teacher_logp": -1.0, "right_logp": -0.5, "wrong_logp": -1.2}
        observed = {name: np.full_like(start, x) for name, x in levels.items()}
        observed |= {"old_logp": start, "entropy": start}
        _, found, _ = update(make(1.0), batch, start, observed, micro=1)
        np.testing.assert_allclose(found[0, 2], slope, atol=1e-12)
        assert slope != 0 or found[0, 2] == 0.0


def test_quiet_tokens_stay_in_the_denominator():
    # two responses of one token; the teacher agrees with the second
    batch = probed(batch_of([1, 1], np.zeros(2), [0, 0]))
    start = np.full(batch.tokens.shape, -1.0)
    teacher = np.where(np.arange(2)[:, None] == 0, -2.0, start)
    observed = dict.fromkeys(TEACHERS, teacher) | {"old_logp": start, "entropy": start}
    _, slope, _ = update(make(), batch, start, observed, micro=2)
    np.testing.assert_allclose(slope[:, 2], [0.5, 0], atol=1e-12)  # A = -1, over two tokens


def test_an_update_without_an_active_token_is_skipped():
    batch = probed(ragged())  # two updates of two groups
    observed = observed_of(batch)
    first = np.asarray(batch.minibatch == 0)[:, None]
    agreed = np.where(first, observed["old_logp"] + 1e-6, observed["teacher_logp"])
    observed |= dict.fromkeys(TEACHERS, agreed)
    weight = np.asarray(credited(make(), batch, observed).weight)
    np.testing.assert_array_equal(weight[:6], 0)
    np.testing.assert_allclose(weight[6:].sum(), 1)


def test_an_interval_is_of_the_teachers_views_alone():
    assert make().observers == (
        ("student", "plain"),
        ("teacher", "plain"),
        ("teacher", "judged_right"),
        ("teacher", "judged_wrong"),
    )


def test_a_bad_field_is_named():
    for width in (-0.1, math.inf):
        with pytest.raises(ValueError, match="algorithm.width="):
            make(width)
