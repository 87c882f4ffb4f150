"""Several models behind several contexts, read at the same positions: against the decoder in numpy,
and blind to what they must not see."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.batch import Batch
from jaxrl.kernels.readings import taken_logp
from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import novelty
from jaxrl.model.policy import Policy, build
from jaxrl.train.collate import Shown, collate
from tests.model.tiny import CONFIG, numpy_logits, numpy_logp
from tests.pool.scripted import Letters
from tests.train.test_views import spoken
from tests.train.toy import group

STUDENT = dataclasses.replace(CONFIG, width=8, heads=2, kv_heads=2, head_size=4, hidden=8)
TEACHER = dataclasses.replace(STUDENT, layers=1, width=12, hidden=16, tied_head=False)
VALUE = dataclasses.replace(STUDENT, tied_head=False, outputs=1)
TEMPLATES = {
    "with_solution": "{prompt}z{solution}{response}",
    "with_feedback": "{prompt}{response}{feedback}",
    "response_only": "{response}",
}
SCORERS = (
    ("student", "plain"),
    ("student", "with_feedback"),
    ("self", "with_solution"),
    ("teacher", "with_solution"),
    ("value", "plain"),
    ("novelty", "response_only"),
)


class Few(Letters):
    """A tokenizer of a vocabulary of 20."""

    def encode(self, text: str) -> list[int]:
        return [ord(sign) % 17 + 3 for sign in text]


ROLLOUTS = [
    spoken(("P", [1, 2], -1), ("A", [3, 4, 5], 0), ("F", [6, 7], 0), sample=0),
    spoken(("P", [1, 2], -1), ("A", [8, 9], 0), sample=1, correct=False, reward=0.0),
    spoken(("P", [1, 2, 3], -1), ("A", [10, 11, 12, 13], 0), sample=2, correct=False, reward=0.0),
    spoken(("P", [1], -1), ("A", [14], 0), sample=3),
]


def batch_at(temperature: float) -> Batch:
    batch, _ = collate(
        [group(7, ROLLOUTS)],
        token_buckets=(8,),
        groups_per_step=1,
        rollouts_per_group=4,
        minibatches=1,
        needs=(),
        algorithm="toy",
        shown=Shown(TEMPLATES, (12,), Few()),
    )
    return dataclasses.replace(batch, temperature=np.full(batch.tokens.shape, temperature, "f4"))


def policy_on(mesh: Any) -> Policy:
    return build(STUDENT, mesh, Rules(), {"teacher": TEACHER, "value": VALUE})


def read(logits, taken):
    assert set(logits) == {"student", *("/".join(scorer) for scorer in SCORERS[1:])}
    student = logits["student"]
    teacher = logits["teacher/with_solution"]
    return {
        "plain": taken_logp(student, taken),
        "told": taken_logp(logits["student/with_feedback"], taken),
        "shown": taken_logp(logits["self/with_solution"], taken),
        "agreement": (jax.nn.softmax(student) * jax.nn.softmax(teacher)).sum(-1),
        "value": logits["value/plain"],
        "novelty": logits["novelty/response_only"],
    }


def scored(policy: Policy) -> Any:
    """(models, batch) -> readings, and the gradient of some of them by the student."""

    def loss(student, models, batch):
        found = policy.score({**models, "student": student}, batch, read, SCORERS)
        weight = jnp.arange(1.0, 9.0) * batch.acted
        return ((found["plain"] + found["told"] + found["agreement"]) * weight).sum(), found

    return jax.jit(lambda m, b: jax.grad(loss, has_aux=True)(m["student"], m, b)[::-1])


@pytest.fixture(scope="module")
def models():
    policy = policy_on(None)
    draw = np.random.default_rng(1)

    def drawn(shapes):
        return {name: draw.normal(0, 0.7, form.shape).astype("f4") for name, form in shapes.items()}

    forms = {who: policy.form_of(who).shapes for who in ("student", "self", "teacher", "value")}
    forms["novelty"] = novelty.shapes(layers=3, width=8, hidden=8)
    return {who: drawn(shapes) for who, shapes in forms.items()}


@pytest.fixture(scope="module")
def score(models):
    """A batch -> (readings, gradient) on the host, compiled once."""
    compiled = scored(policy_on(None))
    return lambda batch: jax.device_get(compiled(models, jax.tree.map(jnp.asarray, batch)))


def text_of(batch: Batch, view: str, row: int) -> tuple[list[int], Any]:
    """The ids of a row of a view, and the place of each plain token there."""
    if view == "plain":
        return ROLLOUTS[row].tokens.tolist(), np.arange(8)
    shown = batch.views[view]
    return shown.tokens[row][shown.segment[row] > 0].tolist(), shown.index[row]


@pytest.mark.parametrize(
    ("name", "who", "view"),
    [
        ("plain", "student", "plain"),
        ("told", "student", "with_feedback"),
        ("shown", "self", "with_solution"),
    ],
)
def test_a_view_scores_its_tokens_as_if_they_were_the_row(score, models, name, who, view):
    batch = batch_at(0.7)
    readings, _ = score(batch)
    held = np.asarray(batch.held(view))
    for row in range(4):
        ids, places = text_of(batch, view, row)
        if not ids:
            assert not held[row].any()
            continue
        right = numpy_logp(STUDENT, models[who], ids, 0.7)
        for column in np.flatnonzero(held[row])[view == "plain" :]:
            assert readings[name][row, column] == pytest.approx(right[places[column]], rel=1e-4)
    rows = [0] if view == "with_feedback" else [0, 1, 2, 3]
    assert np.flatnonzero(held.any(1)).tolist() == rows  # the others have no place
    assert np.isfinite(readings[name]).all()
    if view == "with_feedback":  # which is scored too
        assert np.flatnonzero(held[0]).tolist() == [2, 3, 4, 5, 6]


def test_a_teacher_of_another_form_is_read_with_the_student(score, models):
    batch = batch_at(0.7)
    readings, _ = score(batch)
    for row in range(4):
        ids, places = text_of(batch, "with_solution", row)
        mine = numpy_logits(STUDENT, models["student"], ROLLOUTS[row].tokens.tolist()) / 0.7
        theirs = numpy_logits(TEACHER, models["teacher"], ids) / 0.7
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (mine, theirs))
        for column in np.flatnonzero(batch.held("with_solution")[row]):
            right = (p[column - 1] * q[places[column] - 1]).sum()
            assert readings["agreement"][row, column] == pytest.approx(right, rel=1e-4)


def test_a_value_is_of_the_state_before_the_token_at_any_temperature(score, models):
    values = [score(batch_at(temperature))[0]["value"] for temperature in (0.7, 2.0)]
    assert values[0].shape == (4, 8, 1)
    np.testing.assert_array_equal(*values)
    head = {"head/kernel": models["value"]["output/kernel"]}
    for row, rollout in enumerate(ROLLOUTS):
        right = numpy_logits(VALUE, models["value"] | head, rollout.tokens.tolist())[:, 0]
        length = len(rollout.tokens)
        np.testing.assert_allclose(values[0][row, 1:length, 0], right[:-1], rtol=1e-4, atol=1e-6)
        assert not values[0][row, length:].any() and values[0][row, 0, 0] == 0


def spoiled(batch: Batch, view: str, row: int) -> Batch:
    """Other ids in a row of a view, and in all its padding."""
    shown = batch.views[view]
    draw = np.random.default_rng(3).integers(0, 20, shown.tokens.shape)
    other = (np.arange(4) == row)[:, None] | (shown.segment == 0)
    bad = dataclasses.replace(shown, tokens=np.where(other, draw, shown.tokens).astype("i4"))
    return dataclasses.replace(batch, views={**batch.views, view: bad})


@pytest.mark.parametrize("row", [0, 1])  # held there, and not
def test_what_a_view_shows_is_seen_by_its_own_row_and_scorer_alone(score, row):
    batch = batch_at(1.0)
    (before, _), (after, gradient) = score(batch), score(spoiled(batch, "with_feedback", row))
    for name in before:
        changed = (before[name] != after[name]).reshape(4, -1).any(1)
        wanted = [row] if name == "told" and row == 0 else []
        assert np.flatnonzero(changed).tolist() == wanted, name
        assert np.isfinite(after[name]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_padding_and_rows_without_a_place_have_no_gradient(score):
    """Ids, segments and positions of a row that a view does not hold: any garbage, no effect."""
    batch = batch_at(1.0)
    shown = batch.views["with_feedback"]
    for row in (1, 2, 3):
        assert not shown.segment[row].any()
    bad = dataclasses.replace(
        shown,
        tokens=np.where(np.arange(4)[:, None] > 0, 17, shown.tokens).astype("i4"),
        segment=np.where(np.arange(4)[:, None] > 0, 1, shown.segment).astype("i4"),
    )
    _, gradient = score(dataclasses.replace(batch, views={**batch.views, "with_feedback": bad}))
    _, wanted = score(batch)
    jax.tree.map(np.testing.assert_array_equal, gradient, wanted)


def test_novelty_is_of_the_response_alone_and_of_all_of_it(score, models):
    batch = batch_at(1.0)
    found, _ = score(batch)
    assert found["novelty"].shape == (4, 8, 3)
    prompts = np.where(batch.acted, batch.tokens, 19).astype("i4")
    other, _ = score(dataclasses.replace(batch, tokens=prompts))
    np.testing.assert_array_equal(other["novelty"], found["novelty"])
    assert (other["plain"] != found["plain"])[np.asarray(batch.acted)].all()
    # depth 0 of two layers is the embedding: its mean over the response, the first token included
    table = np.asarray(models["student"]["embedding"])
    for row, rollout in enumerate(ROLLOUTS):
        mean = table[rollout.tokens[np.asarray(batch.acted)[row, : len(rollout.tokens)]]].mean(0)
        right = novelty.error(models["novelty"], jnp.tile(mean, (1, 3, 1)))[0, 0]
        own = found["novelty"][row, 1 : len(rollout.tokens)]
        np.testing.assert_array_equal(own, np.broadcast_to(own[0], own.shape))
        assert own[0, 0] == pytest.approx(float(right), rel=1e-4)


def test_novelty_teaches_its_predictor_alone(models):
    policy, batch = policy_on(None), jax.tree.map(jnp.asarray, batch_at(1.0))
    scorers = (("novelty", "response_only"),)

    def error(who):
        found = policy.score(
            who, batch, lambda x, _: {"error": x["novelty/response_only"]}, scorers
        )
        return found["error"].sum()

    slopes = jax.jit(jax.grad(error))({who: models[who] for who in ("student", "novelty")})
    assert not any(np.any(x) for x in slopes["student"].values())
    moved = {name for name, x in slopes["novelty"].items() if np.any(x)}
    assert moved and all(name.startswith("predictor/") for name in moved)


def test_every_mesh_reads_the_same(score, models):
    """Case 40, with views and another form of teacher: rows and widths over four devices."""
    wanted = score(batch_at(0.7))
    mesh = make_mesh({"data": 2, "fsdp": 2}, jax.devices()[:4])
    policy = policy_on(mesh)
    placed = {
        who: jax.device_put(x, policy.form_of(who).shardings) if who != "novelty" else x
        for who, x in models.items()
    }
    found = jax.device_get(scored(policy)(placed, jax.tree.map(jnp.asarray, batch_at(0.7))))
    for name, x in wanted[0].items():
        np.testing.assert_allclose(found[0][name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, x in wanted[1].items():
        peak = np.abs(x).max()
        np.testing.assert_allclose(found[1][name], x, atol=1e-4 * peak, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outputs": 2}, r"scorers.teacher.model.outputs=2; allowed: 0"),
        ({"vocab_size": 24}, r"scorers.teacher.model.vocab_size=24; allowed: 20, the student's"),
        ({"width": 7}, r"scorers.teacher.model.width=7 must be a multiple of mesh.fsdp = 2"),
    ],
)
def test_a_form_that_does_not_fit_is_named(changes, words):
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    with pytest.raises(ValueError, match=words):
        build(STUDENT, mesh, Rules(), {"teacher": dataclasses.replace(STUDENT, **changes)})
    with pytest.raises(ValueError, match=r"^model.outputs=1; allowed: 0"):
        build(VALUE, mesh, Rules())
