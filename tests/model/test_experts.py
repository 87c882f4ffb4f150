"""The mixture of experts beside a dense loop over the experts, forward and backward, on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl.mesh import Rules, make_mesh, spec
from jaxrl.model.experts import (
    Visiting,
    _order,
    matmul_for,
    mixture,
    sharded_mixture,
    visit_sizes,
)

TOKENS, CHOICES, EXPERTS, WIDTH, HIDDEN = 64, 2, 8, 12, 6
UNUSED = 5  # no token goes to this expert
WEIGHTS = [("expert", "embed", "mlp"), ("expert", "embed", "mlp"), ("expert", "mlp", "embed")]
gelu = functools.partial(jax.nn.gelu, approximate=True)


def loop(x, routes, gates, gate, up, down, *, activation):
    """Every expert on every token, added under the token's gate for it."""
    total = jnp.zeros_like(x)
    for e in range(gate.shape[0]):
        share = jnp.where(routes == e, gates, 0).sum(1, keepdims=True)
        total += share * ((activation(x @ gate[e]) * (x @ up[e])) @ down[e])
    return total


def routings():
    """By name; every load but the last is far from what is expected of one expert."""
    rng = np.random.default_rng(1)
    used = [e for e in range(EXPERTS) if e != UNUSED]
    uneven = np.stack([rng.permutation(used)[:CHOICES] for _ in range(TOKENS)])
    uneven[:20, 0], uneven[:20, 1] = 7, 2
    padded = uneven.copy()
    padded[rng.random(TOKENS) < 0.4] = -1
    padded[0, 1], padded[-1] = -1, -1
    nobody = np.full_like(uneven, -1)
    one = nobody.copy()
    one[:, 0] = 3  # all tokens to one expert, and by one choice only
    return {"uneven": uneven, "padded": padded, "one": one, "nobody": nobody}


ROUTINGS = routings()
every_routing = pytest.mark.parametrize("routing", ROUTINGS)


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(EXPERTS, WIDTH, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, WIDTH)]
    weights = [rng.normal(size=shape).astype(np.float32) / 3 for shape in shapes]
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    return x, rng.random((TOKENS, CHOICES)).astype(np.float32), *weights


def with_gradients(mix):
    """(routes, x, gates, weights) -> what the mixture gives, and gradients by all but routes."""
    cotangent = np.random.default_rng(2).normal(size=(TOKENS, WIDTH)).astype(np.float32)

    def objective(differentiated, routes):
        x, gates, *weights = differentiated
        made = mix(x, routes, gates, *weights)
        return (made.astype(jnp.float32) * cotangent).sum(), made

    compiled = jax.jit(jax.grad(objective, has_aux=True))

    def run(routes, *given):
        grads, made = compiled(given, routes)
        return [np.asarray(a, np.float32) for a in (made, *grads)]

    return run


@functools.cache
def compiled(matmul, activation):
    if matmul == "loop":
        return with_gradients(functools.partial(loop, activation=activation))
    return with_gradients(functools.partial(mixture, activation=activation, matmul=matmul))


@functools.cache
def expected(routing, activation=jax.nn.silu):
    return compiled("loop", activation)(ROUTINGS[routing], *arrays())


def same(found, wanted, tolerance=1e-5):
    names = ("output", "x", "gates", "gate", "up", "down")
    for name, a, b in zip(names, found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


@every_routing
@pytest.mark.parametrize("matmul", ["padded", "ragged"])
def test_it_equals_a_loop_over_the_experts(matmul, routing):
    found = compiled(matmul, jax.nn.silu)(ROUTINGS[routing], *arrays())
    same(found, expected(routing))
    missing = ROUTINGS[routing] < 0
    for a in found[:2]:  # a token that goes nowhere
        np.testing.assert_array_equal(a[missing.all(1)], 0)
    np.testing.assert_array_equal(found[2][missing], 0)
    idle = [e for e in range(EXPERTS) if e not in ROUTINGS[routing]]
    assert UNUSED in idle
    for a in found[3:]:
        np.testing.assert_array_equal(a[idle], 0)


def test_any_activation():
    same(compiled("padded", gelu)(ROUTINGS["uneven"], *arrays()), expected("uneven", gelu))


@pytest.mark.parametrize("matmul", ["padded", "ragged"])
def test_garbage_in_padding_does_not_leak(matmul):
    x, *others = arrays()
    away = (ROUTINGS["padded"] < 0).all(1)
    x[away] = np.nan
    same(compiled(matmul, jax.nn.silu)(ROUTINGS["padded"], x, *others), expected("padded"))


@pytest.mark.parametrize("matmul", ["padded", "ragged"])
def test_bfloat16_is_close(matmul):
    x, gates, *weights = arrays()
    narrow = [a.astype(jnp.bfloat16) for a in (x, *weights)]
    found = compiled(matmul, jax.nn.silu)(ROUTINGS["uneven"], narrow[0], gates, *narrow[1:])
    for a, b in zip(found, expected("uneven"), strict=True):
        assert np.abs(a - b).max() < 0.03 * np.abs(b).max()


@pytest.mark.parametrize("experts", [1, 3, 7])
def test_an_odd_number_of_experts(experts):
    """Visits are to two at a time."""
    x, gates, *weights = arrays()
    weights = [weight[:experts] for weight in weights]
    routes = ROUTINGS["uneven"] % (experts + 2)
    routes[routes >= experts] = -1
    if experts > 1:
        routes[:, 1][routes[:, 1] == routes[:, 0]] = -1
    else:
        routes[:, 1] = -1
    found = compiled("padded", jax.nn.silu)(routes, x, gates, *weights)
    same(found, compiled("loop", jax.nn.silu)(routes, x, gates, *weights))


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens(tokens):
    """As in decoding: fewer routes than experts."""
    x, gates, *weights = arrays()
    routes = ROUTINGS["uneven"][:tokens]
    mix = jax.jit(functools.partial(mixture, activation=jax.nn.silu, matmul="padded"))
    found = mix(x[:tokens], routes, gates[:tokens], *weights)
    np.testing.assert_allclose(found, expected("uneven")[0][:tokens], rtol=1e-5, atol=1e-5)


def test_a_token_may_name_an_expert_twice():
    x, gates, *weights = arrays()
    routes = np.full((TOKENS, CHOICES), 3)  # a run of all routes, longer than there are tokens
    found = compiled("padded", jax.nn.silu)(routes, x, gates, *weights)
    total = gates.sum(1, keepdims=True) * np.array([1, 0], np.float32)
    wanted = compiled("loop", jax.nn.silu)(ROUTINGS["one"], x, total, *weights)
    same([*found[:2], found[2][:, :1], *found[3:]], [*wanted[:2], wanted[2][:, :1], *wanted[3:]])


@pytest.mark.parametrize("routing", ["uneven", "nobody"])
def test_a_layer_within_a_stack_is_that_layer(routing):
    """Three layers of a stack of four, out of order: what they give, and one gradient by the
    stack, of which the layer that was not visited has 0."""
    x, gates, *weights = arrays()
    stacks = tuple(np.stack([weight * k for k in (1, -0.9, 0.8, 0.7)]) for weight in weights)
    routes, order = jnp.asarray(ROUTINGS[routing]), (2, 0, 3)
    mix = Visiting()

    def within(x, gates, stacks):
        for layer in order:
            made, stacks = mix.within(x, routes, gates, stacks, layer, activation=gelu)
            x = x + jnp.tanh(made)
        return (x**2).mean(), x

    def apart(x, gates, stacks):
        for layer in order:
            own = (stack[layer] for stack in stacks)
            x = x + jnp.tanh(loop(x, routes, gates, *own, activation=gelu))
        return (x**2).mean(), x

    found, wanted = (
        jax.jit(jax.grad(form, (0, 1, 2), has_aux=True))(x, gates, stacks)
        for form in (within, apart)
    )
    assert not np.asarray(found[0][2][0][1]).any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.parametrize("count", [7, 2**31])
def test_an_order_of_small_numbers_is_that_of_argsort(count):
    """Also where number and place do not fit one integer."""
    keys = np.random.default_rng(0).integers(0, 7, 100)
    np.testing.assert_array_equal(_order(jnp.asarray(keys), count), np.argsort(keys, stable=True))


def test_sizes_of_runs():
    """From a quarter of a mean run of 128 to all 512 tokens, and to all routes; a few tokens."""
    sizes = (32, 64, 96, 112, 128, 144, 160, 176, 192, 224, 256, 384, 512, 2048)
    assert visit_sizes(512, 4, 128) == sizes
    assert visit_sizes(64, 2, 16) == (16, 32, 48, 64, 128)
    assert visit_sizes(1, 2, 0.25) == (1, 2)
    for tokens, choices, mean in ((7, 3, 0.1), (1000, 1, 31.25), (64, 2, 0.0)):
        sizes = visit_sizes(tokens, choices, mean)
        assert sizes == tuple(sorted(set(sizes))) and {tokens, tokens * choices} <= set(sizes)


def test_no_form_is_taken_for_another():
    assert matmul_for("auto", "cpu") == matmul_for("splash", "cpu") == "padded"
    assert matmul_for("auto", "tpu") == matmul_for("xla", "tpu") == "ragged"
    assert matmul_for("tokamax", "tpu") == "tokamax"
    assert matmul_for("tokamax", "cpu") == "tokamax_twin"
    with pytest.raises(ValueError, match="matmul='dense' is unknown; allowed: .*'padded'"):
        x, *others = (jnp.asarray(a) for a in arrays())
        mixture(x, jnp.asarray(ROUTINGS["one"]), *others, activation=gelu, matmul="dense")


MESHES = {
    "expert 2, data 4": ({"expert": 2, "data": 4}, "padded"),
    "expert 2, tensor 2, data 2": ({"expert": 2, "tensor": 2, "data": 2}, "padded"),
    "expert 2, tensor 2, fsdp 2": ({"expert": 2, "tensor": 2, "fsdp": 2}, "ragged"),
    "expert 4, data 2": ({"expert": 4, "data": 2}, "padded"),
    "fsdp 4, tensor 2": ({"fsdp": 4, "tensor": 2}, "padded"),
}


@functools.cache
def on_mesh(name):
    sizes, matmul = MESHES[name]
    mesh, rules = make_mesh(sizes), Rules()
    mix = sharded_mixture(mesh, rules, matmul=matmul)
    run = with_gradients(functools.partial(mix, activation=jax.nn.silu))

    def placed(routes, *given):
        axes = [("rows", None)] * 3 + WEIGHTS
        lie = [NamedSharding(mesh, spec(logical, rules)) for logical in axes]
        return run(*map(jax.device_put, (routes, *given), lie))

    return placed


@every_routing
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_nothing(mesh, routing):
    found = on_mesh(mesh)(ROUTINGS[routing], *arrays())
    same(found, expected(routing))
    assert all(np.isfinite(a).all() for a in found)
    for a in found[3:]:
        np.testing.assert_array_equal(a[UNUSED], 0)


@every_routing
@pytest.mark.parametrize("sizes", [{"expert": 2, "context": 2, "fsdp": 2}, {"context": 8}], ids=str)
def test_rows_whose_tokens_are_split_change_nothing(sizes, routing):
    """[row token embed] with tokens over ``context``; and one token a row, which stays whole."""
    mesh, rules = make_mesh(sizes), Rules()
    mix = functools.partial(sharded_mixture(mesh, rules, matmul="padded"), activation=jax.nn.silu)

    def in_rows(length):
        def mixed(x, routes, gates, *weights):
            rows = (a.reshape(-1, length, a.shape[-1]) for a in (x, routes, gates))
            return mix(*rows, *weights).reshape(x.shape)

        return with_gradients(mixed)(ROUTINGS[routing], *arrays())

    for length in (8, 1):
        found = in_rows(length)
        same(found, expected(routing))
        for a in found[3:]:
            np.testing.assert_array_equal(a[UNUSED], 0)


def test_padding_crosses_nothing():
    """What no expert asked for never leaves its device, whatever it holds."""
    x, *others = arrays()
    x[(ROUTINGS["padded"] < 0).all(1)] = np.nan
    same(on_mesh("expert 2, data 4")(ROUTINGS["padded"], x, *others), expected("padded"))


def told(operand, output, start, sent, at, arriving, *, axis_name):
    """What ``jax.lax.ragged_all_to_all`` is documented to give; XLA:CPU does not have it."""
    me = jax.lax.axis_index(axis_name)
    every = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    row = jnp.arange(output.shape[0])
    parts = zip(every(operand), every(start), every(sent), every(at), strict=True)
    for peer, (rows, begin, size, place) in enumerate(parts):
        size = jnp.where(size[me] == arriving[peer], size[me], 0)  # else the device hangs
        inside = (row >= place[me]) & (row < place[me] + size)
        found = rows.at[row - place[me] + begin[me]].get(mode="clip")
        output = jnp.where(inside[:, None], found, output)
    return output


@pytest.mark.parametrize("expert", [2, 4])
def test_a_ragged_exchange_gives_what_the_dense_one_gives(monkeypatch, expert):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", told)
    mesh = make_mesh({"expert": expert, "data": 8 // expert})
    mix = sharded_mixture(mesh, Rules(), matmul="padded", exchange="ragged")
    run = with_gradients(functools.partial(mix, activation=jax.nn.silu))
    x, *others = arrays()
    x[(ROUTINGS["padded"] < 0).all(1)] = np.nan  # not even these rows are fetched
    same(run(ROUTINGS["padded"], x, *others), expected("padded"))
    for routing in ("uneven", "one", "nobody"):
        same(run(ROUTINGS[routing], *arrays()), expected(routing))


def test_what_does_not_divide_is_refused():
    mesh, (x, gates, *weights) = make_mesh({"expert": 4, "data": 2}), arrays()
    mix = functools.partial(sharded_mixture(mesh, Rules(), matmul="padded"), activation=gelu)
    routes = ROUTINGS["uneven"]
    with pytest.raises(ValueError, match="tokens=60 must be a multiple of .* = 8"):
        mix(x[:60], routes[:60], gates[:60], *weights)
    with pytest.raises(ValueError, match="model.experts.count=6 must be .* mesh.expert = 4"):
        mix(x, routes, gates, *(weight[:6] for weight in weights))
    with pytest.raises(ValueError, match="rules.expert=.* must be among rules.rows"):
        sharded_mixture(mesh, Rules(rows=("data",)), matmul="padded")
    with pytest.raises(ValueError, match="exchange='all' is unknown; allowed: .*'dense'"):
        sharded_mixture(mesh, Rules(), matmul="padded", exchange="all")
