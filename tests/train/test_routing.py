"""A student with experts through the whole step: frozen, replayed and balanced routers, and what
the curves say of them (case 32)."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.mesh import Rules
from jaxrl.model.form import qwen3
from jaxrl.model.policy import build
from jaxrl.model.transformer import Guidance
from jaxrl.pool.rollout import ROUTES
from jaxrl.train import loop, routing, settings
from jaxrl.train import state as states
from jaxrl.train.routing import RoutingConfig
from tests.model.forms import experts
from tests.model.tiny import lively
from tests.train.test_step import assert_same, grpo
from tests.train.toy import batch_of, mesh_of, random_groups, step_of

FORM = qwen3(
    vocab_size=8,
    layers=2,
    width=8,
    heads=2,
    kv_heads=2,
    head_size=4,
    hidden=16,
    rope_theta=10_000.0,
    norm_epsilon=1e-6,
    tied_head=True,
    dtype="float32",
    param_dtype="float32",
    remat="none",
    score_chunk_positions=64,
    experts=experts(hidden=8),
)
SGD = optax.sgd(0.1)
GRPO = grpo(weighting="token_mean")
ROUTER = "blocks/mlp/router/kernel"
FREE = RoutingConfig.of(FORM, recorded=False, replay=False, balance_weight=0.0)
REPLAYED = dataclasses.replace(FREE, recorded=True, replay=True)


@functools.cache
def policy_on(mesh=None):
    return build(FORM, mesh, Rules())


@functools.cache
def weights():
    return lively(policy_on().init(jax.random.key(1)))


@functools.cache
def take(seed=0):
    """Four groups of two on rows of 8."""
    return batch_of(random_groups(seed, 4, 2), step_groups=4, size=2)


def recorded(routes):
    """The same with routes [row token layer k] that a sampler has recorded."""
    return dataclasses.replace(take(), facts={ROUTES: routes.astype(np.int32)})


@functools.cache
def _routed(policy, share):
    def routed(params, share):
        batch = take()
        inputs = jnp.asarray(batch.tokens), jnp.asarray(batch.position), jnp.asarray(batch.segment)
        return policy.routed(params, *inputs, Guidance(None, share))[1]

    return jax.jit(routed)


def chosen():
    """What the routers choose for the tokens of the take."""
    return np.array(_routed(policy_on(), False)(weights(), None).chosen)


def other():
    """Routes that no router chose; what stands on padding must not be followed."""
    routes = (chosen() + 1) % 4
    routes[take().segment == 0] = 3
    return routes


def run(batch, routed, *, micro=8, freeze=(), sizes=None):
    """One step of SGD: the state after it and its curves."""
    mesh = mesh_of(**(sizes or {"data": 1}))
    policy = policy_on(mesh)
    origin = states.scorer({name: weights()[name] for name in (ROUTER,)})
    state = states.create(
        weights(),
        SGD,
        freeze=freeze,
        roles=states.roles_of(GRPO) | {routing.ORIGIN},
        key=jax.random.key(0),
        step=0,
        others={routing.ORIGIN: origin},
    )
    state = states.place(state, policy, mesh)
    step = step_of(GRPO, SGD, micro=micro, size=2, mesh=mesh, policy=policy, routed=routed)
    state, metrics = step(state, batch)
    return jax.device_get(state), {name: float(x) for name, x in metrics.items()}


@pytest.fixture(scope="module")
def free():
    return run(take(), FREE)


@pytest.fixture(scope="module")
def replayed():
    return run(recorded(other()), REPLAYED)


def trained(state):
    return state.roles["student"].params


def change(state):
    """What a step changed: minus the rate times the gradient."""
    return {name: x - weights()[name] for name, x in trained(state).items()}


def apart(a, b):
    """Distance of two trees in units of the second's size."""
    return optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(b)


def counted():
    return (take().segment > 0) & take().valid[take().rollout][:, None]


def counts(routes, layer):
    return np.bincount(routes[:, :, layer][counted()].reshape(-1), minlength=4)


def test_a_frozen_router_keeps_its_bits_and_the_rest_is_trained_as_ever(free):
    """It gets no gradient, but passes on what the rest is taught by."""
    state, _ = run(take(), FREE, freeze=("router/",))
    assert set(state.roles["student"].frozen) == {ROUTER}
    assert_same(state.roles["student"].frozen, {ROUTER: weights()[ROUTER]})
    rest = {name: x for name, x in change(free[0]).items() if name != ROUTER}
    assert all((x != 0).any() for x in rest.values())
    assert apart(change(state), rest) < 1e-6
    assert (change(free[0])[ROUTER] != 0).any()


def test_a_frozen_router_has_no_moments():
    role = states.scorer(weights(), tx=optax.adamw(0.1), freeze=("router/",))
    named = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(role.opt_state)]
    assert any("mlp/gate" in name for name in named) and not any("router" in n for n in named)


def test_loads_count_every_token_once_a_choice_and_no_padding(free):
    """case 32"""
    metrics = free[1]
    for layer in range(2):
        count = counts(chosen(), layer)
        share = count / count.sum()
        assert count.sum() == 2 * counted().sum()
        name = f"router/layer_{layer:02d}"
        assert metrics[f"{name}/max_share"] == pytest.approx(share.max(), rel=1e-6)
        assert metrics[f"{name}/cv"] == pytest.approx(count.std() / count.mean(), rel=1e-5)
        entropy = -(share[share > 0] * np.log(share[share > 0])).sum() / np.log(4)
        assert metrics[f"{name}/entropy"] == pytest.approx(entropy, rel=1e-5)
    worst = max(metrics[f"router/layer_{i:02d}/max_share"] for i in range(2))
    assert metrics["router/max_share"] == worst
    assert not any(name.startswith(("router/agreement", "router/balance")) for name in metrics)


def test_replayed_routes_load_the_experts_and_the_gates_are_live(free, replayed):
    state, metrics = replayed
    mask = counted()
    for layer in range(2):
        count = counts(other(), layer)
        name = f"router/layer_{layer:02d}"
        assert metrics[f"{name}/max_share"] == pytest.approx(count.max() / count.sum())
    pairs = zip(chosen()[:, :, 0][mask], other()[:, :, 0][mask], strict=True)
    same = [len(set(a) & set(b)) / 2 for a, b in pairs]
    assert metrics["router/layer_00/agreement"] == pytest.approx(np.mean(same), rel=1e-6)
    assert apart(change(state), change(free[0])) > 0.01
    assert (change(state)[ROUTER] != 0).any()  # gates of replayed routes still teach the router


def test_the_routers_own_choice_replayed_changes_nothing_nor_do_unknown_routes(free):
    routes = chosen()
    routes[:, 3:] = -1
    state, metrics = run(recorded(routes), REPLAYED)
    assert apart(change(state), change(free[0])) < 1e-5
    known = (take().segment > 0) & (np.arange(8) < 3)
    assert metrics["router/recorded_tokens"] == known.sum()
    assert metrics["router/agreement"] == 1 and metrics["router/drift"] == 0


def test_the_balance_term_is_one_sum_over_tokens_and_no_part_of_the_loss(free):
    """Its gradient, by the formula over the whole take with the shares held fixed."""
    weight, mask = 0.5, counted()
    share = [counts(chosen(), layer) / counts(chosen(), layer).sum() for layer in range(2)]

    def term(params):
        found = _routed(policy_on(), True)(params, jnp.asarray(share, jnp.float32))
        return weight * jnp.where(mask, found.balance, 0).sum() / mask.sum()

    value, grads = jax.value_and_grad(term)(weights())
    state, metrics = run(take(), dataclasses.replace(FREE, balance_weight=weight), micro=2)
    added = optax.tree.sub(change(state), change(free[0]))
    assert apart(added, jax.tree.map(lambda g: -0.1 * g, grads)) < 1e-4
    assert metrics["loss/total"] == pytest.approx(free[1]["loss/total"], rel=1e-5)
    assert metrics["router/balance"] == pytest.approx(float(value) / weight, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_only_the_balance_term_needs_a_pass_for_the_loads_at_the_start(weight):
    routed = dataclasses.replace(FREE, balance_weight=weight)
    step = step_of(GRPO, SGD, micro=8, size=2, policy=policy_on(), routed=routed)
    batch = jax.tree.map(jnp.asarray, take())
    plan = step.plan(batch.valid.shape[0], False)
    assert (step.blind_credit(batch, plan) is None) == (weight > 0)


def test_the_distance_from_the_start_is_that_of_the_parameters(free):
    state, metrics = free
    for layer in range(2):
        first, moved = np.asarray(weights()[ROUTER])[layer], change(state)[ROUTER][layer]
        far = np.linalg.norm(moved) / np.linalg.norm(first)
        found = metrics[f"router/layer_{layer:02d}/distance_kernel"]
        assert found == pytest.approx(far, rel=1e-4) and found > 0
    assert_same(state.roles[routing.ORIGIN].all, {ROUTER: weights()[ROUTER]})


@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2}, {"expert": 2, "context": 2}], ids=str)
def test_a_mesh_of_experts_takes_the_same_step(replayed, sizes):
    one, theirs = replayed
    two, mine = run(recorded(other()), REPLAYED, sizes=sizes)
    assert apart(change(two), change(one)) < 1e-5
    for name in set(theirs) - {"optim/frac_params_unchanged"}:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def config(**changes):
    made = importlib.import_module("configs.grpo").get_config("tiny")
    made.model.experts.update(count=4, per_token=2, hidden=8)
    for path, value in changes.items():
        section, field = path.split("__")
        made[section][field] = value
    return settings.phases(made)[-1]


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="train.routes='replayed'.*sampler.record_routes=True"):
        loop.routing_of(config(train__routes="replayed"))
    with pytest.raises(ValueError, match="train.routes='forced'"):
        config(train__routes="forced")
    with pytest.raises(ValueError, match="train.balance_weight=-1"):
        config(train__balance_weight=-1.0)
    dense = dataclasses.replace(
        config(train__balance_weight=0.1), model=dataclasses.replace(FORM, experts=experts(count=0))
    )
    with pytest.raises(ValueError, match=r"train.balance_weight=0.1.*model.experts.count=0"):
        loop.routing_of(dense)
    asked = dataclasses.replace(FREE, balance_weight=0.1)
    with pytest.raises(
        ValueError, match=r"balance_weight=0.1 beside frozen routers \(blocks/mlp/router/kernel\)"
    ):
        routing.refuse_pointless_balance(asked, [ROUTER])
    routing.refuse_pointless_balance(asked, ["blocks/mlp/router/bias"])  # the kernel still learns
    routing.refuse_pointless_balance(FREE, [ROUTER])
    found = loop.routing_of(config(train__routes="replayed", sampler__record_routes=True))
    assert found == REPLAYED
