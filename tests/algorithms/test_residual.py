"""The residual advantage against its oracle. R1 ...: the method's own, see tests/kernels too."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.train.state import scorer
from tests.algorithms.batches import batch_of, credited, differences, logps, ragged, update
from tests.papers import residual as paper
from tests.train import toy

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": 2.0,
}
PLAIN = {
    "trust": TRUST,
    "residual_weight": 0.7,
    "center_responses": True,
    "teacher_top": 0,
    "verifier": "scaled",
    "weighting": "rollout_mean",
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("residual", **PLAIN | change)


def small(seed=3):
    rng = np.random.default_rng(seed)
    return batch_of([2, 1, 3, 0, 2, 3], rng.random(6), [4, 4, 4, 1, 1, 9], valid=[1, 1, 0, 1, 1, 1])


def observed_of(batch, seed=2):
    """The take's start, read by a student and a teacher of five words that know the place only."""
    rng = np.random.default_rng(seed)
    student, teacher = (rng.normal(size=(*batch.tokens.shape, 5)) for _ in range(2))
    residuals = [
        [paper.residual(s, t, y) for s, t, y in zip(*rows, strict=True)]
        for rows in zip(student.tolist(), teacher.tolist(), batch.tokens.tolist(), strict=True)
    ]
    return {
        "old_logp": logps(batch, 4),
        "entropy": logps(batch, 5),
        "teacher_logp": logps(batch, 6),
        "residual": np.asarray(residuals),
    }


@functools.partial(jax.jit, static_argnums=0)
def verified_of(algorithm, batch):
    return algorithm.verified(batch)


def facts_of(batch):
    """What the oracle takes of a batch."""
    return batch.reward.tolist(), batch.group.tolist(), batch.valid.tolist(), batch.acted.tolist()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"center_responses": False, "verifier": "centred", "weighting": "token_mean"},
        {"verifier": "whitened", "trust": TRUST | {"mismatch": "truncate", "mismatch_high": 1.5}},
    ],
    ids=["plain", "uncentred", "whitened"],
)
def test_it_equals_the_oracle(change, dtype):
    parameters, tolerance = PLAIN | change, {np.float64: 1e-6, np.float32: 1e-5}[dtype]
    batch = jax.tree.map(
        lambda x: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x, small()
    )
    logp, observed = logps(batch, 1), observed_of(batch)
    reward, group, valid, acted = facts_of(batch)
    labels = paper.labels(
        reward,
        group,
        valid,
        acted,
        observed["residual"].tolist(),
        *(parameters[name] for name in ("verifier", "residual_weight", "center_responses")),
    )

    def oracle(logp):
        return paper.loss(
            logp,
            observed["old_logp"].tolist(),
            batch.sampler_logp.tolist(),
            labels,
            valid,
            acted,
            parameters["trust"],
            parameters["weighting"],
        )

    algorithm = make(**change)
    logp, observed = jax.tree.map(lambda x: x.astype(dtype), (logp, observed))
    credit = credited(algorithm, batch, observed)
    np.testing.assert_allclose(credit.advantage, labels, rtol=tolerance, atol=tolerance)
    value, slope, diagnostics = update(algorithm, batch, logp, observed, micro=2)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)
    slopes = differences(oracle, logp)
    np.testing.assert_allclose(slope, slopes, rtol=tolerance, atol=tolerance / 100)
    clipped = np.asarray(diagnostics["clipped"])[np.asarray(batch.acted)]
    assert 0 < clipped.sum() < clipped.size  # both branches were tried


def test_observe_reads_both_models_once_a_take():
    rng = np.random.default_rng(1)
    logits = {name: jnp.asarray(rng.normal(size=(4, 5))) for name in ("student", "teacher/plain")}
    taken = jnp.asarray([0, 4, 2, 2])
    algorithm = make()
    assert algorithm.refresh == "take"
    assert algorithm.observers == (("student", "plain"), ("teacher", "plain"))
    observed = algorithm.observe(logits, taken)
    expected = [
        paper.residual(s, t, y)
        for s, t, y in zip(*(x.tolist() for x in (*logits.values(), taken)), strict=True)
    ]
    np.testing.assert_allclose(observed["residual"], expected, rtol=1e-12)
    top = make(teacher_top=5).observe(logits, taken)
    np.testing.assert_allclose(top["residual"], expected, rtol=1e-12)
    np.testing.assert_allclose(top["teacher_missing"], 0, atol=1e-15)
    assert (make(teacher_top=2).observe(logits, taken)["teacher_missing"] > 0.01).all()


def test_another_vocabulary_is_refused():
    logits = {"student": jnp.zeros((4, 5)), "teacher/plain": jnp.zeros((4, 6))}
    with pytest.raises(
        ValueError, match="the teacher has 6 logits a token; allowed: the student's"
    ):
        make().observe(logits, jnp.zeros(4, int))


@pytest.mark.parametrize("weighting", ["token_mean", "rollout_mean"])
def test_r1_residuals_move_no_rollout_as_a_whole(weighting):
    batch = ragged()
    observed = observed_of(batch)
    algorithm = make(weighting=weighting)
    credit = credited(algorithm, batch, observed)
    verified = verified_of(algorithm, batch)
    moved = (credit.weight * (credit.advantage - verified.advantage)).sum(-1)
    np.testing.assert_allclose(moved, 0, atol=1e-8)  # weights are float32
    np.testing.assert_array_equal(credit.weight, verified.weight)
    alone = np.asarray(batch.acted).sum(-1) == 1  # a response of one token: inert
    np.testing.assert_array_equal(credit.advantage[alone], verified.advantage[alone])
    assert np.abs(credit.advantage - verified.advantage).max() > 0.1


def test_equal_rewards_still_teach():
    batch = batch_of([2, 3, 3], [1.0, 1.0, 1.0], [4, 4, 4])
    algorithm = make()
    assert algorithm.keep(np.ones(3), {})
    credit = credited(algorithm, batch, observed_of(batch))
    np.testing.assert_array_equal(verified_of(algorithm, batch).advantage, 0)
    assert (np.abs(credit.advantage[np.asarray(batch.acted)]) > 1e-3).all()


def test_case_10_a_batch_without_valid_rollouts_is_harmless():
    batch = batch_of([2, 1], [0.0, 0.0], [4, 4], valid=[0, 0])
    observed = jax.tree.map(lambda x: np.full_like(x, 1e9), observed_of(batch))
    value, slope, _ = update(make(), batch, logps(batch, 1), observed, micro=2)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


def test_micro_batches_change_nothing():
    batch, observed = ragged(), observed_of(ragged())
    whole = update(make(), batch, logps(batch, 1), observed, micro=12)
    parts = update(make(), batch, logps(batch, 1), observed, micro=1)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-6)


TX = optax.sgd(0.5)


@functools.cache
def step_of(algorithm):
    return toy.step_of(algorithm, TX, micro=4, size=4, epochs=2, minibatches=2)


def train(algorithm, *, teacher_seed):
    """(student, teacher, metrics) after each of two takes, in float32. Student and teacher start
    equal if the teacher's seed is 0."""
    with jax.enable_x64(False):
        teacher = scorer(toy.Bigram().init(jax.random.key(teacher_seed)))
        state = toy.state_of(algorithm, TX, others={"teacher": teacher})
        found = []
        for take in range(2):
            groups = toy.random_groups(take, groups=4, size=4)
            batch = toy.batch_of(groups, step_groups=4, size=4, minibatches=2)
            state, metrics = step_of(algorithm)(state, batch)
            roles = {who: jax.tree.map(np.asarray, role.all) for who, role in state.roles.items()}
            found.append((roles, metrics))
        return found


def test_lambda_0_is_grpo_bit_for_bit():
    base = {"kl_weight": 0.0, "full_group": 0.0, "mask_limit": math.inf}
    base |= {"dynamic_sampling": False, "length_tokens": 0}
    grpo = load("grpo", trust=TRUST, scale_by_std=True, weighting="rollout_mean", **base)
    expected, told = train(grpo, teacher_seed=9)[-1]
    got, metrics = train(make(residual_weight=0.0), teacher_seed=9)[-1]
    assert set(got) == {"student"}  # no teacher is there, or scored
    for name, x in expected["student"].items():
        np.testing.assert_array_equal(got["student"][name], x)
    assert metrics["loss/total"] == told["loss/total"]


def test_the_teacher_moves_the_student_and_stays_itself():
    base, _ = train(make(residual_weight=0.0), teacher_seed=9)[-1]
    (first, _), (taught, metrics) = train(make(), teacher_seed=9)
    for name, x in taught["teacher"].items():
        np.testing.assert_array_equal(x, first["teacher"][name])
    assert max(np.abs(x - base["student"][name]).max() for name, x in taught["student"].items()) > (
        1e-3
    )
    assert 0 < metrics["loss/residual_max"] <= 2


def test_a_teacher_equal_to_the_student_says_nothing():
    base, _ = train(make(residual_weight=0.0), teacher_seed=0)[0]
    (taught, told), (_, later) = train(make(), teacher_seed=0)
    assert told["loss/residual_max"] < 1e-7  # two programs, one for each model's softmax
    for name, x in base["student"].items():
        np.testing.assert_allclose(taught["student"][name], x, atol=1e-6)
    assert later["loss/residual_max"] > 1e-3  # by then the student has left it


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("residual_weight", -0.1),
        ("residual_weight", math.inf),
        ("teacher_top", -1),
        ("verifier", "std"),
        ("weighting", "seq"),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        make(**{field: value})


def test_it_hashes():
    algorithm: Any = make()
    assert hash(algorithm) == hash(dataclasses.replace(algorithm))
