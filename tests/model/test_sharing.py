"""Packed rows give what plain rows give: attention against a dense mask, every form of decoder,
every scorer, values and gradients; and no rollout sees another (case 30)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import novelty
from jaxrl.model.form import AdapterConfig
from jaxrl.model.layers import attend
from jaxrl.model.policy import BALANCE, CHOSEN, build
from jaxrl.model.sharing import Bins, shared_masks
from jaxrl.model.transformer import UNGUIDED, Guidance
from jaxrl.pool.rollout import ROUTES
from jaxrl.train.collate import Shown
from jaxrl.train.packing import Shapes
from tests.model.forms import FORMS, LOCAL, MOE
from tests.model.test_scorers import Few
from tests.model.tiny import CONFIG, drawn, policy_on
from tests.train.talks import SHAPES, laid_out, mixed, uniform

ADAPTER = AdapterConfig(rank=2, alpha=4.0, pattern="attention|mlp", dtype="float32")
UNSHARED = Shapes(prefix_buckets=(0,), bin_buckets=(24,), bins=(2,))  # packing alone
CASES: dict[str, dict[str, Any]] = {
    "adapters": {"adapter": ADAPTER},
    "gemma": FORMS["gemma"],
    "mimo": FORMS["mimo"],
    "sinks, scanned, computed again": {"sinks": "all", "layers": 9, "remat": "full"},
}
PLAIN = (("student", "plain"),)


@functools.cache
def take(shapes=SHAPES):
    """The same take with packed rows and without them."""
    batch, _ = laid_out(mixed(), shapes, needs=(ROUTES,))
    assert batch.packed is not None
    return batch, dataclasses.replace(batch, packed=None)


def dense(position, segment, bins: Bins, window):
    """[group place place]: what a place may see, by the words of ``batch.Packed``."""
    groups, places = segment.shape
    size = (places - bins.prefix) // bins.count
    seen = np.zeros((groups, places, places), bool)
    for group in range(groups):
        for mine in range(places):
            for theirs in range(places):
                near = position[group, mine] - position[group, theirs] < window
                own = segment[group, mine] == segment[group, theirs] and theirs <= mine
                if mine < bins.prefix:
                    own &= theirs < bins.prefix
                elif theirs < bins.prefix:
                    own = segment[group, theirs] > 0
                else:
                    own &= (mine - bins.prefix) // size == (theirs - bins.prefix) // size
                seen[group, mine, theirs] = own and near
    return jnp.asarray(seen)


@pytest.mark.parametrize(
    ("shapes", "window", "sink"), [(SHAPES, 100, False), (SHAPES, 3, True), (UNSHARED, 3, False)]
)
def test_attention_is_that_under_a_dense_mask(shapes, window, sink):
    """Outputs and all gradients, grouped heads and values of another size."""
    packed = take(shapes)[0].packed
    assert packed is not None
    bins = Bins(packed.prefix, packed.bins)
    masks = shared_masks(packed.position, packed.segment, bins, window=window)
    twin = dense(packed.position, packed.segment, bins, window)
    mask = masks[0] if window == 100 else masks[1]
    draw, places = np.random.default_rng(0), packed.tokens.shape[1]
    sizes = {"query": (8, 4, places, 6), "key": (8, 2, places, 6), "value": (8, 2, places, 5)}
    x = {name: jnp.asarray(draw.normal(size=size), jnp.float32) for name, size in sizes.items()}
    x["sink"] = jnp.asarray(draw.normal(size=4), jnp.float32)
    toll = jnp.asarray(draw.normal(size=(8, 4, places, 5)), jnp.float32)
    toll = toll * (packed.segment > 0)[:, None, :, None]  # what padding gives is nobody's

    def cost(x, dense):
        more = {"scale": 0.7, "sink": x["sink"] if sink else None}
        parts = x["query"], x["key"], x["value"]
        found = attend(*parts, twin, **more) if dense else mask.attend(*parts, **more)
        return (found * toll).sum(), found * (toll != 0)

    values = [
        jax.jit(jax.value_and_grad(cost, has_aux=True), static_argnums=1)(x, d) for d in (0, 1)
    ]
    (one, found), grads = values[0]
    (two, wanted), others = values[1]
    assert one == pytest.approx(float(two), rel=1e-5)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    for name in x:
        np.testing.assert_allclose(grads[name], others[name], atol=2e-5, err_msg=name)


def test_no_array_of_all_places_by_all_places_is_formed():
    batch, _ = laid_out(uniform(2, 8, (8, 8, 8, 8)), SHAPES, slots=2)
    assert batch.packed is not None
    places = batch.packed.tokens.shape[1]
    assert places == 8 + 4 * 8
    policy = policy_on(**LOCAL)

    def loss(params, batch):
        return policy.score({"student": params}, batch, read, PLAIN)["logp"].sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(policy.shapes, jax.tree.map(jnp.asarray, batch)))
    assert f",{places},16]" in text and f",{places},{places}]" not in text


def read(logits, taken):
    student = logits["student"]
    return {"logp": taken_logp(student, taken), "entropy": entropy(student)}


@functools.cache
def scored(policy, shapes, recorded, share):
    """Readings of the packed and of the plain rows, and gradients by the parameters."""
    params = drawn(policy.shapes)
    weight = np.random.default_rng(3).normal(size=take()[0].tokens.shape).astype("f4")

    def loss(params, batch, guidance):
        batch = dataclasses.replace(batch, facts={})
        found = policy.score({"student": params}, batch, read, PLAIN, guidance)
        total = (found["logp"] * weight * batch.acted).sum()
        if BALANCE in found:
            counted = (batch.segment > 0) & batch.valid[:, None]
            total = total + 3 * jnp.where(counted, found[BALANCE], 0).sum()
        return total, found

    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    answers = []
    for batch in take(shapes):
        batch = jax.tree.map(jnp.asarray, batch)
        guidance = guided(policy, batch, recorded, share)
        answers.append(jax.device_get(compute(params, batch, guidance)))
    return answers


def guided(policy, batch, recorded, share):
    layers, experts = len(policy.config.sparse_layers), policy.config.experts.count
    if not layers:
        return UNGUIDED
    routes = None
    if recorded:  # alike in the prompts, as one sampler of one policy gives them
        routes = (batch.tokens[..., None] + jnp.arange(layers)) % experts
        routes = jnp.stack([routes, (routes + 1) % experts], -1)
        routes = jnp.where((batch.segment > 0)[..., None, None], routes, -1)
    draw = np.random.default_rng(5).dirichlet(np.ones(experts), layers)
    return Guidance(routes, jnp.asarray(draw, jnp.float32) if share else None)


def apart(a, b):
    """Distance of two gradients in units of the second's size."""
    return optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(b)


def alike(packed, plain, batch):
    """Values where a rollout acts or is told something, gradients everywhere."""
    (one, found), grads = packed
    (two, wanted), others = plain
    assert one == pytest.approx(float(two), rel=1e-5, abs=1e-4)
    counted = (batch.segment > 0) & np.asarray(batch.valid)[:, None]
    rests = counted & (batch.packed.place >= batch.packed.prefix)
    for name in ("logp", "entropy"):
        np.testing.assert_allclose(found[name][rests], wanted[name][rests], atol=2e-5)
        assert not found[name][~rests].any()
    for name in {CHOSEN, BALANCE} & set(found):
        np.testing.assert_allclose(found[name][counted], wanted[name][counted], atol=1e-5)
    assert apart(grads, others) < 1e-5


@pytest.mark.parametrize("name", list(CASES))
def test_every_form_gives_the_same_on_packed_rows(name):
    policy = policy_on(**CASES[name])
    packed, plain = scored(policy, SHAPES, False, False)
    alike(packed, plain, take()[0])


def test_packing_without_sharing_gives_the_same():
    policy = policy_on(**LOCAL)
    packed, plain = scored(policy, UNSHARED, False, False)
    alike(packed, plain, take(UNSHARED)[0])


@pytest.mark.parametrize("recorded", [False, True])
def test_routes_and_the_balance_term_are_the_same(recorded):
    """Replayed routes, shares, what the routers choose: a shared token counts at each rollout."""
    policy = policy_on(**MOE)
    packed, plain = scored(policy, SHAPES, recorded, True)
    assert {CHOSEN, BALANCE} <= set(packed[0][1])
    alike(packed, plain, take()[0])


def test_eight_devices_give_the_same():
    mesh = make_mesh({"data": 2, "fsdp": 2, "expert": 2}, jax.devices())
    policy = build(dataclasses.replace(CONFIG, **MOE), mesh, Rules())
    packed, plain = scored(policy, SHAPES, True, True)
    alike(packed, plain, take()[0])
    alike(packed, scored(policy_on(**MOE), SHAPES, True, True)[1], take()[0])


SCORERS = (
    ("student", "plain"),
    ("student", "with_feedback"),
    ("self", "with_solution"),
    ("teacher", "with_solution"),
    ("reference", "plain"),
    ("value", "plain"),
    ("novelty", "response_only"),
)
TEMPLATES = {
    "with_solution": "{prompt}z{solution}{response}",
    "with_feedback": "{prompt}{response}{feedback}",
    "response_only": "{response}",
}


def read_all(logits, taken):
    assert len(logits) == len(SCORERS)
    teacher, reference = logits["teacher/with_solution"], logits["reference/plain"]
    student = jax.nn.softmax(logits["student"])
    return {
        "logp": taken_logp(logits["student"], taken),
        "told": taken_logp(logits["student/with_feedback"], taken),
        "shown": taken_logp(logits["self/with_solution"], taken),
        "agreement": (student * jax.nn.softmax(teacher)).sum(-1),
        "apart": (student * reference).sum(-1),
        "value": logits["value/plain"],
        "novelty": logits["novelty/response_only"],
    }


def test_all_scorers_meet_at_the_same_tokens():
    """Views, another form, a value and novelty beside the packed student."""
    teacher = dataclasses.replace(CONFIG, layers=1, width=12, tied_head=False)
    value = dataclasses.replace(CONFIG, tied_head=False, outputs=1)
    policy = build(CONFIG, None, Rules(), {"teacher": teacher, "value": value})
    forms = {who: policy.form_of(who).shapes for who, view in SCORERS if who != "novelty"}
    forms["novelty"] = novelty.shapes(layers=3, width=16, hidden=8)
    models = {who: drawn(shapes, seed) for seed, (who, shapes) in enumerate(forms.items())}
    batch, _ = laid_out(mixed(), SHAPES, shown=Shown(TEMPLATES, (40,), Few()))
    weight = np.random.default_rng(1).normal(size=batch.tokens.shape).astype("f4")

    def loss(student, batch):
        found = policy.score({**models, "student": student}, batch, read_all, SCORERS)
        mixture = found["logp"] + found["told"] + found["agreement"] + found["apart"]
        return (mixture * weight * batch.acted).sum(), found

    compute = jax.jit(jax.grad(loss, has_aux=True))
    answers = [
        jax.device_get(compute(models["student"], jax.tree.map(jnp.asarray, each)))
        for each in (batch, dataclasses.replace(batch, packed=None))
    ]
    assert batch.packed is not None
    (grads, found), (others, wanted) = answers
    acted = np.asarray(batch.acted)
    assert all(np.asarray(batch.held(view))[acted].any() for view in TEMPLATES)
    for name in found:
        held = acted if name != "told" else acted & np.asarray(batch.held("with_feedback"))
        np.testing.assert_allclose(found[name][held], wanted[name][held], atol=3e-5, err_msg=name)
    assert apart(grads, others) < 1e-5


def test_no_rollout_sees_another():
    """Case 30: garbage in one rollout's rest changes no log-prob of the others, bit for bit."""
    policy = policy_on(**LOCAL)
    params = drawn(policy.shapes)
    batch = jax.tree.map(jnp.asarray, take()[0])
    packed = batch.packed
    score = jax.jit(lambda b: policy.score({"student": params}, b, read, PLAIN)["logp"])
    before = np.asarray(score(batch))
    for slot in range(4):
        mine = packed.segment == 2 + slot
        spoiled = jnp.where(mine, (packed.tokens + 7) % 20, packed.tokens)
        spoiled = dataclasses.replace(batch, packed=dataclasses.replace(packed, tokens=spoiled))
        same = np.asarray(score(spoiled)) == before
        others = np.arange(32) % 4 != slot
        assert same[others].all() and not same[~others].all()
