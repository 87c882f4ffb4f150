"""Weights and moments in bfloat16: what is kept on average, what is exact, that meshes agree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.mesh import make_mesh
from jaxrl.train.optimizer import build
from jaxrl.train.rounding import round_stochastically
from tests.train.test_optimizer import but

HALF = {"w": jnp.ones(4096, jnp.bfloat16)}
SMALL = {"w": jnp.full(4096, 0.01)}  # of rate .1: a change of .001, a quarter of a unit below 1


def after(config, params, grad, updates):
    tx = build(config)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def one(params, state):
        changes, state = tx.update(grad, state, params)
        return optax.apply_updates(params, changes), state

    for _ in range(updates):
        params, state = one(params, state)
    return params, state


def test_the_mean_is_kept_and_no_number_moves_by_a_unit():
    x = jnp.array([1.001, -1.001, 3e-39, 65280.0, 0.0])
    rounded = jax.vmap(lambda key: round_stochastically(x, key))(
        jax.random.split(jax.random.key(1), 20_000)
    ).astype(jnp.float32)
    unit = jnp.array([2**-7, 2**-7, 2.0**-133, 256.0, 0.0])
    assert (abs(rounded - x) < unit + (unit == 0)).all() and (rounded[:, 3:] == x[3:]).all()
    # Of 20,000 draws between two neighbours the mean is within half a unit / sqrt(20000), times 4.
    assert (abs(rounded.mean(0) - x) <= 4 * unit / 2 / 20_000**0.5).all()


@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays(x):
    rounded = round_stochastically(jnp.full(100, x, jnp.float32), jax.random.key(0))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), np.full(100, x, np.float32))


def test_small_changes_are_lost_kept_on_average_or_kept():
    """20 changes of -.001 from 1: nearest stays at 1, masters reach .98 up to the last place
    (2**-8 below 1), and 4096 weights reach it on average."""
    nearest, stochastic, masters = (
        after(but(rounding=how), HALF, SMALL, 20) for how in ("nearest", "stochastic", "masters")
    )
    assert (nearest[0]["w"] == 1).all()
    weights = stochastic[0]["w"].astype(jnp.float32)
    assert weights.std() > 0 and weights.mean() == pytest.approx(0.98, abs=4 * 0.008 / 4096**0.5)
    np.testing.assert_allclose(masters[1].masters["w"], 0.98, rtol=1e-6)
    assert (masters[0]["w"] == jnp.bfloat16(0.98)).all()


def test_masters_give_the_float32_run():
    """Bit for bit, weight decay included; and weights in float32 have no copy."""
    config = but(name="adamw", weight_decay=0.1, rounding="masters")
    params = {"w": jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16), "v": jnp.ones(8)}
    grad = {"w": jnp.sin(jnp.arange(64.0)), "v": jnp.ones(8)}
    moved, state = after(config, params, grad, 5)
    wide, _ = after(config, {n: x.astype(jnp.float32) for n, x in params.items()}, grad, 5)
    assert set(state.masters) == {"w"}
    np.testing.assert_array_equal(state.masters["w"], wide["w"])
    np.testing.assert_array_equal(moved["w"], wide["w"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(moved["v"], wide["v"])


def test_moments_in_bfloat16_follow_those_in_float32():
    """An average with b2 = .999 moves by less than its last place in most updates: rounded to the
    nearest it would stay where it is."""
    params = {"w": jnp.zeros(4096)}
    config = but(name="adamw", b2=0.999)
    grad = {"w": jnp.ones(4096)}
    half, wide = (
        after(dataclasses.replace(config, moments=moments), params, grad, 60)
        for moments in ("bfloat16", "float32")
    )
    nu = optax.tree.get(half[1], "nu")["w"]
    assert nu.dtype == optax.tree.get(half[1], "mu")["w"].dtype == jnp.bfloat16
    exact = 1 - config.b2**60
    assert nu.astype(jnp.float32).mean() == pytest.approx(exact, rel=0.002)
    np.testing.assert_allclose(half[0]["w"].mean(), wide[0]["w"].mean(), rtol=0.005)


def test_a_mesh_rounds_as_one_device_does():
    config = but(name="adamw", moments="bfloat16", rounding="stochastic")
    alone, state = after(config, HALF, SMALL, 3)
    mesh = make_mesh({"fsdp": 8})
    spread = jax.device_put((HALF, SMALL), NamedSharding(mesh, PartitionSpec("fsdp")))
    shared, others = after(config, spread[0], spread[1], 3)
    assert not shared["w"].sharding.is_fully_replicated
    for a, b in zip(
        jax.tree.leaves((alone, state)), jax.tree.leaves((shared, others)), strict=True
    ):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))
