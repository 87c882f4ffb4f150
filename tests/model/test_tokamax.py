"""tokamax's kernels and its own XLA implementations against the plain path, on CPU."""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import experts, layers, tokamax_kernels
from jaxrl.model.sharing import visible
from tests.model import test_experts as plain
from tests.model.forms import MOE
from tests.model.tiny import policy_on

if importlib.util.find_spec("tokamax") is None:
    pytest.skip(
        "tokamax is not installed: pip install -c constraints.txt -e '.[tokamax]'",
        allow_module_level=True,
    )

CHIP = jax.sharding.AbstractDevice(platform="tpu", device_kind="TPU v5 lite", num_cores=1)
ROWS, WIDTH, HIDDEN = 640, 256, 384
SIZES = np.array([100, 0, 300, 77], np.int32)  # of 640 rows 163 belong to nobody


@pytest.fixture
def a_chip():
    """Kernels ask what they are compiled for, also where they are interpreted."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), automatic, abstract_device=CHIP)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def runs():
    """Rows with garbage behind the last run, weights, and what the gradient comes from."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(len(SIZES), WIDTH, HIDDEN)).astype(np.float32)
    given = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
    given[SIZES.sum() :] = 0
    return rows, weights, given


def product_with_gradients(product, rows, weights, given):
    """What a grouped product gives, and its gradients by rows and weights."""

    @jax.jit
    def run(rows, weights):
        made, pull = jax.vjp(lambda rows, weights: product(rows, weights, SIZES), rows, weights)
        return made, *pull(given)

    made, by_rows, by_weights = map(np.asarray, run(rows, weights))
    asked = SIZES.sum()
    return made[:asked], by_rows[:asked], by_weights


def test_the_kernel_is_a_grouped_product_and_so_is_its_twin(a_chip):
    rows, weights, given = runs()
    right = product_with_gradients(jax.lax.ragged_dot, rows, weights, given)
    dirty = rows.copy()
    dirty[SIZES.sum() :] = np.nan

    def interpreted(rows, weights, sizes):
        return tokamax_kernels.grouped_product(rows, weights, sizes, True)

    kernel = product_with_gradients(interpreted, dirty, weights, given)
    twin = product_with_gradients(tokamax_kernels.grouped_product_twin, rows, weights, given)
    for found in (kernel, twin):
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(kernel[2][1], 0)  # nobody goes to the second expert


def wide():
    """As ``plain.arrays``, with sides that the kernel takes; 62 tokens make no whole tile."""
    rng = np.random.default_rng(0)
    shapes = [(plain.EXPERTS, 128, 256)] * 2 + [(plain.EXPERTS, 256, 128)]
    weights = [rng.normal(size=shape).astype(np.float32) / 12 for shape in shapes]
    x = rng.normal(size=(62, 128)).astype(np.float32)
    return x, rng.random((62, plain.CHOICES)).astype(np.float32), *weights


@pytest.mark.parametrize("routing", ["padded", "nobody"])
def test_a_mixture_by_the_kernel_reads_no_garbage(a_chip, monkeypatch, routing):
    def interpreted(rows, weights, sizes):
        return tokamax_kernels.grouped_product(rows, weights, sizes, True)

    monkeypatch.setitem(experts.PRODUCTS, "tokamax", interpreted)
    routes, (x, *others) = plain.ROUTINGS[routing][:62], wide()
    dirty = np.where((routes < 0).all(1, keepdims=True), np.nan, x)
    found = mixture_with_gradients("tokamax", routes, dirty, *others)
    right = mixture_with_gradients("ragged", routes, x, *others)
    plain.same(found, right, 1e-4)


def mixture_with_gradients(matmul, routes, x, gates, *weights):
    given = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)

    @jax.jit
    def run(*arrays):
        def mixed(x, gates, *weights):
            activation = jax.nn.silu
            return experts.mixture(x, routes, gates, *weights, activation=activation, matmul=matmul)

        made, pull = jax.vjp(mixed, *arrays)
        return made, *pull(given)

    return [np.asarray(a) for a in run(x, gates, *weights)]


@plain.every_routing
def test_the_twin_equals_a_loop_over_the_experts(routing):
    found = plain.compiled("tokamax_twin", jax.nn.silu)(plain.ROUTINGS[routing], *plain.arrays())
    plain.same(found, plain.expected(routing))


@pytest.mark.parametrize("mesh", ["expert 2, tensor 2, fsdp 2", "expert 4, data 2"])
def test_a_mesh_changes_nothing_of_the_twin(monkeypatch, mesh):
    sizes = plain.MESHES[mesh][0]
    monkeypatch.setitem(plain.MESHES, "twin", (sizes, "tokamax_twin"))
    run = plain.on_mesh("twin")
    plain.on_mesh.cache_clear()
    for routing in ("uneven", "padded"):
        plain.same(run(plain.ROUTINGS[routing], *plain.arrays()), plain.expected(routing))


@pytest.mark.parametrize("window", [0, 40])
def test_its_attention_by_xla_equals_the_dense_form(window):
    """Values and gradients, under the mask of packed segments."""
    theirs_by = importlib.import_module("tokamax").dot_product_attention
    rng = np.random.default_rng(0)
    tokens, scale = 96, 0.3
    query = rng.normal(size=(2, 4, tokens, 16)).astype(np.float32)
    key, value = rng.normal(size=(2, 2, 2, tokens, 16)).astype(np.float32)
    given = rng.normal(size=query.shape).astype(np.float32)
    segment = np.ones((2, tokens), np.int32)
    segment[0, 30:] = 2
    near = np.arange(tokens)
    mask = visible(jnp.asarray(segment)) & (near[:, None] - near[None] < (window or tokens))

    def ours(query, key, value):
        return layers.attend(query, key, value, mask, scale=scale, sink=None, causal=True)

    def theirs(*arrays):
        turned = (x.swapaxes(1, 2) for x in arrays)
        found = theirs_by(*turned, mask=mask[:, None], scale=scale, implementation="xla")
        return found.swapaxes(1, 2)

    def run(attend: Any):
        made, pull = jax.vjp(attend, query, key, value)
        return made, *pull(given)

    for a, b in zip(jax.jit(run, static_argnums=0)(theirs), run(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_side_shorter_than_the_lanes_names_the_fields():
    rows, weights = jnp.zeros((128, 128)), jnp.zeros((4, 128, 64))
    with pytest.raises(ValueError, match=r"model.kernels='tokamax' with .*128 x 64.*model.width"):
        tokamax_kernels.grouped_product(rows, weights, jnp.zeros(4, jnp.int32), False)


def test_a_policy_takes_the_form_of_its_platform():
    policy = policy_on({"fsdp": 2}, kernels="tokamax", **MOE)
    assert policy.mix is not None
    assert experts.matmul_for("tokamax", "cpu") == "tokamax_twin"
    mesh = make_mesh({"expert": 2}, jax.devices()[:2])
    with pytest.raises(ValueError, match="matmul='auto' is unknown; allowed: .*'tokamax'"):
        experts.sharded_mixture(mesh, Rules(), matmul="auto")
