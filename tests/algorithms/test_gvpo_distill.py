"""Group-variance distillation against its oracle. V1 ... V5: the method's own, see tests/kernels
for V2, V3 and V4, and tests/model/test_rating.py for V5."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, differences, logps, ragged, update
from tests.papers import gvpo_distill as paper

PLAIN = {"alpha": 0.5, "coupling": "written", "keep_truncated": False}
FORMS = pytest.mark.parametrize("coupling", ["written", "weights"])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("gvpo_distill", **PLAIN | change)


def rated(batch, seed=4, **facts):
    """The batch with a teacher's facts; the fifth rollout's text is not usable."""
    rng, rows = np.random.default_rng(seed), batch.valid.shape[0]
    found = {
        "teacher_logp": -10 * rng.random(rows),
        "text_length": rng.integers(1, 9, rows),
        "text_usable": (np.arange(rows) != 4).astype(int),
    }
    # an empty response has an empty text
    empty = ~np.asarray(batch.acted).any(-1) & np.asarray(batch.valid)
    found["text_length"] = np.where(empty, 0, found["text_length"])
    return dataclasses.replace(batch, facts=found | facts)


def one_update(batch, *, micro=None, logp=None, **change):
    algorithm = make(**change)
    logp = logps(batch, 1) if logp is None else logp
    observed = {} if algorithm.coupled else {"student": logp, "start/student": logps(batch, 2)}
    micro = micro or batch.valid.shape[0]
    value, slope, diagnostics = update(algorithm, batch, logp, observed, micro=micro)
    return value, slope, diagnostics, logp


def oracle_of(batch, number, alpha=0.5):
    """The loss of one update as a function of the log-probs."""
    usable = batch.valid & ~batch.truncated & (batch.minibatch == number)
    usable &= (batch.facts["text_usable"] > 0) & (batch.facts["text_length"] > 0)
    return lambda logp: paper.loss(
        logp,
        batch.facts["teacher_logp"].tolist(),
        batch.facts["text_length"].tolist(),
        batch.group.tolist(),
        usable.tolist(),
        batch.acted.tolist(),
        alpha,
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@FORMS
def test_it_equals_the_oracle(coupling, dtype):
    tolerance = {np.float64: 1e-6, np.float32: 1e-5}[dtype]
    batch = rated(ragged())
    logp = logps(batch, 1)

    def oracle(logp):
        return oracle_of(batch, 0)(logp) + oracle_of(batch, 1)(logp)

    small = jax.tree.map(
        lambda x: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x, batch
    )
    value, slope, diagnostics, _ = one_update(small, coupling=coupling, logp=logp.astype(dtype))
    expected = differences(oracle, logp)
    np.testing.assert_allclose(slope, expected, rtol=tolerance, atol=tolerance)
    assert np.abs(expected).max() > 1e-2
    if coupling == "written":
        np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)


@FORMS
def test_v1_a_teacher_equal_to_the_student_leaves_nothing(coupling):
    batch = batch_of([2, 1, 3, 2], np.zeros(4), [4, 4, 4, 4])
    logp = logps(batch, 1)
    total = np.where(batch.acted, logp, 0).sum(-1)
    equal = rated(batch, teacher_logp=total, text_usable=np.ones(4, int))
    value, slope, diagnostics, _ = one_update(equal, coupling=coupling, logp=logp)
    np.testing.assert_allclose(value, 0, atol=1e-15)
    np.testing.assert_allclose(slope, 0, atol=1e-15)
    np.testing.assert_allclose(diagnostics["sequence_kl"], 0, atol=1e-15)


@FORMS
def test_both_forms_and_any_cut_have_the_same_gradient(coupling):
    batch = rated(ragged())
    whole = one_update(batch)[1]
    micro = 3 if coupling == "written" else 2
    np.testing.assert_allclose(
        one_update(batch, coupling=coupling, micro=micro)[1], whole, rtol=1e-6, atol=1e-15
    )


@FORMS
def test_what_is_not_usable_is_as_if_it_had_failed(coupling):
    lengths, rows = [2, 1, 3, 2], [4, 4, 4, 4]
    failed = rated(batch_of(lengths, np.zeros(4), rows, valid=[1, 1, 1, 0]))
    expected = one_update(failed, coupling=coupling)[1]
    whole = batch_of(lengths, np.zeros(4), rows)
    unstable = rated(
        whole, text_usable=np.array([1, 1, 1, 0]), teacher_logp=failed.facts["teacher_logp"]
    )
    empty = rated(whole, text_length=np.where(np.arange(4) < 3, failed.facts["text_length"], 0))
    cut = rated(batch_of(lengths, np.zeros(4), rows, truncated=[0, 0, 0, 1]))
    for batch in (unstable, empty, cut):
        got = one_update(batch, coupling=coupling)[1]
        np.testing.assert_allclose(got, expected, rtol=1e-12)
    kept = one_update(cut, coupling=coupling, keep_truncated=True)[1]
    assert np.abs(kept - expected).max() > 1e-3


@FORMS
def test_v5_padding_changes_nothing(coupling):
    rows = [4, 4, 4]
    short = rated(batch_of([2, 1, 3], np.zeros(3), rows))
    wide = rated(batch_of([2, 1, 3, 9], np.zeros(4), [*rows, 5], valid=[1, 1, 1, 0]))
    wide = dataclasses.replace(
        wide, facts={name: np.append(x, 0) for name, x in short.facts.items()}
    )
    logp = logps(wide, 3)
    narrow = logp[:3, : short.tokens.shape[1]]
    got = one_update(wide, coupling=coupling, logp=logp)[1]
    expected = one_update(short, coupling=coupling, logp=narrow)[1]
    np.testing.assert_allclose(got[:3, : narrow.shape[1]], expected, rtol=1e-12)
    np.testing.assert_array_equal(got[3], 0)


@FORMS
def test_case_10_a_batch_without_valid_rollouts_is_harmless(coupling):
    batch = rated(batch_of([2, 1], [0.0, 0.0], [4, 4], valid=[0, 0]))
    value, slope, _, _ = one_update(batch, coupling=coupling)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize(("field", "value"), [("alpha", -0.5), ("coupling", "both")])
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        make(**{field: value})
