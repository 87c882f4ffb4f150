"""The mixture of experts compiled for a slice of real TPUs, by their compiler, without one."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding

from jaxrl.mesh import Rules, make_mesh, spec
from jaxrl.model.experts import sharded_mixture

if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
    pytest.skip("needs libtpu, the TPU compiler: pip install '.[aot]'", allow_module_level=True)

SLICE = "v5e:2x2"
TOKENS, CHOICES, EXPERTS, WIDTH, HIDDEN = 256, 2, 8, 128, 128
INWARD, OUTWARD = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask what the machine is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process at the same time dies
    "TPU_WORKER_HOSTNAMES": "localhost",  # these two: quiet errors at the start
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


@pytest.fixture(scope="module")
def chips():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield topologies.get_topology_desc(platform="tpu", topology_name=SLICE).devices


def compiled(chips, exchange, differentiate):
    """Program text of four devices, two experts on each."""
    mesh, rules = make_mesh({"expert": 4}, chips), Rules()
    mix = sharded_mixture(mesh, rules, matmul="ragged", exchange=exchange)

    def total(routes, x, gates, *weights):
        made = mix(x, routes, gates, *weights, activation=jax.nn.silu)
        return (made.astype(jnp.float32) ** 2).sum()

    def given(shape, dtype, axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec(axes, rules)))

    rows = functools.partial(given, axes=("rows", None))
    arrays = [
        rows((TOKENS, CHOICES), jnp.int32),
        rows((TOKENS, WIDTH), jnp.bfloat16),
        rows((TOKENS, CHOICES), jnp.float32),
        *[given((EXPERTS, WIDTH, HIDDEN), jnp.bfloat16, INWARD)] * 2,
        given((EXPERTS, HIDDEN, WIDTH), jnp.bfloat16, OUTWARD),
    ]
    function = jax.grad(total, argnums=(1, 2, 3, 4, 5)) if differentiate else total
    with jax.set_mesh(mesh):
        return str(jax.jit(function).lower(*arrays).compile().as_text())


@pytest.mark.parametrize(("differentiate", "exchanges"), [(False, 4), (True, 7)])
def test_the_ragged_exchange_compiles_for_a_slice(chips, differentiate, exchanges):
    """Tokens, routes and gates go there, and what was made of them comes back; its gradient goes
    there, and those of tokens and gates come back."""
    text = compiled(chips, "auto", differentiate)
    assert text.count(" ragged-all-to-all(") == exchanges


def test_the_dense_exchange_compiles_too(chips):
    text = compiled(chips, "dense", True)
    assert " all-to-all(" in text and "ragged-all-to-all(" not in text
