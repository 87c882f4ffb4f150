"""Co-RA against its oracle: student and teacher learn from one take. R6: the method's own."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.train.state import models_of, scorer
from tests.algorithms.batches import differences, logps, update
from tests.algorithms.test_residual import PLAIN as RESIDUAL
from tests.algorithms.test_residual import TRUST, observed_of, small
from tests.papers import co_residual as paper
from tests.train import toy

PLAIN = {"student": RESIDUAL, "teacher_trust": TRUST | {"clip_low": 0.1, "clip_high": 0.1}}
NUMBERS = {
    "residual_weight": 0.7,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "teacher_clip_low": 0.1,
    "teacher_clip_high": 0.1,
}


def make(**change):
    return load("co_residual", **PLAIN | change)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_both_equal_the_oracle(dtype):
    with jax.enable_x64(True):
        batch, tolerance = small(), {np.float64: 1e-6, np.float32: 1e-5}[dtype]
        unbounded = {"dual_clip": float("inf")}
        algorithm = make(
            student=RESIDUAL | {"trust": TRUST | unbounded},
            teacher_trust=PLAIN["teacher_trust"] | unbounded,
        )
        ((who, lesson),) = algorithm.lessons
        assert (who, lesson.scorers) == ("teacher", (("teacher", "plain"),))
        observed, new, taught = observed_of(batch), logps(batch, 1), logps(batch, 7)

        def oracle(which, logp):
            student = {"new": new.tolist(), "old": observed["old_logp"].tolist()}
            teacher = {"new": taught.tolist(), "old": observed["teacher_logp"].tolist()}
            (student, teacher)[which]["new"] = logp
            return paper.take(
                student,
                teacher,
                observed["residual"].tolist(),
                batch.reward.tolist(),
                batch.group.tolist(),
                batch.valid.tolist(),
                batch.acted.tolist(),
                NUMBERS,
            )[which]

        narrow = jax.tree.map(lambda x: x.astype(dtype), observed)
        learners: list[Any] = [(0, algorithm, new), (1, Taught(lesson), taught)]
        for which, verbs, logp in learners:
            value, slope, _ = update(verbs, batch, logp.astype(dtype), narrow, micro=2)
            expected = differences(functools.partial(oracle, which), logp)
            np.testing.assert_allclose(value, oracle(which, logp.tolist()), rtol=tolerance)
            np.testing.assert_allclose(slope, expected, rtol=tolerance, atol=tolerance / 100)
            assert np.abs(expected).max() > 1e-3


class Taught:
    """A lesson in the form of an algorithm, for ``batches.update``."""

    def __init__(self, lesson):
        self.lesson = lesson
        self.credit = lesson.credit

    def loss(self, reading, batch, observed, credit):
        return self.lesson.loss({"teacher_logp": reading["logp"]}, batch, observed, credit)


TX = optax.sgd(0.5)


@functools.cache
def walk(*, method, shared=()):
    """(student, teacher) after each of two takes; the teacher's ``scale`` is frozen, and what it
    shares with the student."""
    algorithm = make() if method == "co_residual" else load("residual", **RESIDUAL)
    params = toy.Bigram().init(jax.random.key(9))
    optimizer = TX if method == "co_residual" else None
    freeze = shared or (("scale",) if optimizer else ())
    teacher = scorer(params, tx=optimizer, freeze=freeze, shared=shared)
    state = toy.state_of(algorithm, TX, freeze=shared, others={"teacher": teacher})
    found = [snapshot(state)]
    step = toy.step_of(
        algorithm, TX, micro=4, size=4, epochs=2, minibatches=2, lesson_txs={"teacher": TX}
    )
    metrics: Any = {}
    for take in range(2):
        groups = toy.random_groups(take, groups=4, size=4)
        state, metrics = step(state, toy.batch_of(groups, step_groups=4, size=4, minibatches=2))
        found.append(snapshot(state))
    assert method == "residual" or metrics["teacher/optim/updates"] == 4
    return found


def snapshot(state):
    models = models_of(state.roles)
    return {who: jax.tree.map(np.asarray, params) for who, params in models.items()}


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in b)


def test_r6_a_take_is_labelled_by_the_teacher_as_it_was_at_its_start():
    fixed, moving = walk(method="residual"), walk(method="co_residual")
    # The student of the first take cannot tell whether the teacher learns after it ...
    for name, x in fixed[1]["student"].items():
        np.testing.assert_allclose(moving[1]["student"][name], x, rtol=1e-6)
    # ... the teacher has learned by then, and from the second take on it shows
    assert same(fixed[1]["teacher"], fixed[0]["teacher"])
    assert not same(moving[1]["teacher"], moving[0]["teacher"])
    gap = [np.abs(x - moving[2]["student"][name]).max() for name, x in fixed[2]["student"].items()]
    assert max(gap) > 1e-5


def test_r6_frozen_weights_of_the_teacher_never_move():
    first, *later = (state["teacher"] for state in walk(method="co_residual"))
    for teacher in later:
        np.testing.assert_array_equal(teacher["scale"], first["scale"])
        assert not np.array_equal(teacher["head"], first["head"])


def test_r6_a_base_that_both_share_never_moves_and_their_adapters_do():
    first, *later = walk(method="co_residual", shared=("embed", "scale"))
    for state in later:
        for who in ("student", "teacher"):
            np.testing.assert_array_equal(state[who]["embed"], first["student"]["embed"])
            np.testing.assert_array_equal(state[who]["scale"], first["student"]["scale"])
            assert not np.array_equal(state[who]["head"], first[who]["head"])
        assert not np.array_equal(state["student"]["head"], state["teacher"]["head"])


def test_bad_fields_are_named():
    with pytest.raises(ValueError, match="algorithm.student.residual_weight=0; allowed: > 0"):
        make(student=RESIDUAL | {"residual_weight": 0.0})
    with pytest.raises(ValueError, match="algorithm.teacher_trust.mismatch='truncate'; allowed"):
        make(teacher_trust=TRUST | {"mismatch": "truncate"})
    with pytest.raises(TypeError, match=r"'co_residual'.student takes .*missing: \['verifier'\]"):
        make(student={k: v for k, v in RESIDUAL.items() if k != "verifier"})
