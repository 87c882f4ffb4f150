"""On-policy distillation and GKD against their oracle."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, differences, logps, narrow, ragged, update
from tests.papers import opd as paper

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
LOOSE = TRUST | {"clip_low": 0.9, "clip_high": 9.0, "dual_clip": math.inf}
SAMPLED = {
    "estimator": "sampled",
    "divergence": "reverse",
    "alpha": 0.0,
    "top_k": 0,
    "support": "",
    "discount": 0.0,
    "trust": TRUST,
}
FULL = SAMPLED | {"estimator": "full"}
JSD = {"divergence": "jsd", "alpha": 0.3}
DIVERGENCES = pytest.mark.parametrize(
    "divergence", [{}, {"divergence": "forward"}, JSD], ids=["reverse", "forward", "jsd"]
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def small():
    return batch_of([2, 1, 3, 0], np.zeros(4), [4, 4, 1, 1], valid=[1, 1, 1, 0])


def observed_of(batch):
    """The start of a take, and a teacher."""
    observed = {name: logps(batch, 2 + i) for i, name in enumerate(("old_logp", "entropy"))}
    return observed | {"teacher_logp": logps(batch, 7)}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "change",
    [
        {},
        JSD,
        {"divergence": "forward", "trust": LOOSE},
        {"discount": 0.7, "trust": TRUST | {"mismatch": "truncate", "mismatch_high": 1.5}},
    ],
    ids=["reverse", "jsd", "forward", "discounted"],
)
def test_sampled_it_equals_the_oracle(change, dtype):
    parameters, tolerance = SAMPLED | change, 1e-6 if dtype is np.float64 else 1e-5
    batch = small()
    logp, observed = logps(batch, 1), observed_of(batch)

    def oracle(logp):
        names = ("old_logp", "sampler_logp", "teacher_logp")
        rest = [(observed | {"sampler_logp": batch.sampler_logp})[name].tolist() for name in names]
        return paper.sampled_loss(*[logp, *rest, batch.acted.tolist(), parameters])

    given = narrow((batch, logp, observed), dtype)
    value, slope, diagnostics = update(load("opd", **parameters), *given, micro=2)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)
    np.testing.assert_allclose(
        slope, differences(oracle, logp), rtol=tolerance, atol=tolerance / 100
    )
    assert slope.dtype == dtype and np.abs(slope).max() > 0.01
    np.testing.assert_array_equal(slope[~np.asarray(batch.acted)], 0)  # the masked never pull


@functools.partial(jax.jit, static_argnums=0)
def read_update(algorithm, batch, logits, teacher_logits):
    """(loss, slope) of one update by the student's logits [row token vocab]."""

    def loss(logits):
        both = {"student": logits, "teacher/plain": teacher_logits}
        flat = {name: x.reshape(-1, x.shape[-1]) for name, x in both.items()}
        reading = algorithm.read(flat, batch.tokens.reshape(-1))
        reading = {name: x.reshape(batch.tokens.shape) for name, x in reading.items()}
        credit = algorithm.credit(batch, {})
        return (algorithm.loss(reading, batch, {}, credit)[0] * credit.weight).sum()

    return jax.value_and_grad(loss)(logits)


TEACHERS_TOP = {"estimator": "top_k", "top_k": 2, "support": "teacher"}
STUDENTS_TOP = {"estimator": "top_k", "top_k": 3, "support": "student"}


@pytest.mark.parametrize(
    "change",
    [{}, {"divergence": "forward"}, JSD, TEACHERS_TOP | JSD, STUDENTS_TOP],
    ids=["reverse", "forward", "jsd", "teachers_top_jsd", "students_top_reverse"],
)
def test_over_the_vocabulary_it_equals_the_oracle(change):
    parameters, batch = FULL | change, small()
    rng = np.random.default_rng(4)
    logits, teacher = (2 * rng.normal(size=(*batch.tokens.shape, 5)) for _ in range(2))
    acted = batch.acted.tolist()

    def oracle(x):
        return paper.full_loss(x, teacher.tolist(), acted, parameters)

    algorithm = load("opd", **parameters)
    value, slope = read_update(algorithm, batch, logits, teacher)
    np.testing.assert_allclose(value, oracle(logits.tolist()), rtol=1e-6)
    np.testing.assert_allclose(slope, differences(oracle, logits), rtol=1e-5, atol=1e-9)
    if change in ({}, JSD):
        value, _ = read_update(algorithm, *narrow((batch, logits, teacher), np.float32))
        np.testing.assert_allclose(value, oracle(logits.tolist()), rtol=1e-5)


@DIVERGENCES
def test_the_expected_sampled_gradient_is_that_of_the_whole_vocabulary(divergence):
    # one response a word of the vocabulary; each counts by its probability
    rng = np.random.default_rng(8)
    logits, teacher = (jnp.asarray(rng.normal(size=(1, 7))) for _ in range(2))
    batch = batch_of([1] * 7, np.zeros(7), np.arange(7))
    p, logp = jax.nn.softmax(logits)[0], jax.nn.log_softmax(logits)[0]

    def row(x):
        return jnp.pad(x[:, None], ((0, 0), (2, 1)))

    observed = {"old_logp": row(logp), "teacher_logp": row(jax.nn.log_softmax(teacher)[0])}
    observed |= {"entropy": row(logp)}
    algorithm = load("opd", **SAMPLED | divergence | {"trust": LOOSE})
    _, slope, _ = update(algorithm, batch, row(logp), observed, micro=7)
    _, back = jax.vjp(lambda x: jax.nn.log_softmax(x)[0], logits)
    (expected,) = back(7 * p * slope[:, 2])
    full = load("opd", **FULL | divergence)
    exact = jax.grad(
        lambda x: full.read({"student": x, "teacher/plain": teacher}, jnp.zeros(1, int))[
            "divergence"
        ].sum()
    )(logits)
    np.testing.assert_allclose(expected, exact, rtol=1e-6, atol=1e-9)
    assert np.abs(exact).max() > 1e-3


def test_with_discount_1_it_is_the_reverse_kl_of_whole_responses():
    words, rng = 3, np.random.default_rng(9)
    logits, teacher = ((rng.normal(size=(3)), rng.normal(size=(3, 3))) for _ in range(2))
    first, second = (x.ravel() for x in np.meshgrid(range(words), range(words), indexing="ij"))
    batch = batch_of([2] * 9, np.zeros(9), np.arange(9))

    def logp(x):
        return jnp.stack(
            [jax.nn.log_softmax(x[0])[first], jax.nn.log_softmax(x[1])[first, second]], axis=1
        )

    def row(x):
        return jnp.pad(x, ((0, 0), (2, 1)))

    p = jnp.exp(logp(logits).sum(1))
    observed = {"old_logp": row(logp(logits)), "teacher_logp": row(logp(teacher))}
    observed |= {"entropy": observed["old_logp"]}

    def gap(discount):
        algorithm = load("opd", **SAMPLED | {"discount": discount, "trust": LOOSE})
        _, slope, _ = update(algorithm, batch, observed["old_logp"], observed, micro=9)
        _, back = jax.vjp(logp, logits)
        expected = back(18 * p[:, None] * slope[:, 2:4])[0]  # token_mean has divided by 18

        def sequence_kl(x):
            mine = logp(x).sum(1)
            return (jnp.exp(mine) * (mine - logp(teacher).sum(1))).sum()

        exact = jax.grad(sequence_kl)(logits)
        return max(np.abs(a - b).max() for a, b in zip(expected, exact, strict=True))

    assert gap(1.0) < 1e-6
    assert gap(0.0) > 1e-2  # each token's own divergence only


@DIVERGENCES
def test_a_teacher_equal_to_the_student_has_no_pull_at_all(divergence):
    batch = ragged()
    observed = observed_of(batch) | {"teacher_logp": logps(batch, 2)}
    algorithm = load("opd", **SAMPLED | divergence)
    np.testing.assert_array_equal(credited(algorithm, batch, observed).advantage, 0)
    _, slope, _ = update(algorithm, batch, logps(batch, 2), observed, micro=12)
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize("change", [{}, TEACHERS_TOP | JSD], ids=["full", "top_k"])
def test_nor_has_it_over_the_vocabulary(change):
    batch = ragged()
    logits = np.random.default_rng(1).normal(size=(*batch.tokens.shape, 5)).astype(np.float32)
    _, slope = read_update(load("opd", **FULL | change), batch, logits, logits)
    np.testing.assert_array_equal(slope, 0)


def test_a_token_that_the_teacher_rules_out_is_floored_and_counted():
    algorithm = load("opd", **SAMPLED)
    logits = {"student": jnp.zeros((2, 3)), "teacher/plain": jnp.asarray([[0.0, -jnp.inf, 0]] * 2)}
    observed = algorithm.observe(logits, jnp.asarray([0, 1]))
    np.testing.assert_allclose(observed["teacher_logp"], np.log([0.5, 1e-10]), rtol=1e-12)
    batch = batch_of([2], [0.0], [0])
    observed = {name: jnp.pad(x[None], ((0, 0), (2, 1))) for name, x in observed.items()}
    _, slope, diagnostics = update(algorithm, batch, logps(batch, 1), observed, micro=1)
    np.testing.assert_array_equal(diagnostics["teacher_floored"][0, 2:4], [0, 1])
    assert np.isfinite(slope).all()
    full = load("opd", **FULL)
    slope = jax.grad(
        lambda x: full.read(logits | {"student": x}, jnp.ones(2, int))["divergence"].sum()
    )(logits["student"])
    assert np.isfinite(slope).all() and (slope[:, 1] > 0).all()


def test_cases_19_and_20_micro_batches_change_nothing():
    batch = ragged()
    algorithm, observed = load("opd", **SAMPLED | {"discount": 0.5}), observed_of(batch)
    whole = update(algorithm, batch, logps(batch, 1), observed, micro=12)
    parts = update(algorithm, batch, logps(batch, 1), observed, micro=1)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-6)


def test_the_teacher_is_asked_where_it_is_needed():
    sampled, full = load("opd", **SAMPLED), load("opd", **FULL)
    assert (sampled.scorers, full.observers) == ((("student", "plain"),), ())
    assert ("teacher", "plain") in sampled.observers and ("teacher", "plain") in full.scorers


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("opd", SAMPLED),
        ("cal_opd", {"width": 1.0, "trust": TRUST}),
        (
            "rlsd",
            {"teacher": "teacher", "share": 1.0, "band": 0.2}
            | {"scale_by_std": True, "trust": TRUST},
        ),
    ],
    ids=["opd", "cal_opd", "rlsd"],
)
def test_a_teacher_of_another_vocabulary_is_refused(name, fields):
    views = ("plain", "judged_right", "judged_wrong")
    logits = {f"teacher/{view}": jnp.zeros((2, 5)) for view in views}
    with pytest.raises(ValueError, match="allowed: one vocabulary"):
        # Past the shape checks of the tests, which users do not have.
        kind = type(load(name, **fields))
        inspect.unwrap(kind.observe)(
            load(name, **fields), logits | {"student": jnp.zeros((2, 4))}, jnp.zeros(2, int)
        )


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("estimator", {"estimator": "k1"}),
        ("divergence", {"divergence": "jensen"}),
        ("alpha", {"alpha": 0.5}),
        ("alpha", {"divergence": "jsd", "alpha": 1.0}),
        ("top_k", {"top_k": 4}),
        ("support", {"estimator": "top_k", "top_k": 4}),
        ("discount", {"discount": 1.5}),
        ("discount", {"discount": 0.5} | JSD),
    ],
)
def test_a_bad_field_is_named(field, change):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        load("opd", **SAMPLED | change)
