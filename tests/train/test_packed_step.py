"""Whole steps on packed rows against the same on plain rows: losses, curves, updated weights; cut
into micro-batches, on eight devices, with routes replayed, beside other models."""

import dataclasses
import functools
import importlib

import jax
import numpy as np
import optax
import pytest

from jaxrl.mesh import Rules
from jaxrl.model.form import AdapterConfig, ModelConfig
from jaxrl.model.policy import build
from jaxrl.pool.rollout import ROUTES
from jaxrl.train import loop, settings
from jaxrl.train import state as states
from jaxrl.train.packing import Shapes
from jaxrl.train.routing import RoutingConfig
from tests.model.forms import experts
from tests.model.tiny import CONFIG, drawn
from tests.train.talks import SHAPES, SIZE, laid_out, mixed
from tests.train.test_routing import apart
from tests.train.test_step import grpo, gvpo
from tests.train.toy import mesh_of, step_of

FORM = dataclasses.replace(CONFIG, layers=1, width=8, heads=2, kv_heads=1, head_size=4, hidden=8)
MOE = dataclasses.replace(FORM, experts=experts(hidden=8))
ADAPTER = AdapterConfig(rank=2, alpha=4.0, pattern="attention|mlp", dtype="float32")
ADAPTED = dataclasses.replace(FORM, adapter=ADAPTER)
ROUTED = RoutingConfig.of(MOE, recorded=True, replay=True, balance_weight=0.5)
SGD = optax.sgd(1.0)  # the update is minus the gradient, and few of its bits are lost
ROUNDED = {"optim/frac_params_unchanged", "optim/skipped", "batch/empty"}


@functools.cache
def batch(packed, *, routes=False, minibatches=1):
    """Eight groups of four, of which a label of 20 ids."""
    needs, alike = ((ROUTES,), (ROUTES,)) if routes else ((), ())
    shapes = SHAPES if packed else None
    more = {"needs": needs, "alike": alike, "minibatches": minibatches}
    made, counts = laid_out(mixed(), shapes, **more)
    assert (made.packed is not None) == packed and counts["failed"] == 1
    return made


def step(algorithm, form: ModelConfig, taken, *, micro, sizes=None, minibatches=1, routed=None):
    """What a step of SGD changed, and its curves."""
    mesh = mesh_of(**(sizes or {"data": 1}))
    policy = build(form, mesh, Rules(), {"teacher": FORM})
    params, named = drawn(policy.shapes), states.roles_of(algorithm)
    others = {"teacher": states.scorer(drawn(policy.form_of("teacher").shapes, 2))}
    freeze = (r"^(?!.*adapter)",) if form.adapter.rank else ()
    state = states.create(
        params, SGD, freeze=freeze, roles=named, key=jax.random.key(0), step=0, others=others
    )
    state = states.place(state, policy, mesh)
    more = {"mesh": mesh, "policy": policy, "routed": routed, "minibatches": minibatches}
    state, metrics = step_of(algorithm, SGD, micro=micro, size=SIZE, **more)(state, taken)
    trained = jax.device_get(state.roles["student"].params)
    change = {name: x - np.asarray(params[name]) for name, x in trained.items()}
    return change, {name: float(x) for name, x in metrics.items() if name not in ROUNDED}


def same(one, other, tolerance=1e-5):
    assert apart(one[0], other[0]) < tolerance
    assert one[1] == pytest.approx(other[1], rel=1e-4, abs=2e-5)
    assert other[1]["optim/grad_norm"] > 0


def test_grpo_takes_the_same_step_however_it_is_cut():
    """Two updates; micro-batches of one group, against an update at once."""
    taken = {packed: batch(packed, minibatches=2) for packed in (True, False)}
    plain = step(grpo(), FORM, taken[False], micro=16, minibatches=2)
    same(step(grpo(), FORM, taken[True], micro=4, minibatches=2), plain)


def test_gvpo_as_written_takes_the_same_step():
    """The rollouts of a group are coupled; an empty answer counts."""
    algorithm = gvpo(coupling="written", anchor="frozen", keep_truncated=True)
    packed, plain = (step(algorithm, FORM, batch(p), micro=16) for p in (True, False))
    del packed[1]["loss/entropy_mean"], packed[1]["loss/anchor_kl_mean"]  # of an empty answer's
    for name in ("loss/entropy_max", "loss/anchor_kl_max"):  # prompt, which no head sees here
        del packed[1][name]
    same(packed, (plain[0], {name: plain[1][name] for name in packed[1]}))


def test_replayed_routes_and_the_balance_term_take_the_same_step():
    """On eight devices, experts split; curves of the routers too."""
    plain = step(grpo(), MOE, batch(False, routes=True), micro=32, routed=ROUTED)
    sizes = {"data": 4, "expert": 2}
    taken = batch(True, routes=True)
    packed = step(grpo(), MOE, taken, micro=32, sizes=sizes, routed=ROUTED)
    same(packed, plain)
    assert plain[1]["router/balance"] > 0 and "router/agreement" in packed[1]


@pytest.mark.slow
def test_adapters_take_the_same_step():
    packed, plain = (step(grpo(), ADAPTED, batch(p), micro=32) for p in (True, False))
    assert all("adapter" in name for name in packed[0])
    same(packed, plain)


@pytest.mark.slow
def test_a_teacher_reads_the_same_tokens():
    residual = importlib.import_module("tests.algorithms.test_residual").make()
    packed, plain = (step(residual, FORM, batch(p), micro=32) for p in (True, False))
    same(packed, plain)


def plan(micro, **sizes):
    return step_of(grpo(), SGD, micro=micro, size=SIZE, mesh=mesh_of(**sizes)).plan(32, True)


def test_cuts_that_split_a_group_are_refused_by_name():
    words = "train.micro_rollouts=2: with train.packing.* allowed: divisors of the 32 .* = 4"
    with pytest.raises(ValueError, match=words):
        plan(2, data=1)
    words = r"train.micro_rollouts=16: .* mesh.data \* mesh.fsdp \* mesh.expert = 32"
    with pytest.raises(ValueError, match=words):
        plan(16, data=4, fsdp=2)
    assert plan(16, data=4).micro == 16


def configured(**packing):
    config = importlib.import_module("configs.grpo").get_config("tiny")
    config.train.packing.update(packing)
    return settings.phases(config)[-1]


def test_a_config_says_how_rows_are_packed():
    """Without numbers of its own the shapes are those of prompts and responses."""
    assert loop.packing_of(configured(rows="plain")) is None
    made = loop.packing_of(configured(rows="packed"))
    assert made is not None and made.shapes == Shapes((32,), (4,), ()) and made.alike == ()
    own = configured(rows="packed", prefix_buckets=(16, 32), bin_buckets=(8,), bins=(2,))
    made = loop.packing_of(own)
    assert made is not None and made.shapes == Shapes((16, 32), (8,), (2,))
    with pytest.raises(ValueError, match=r"bins=\(2, 4\); .*rollouts_per_group=4"):
        loop.packing_of(configured(rows="packed", bins=(2, 4)))
    with pytest.raises(ValueError, match=r"prefix_buckets=\(16,\), bin_buckets=\(8,\).* 36 tokens"):
        loop.packing_of(configured(rows="packed", prefix_buckets=(16,), bin_buckets=(8,)))
    with pytest.raises(ValueError, match="train.packing.rows='dense'; allowed: 'plain', 'packed'"):
        configured(rows="dense")


@pytest.mark.parametrize("kernels", ["splash", "tokamax"])
def test_no_kernel_attends_to_a_shared_prompt(kernels):
    config = importlib.import_module("configs.grpo").get_config("tiny")
    config.model.kernels = kernels
    assert settings.phases(config)[-1].model.kernels == kernels
    config.train.packing.rows = "packed"
    named = rf"model.kernels='{kernels}' with train.packing.rows='packed'; allowed: 'auto', 'xla'"
    with pytest.raises(ValueError, match=named):
        settings.phases(config)
