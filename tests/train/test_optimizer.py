"""The chain's numbers by hand, and what is frozen."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.base import get_config
from jaxrl.train.optimizer import LARGE, OptimizerConfig, build, freezing, preview, schedule, split

PLAIN = OptimizerConfig(
    name="sgd",
    learning_rate=0.1,
    warmup_updates=0,
    decay_updates=0,
    final_fraction=0.1,
    b1=0.9,
    b2=0.95,
    epsilon=1e-8,
    weight_decay=0.0,
    moments="float32",
    rounding="nearest",
    clip_norm=1e9,
    train="auto",
    freeze=(),
    rates=(),
)


def but(**changes):
    return dataclasses.replace(PLAIN, **changes)


def after(config, params, *grads) -> tuple[Any, Any]:
    tx = build(config)
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_the_section_of_the_base_config_fits_field_by_field():
    section = get_config().to_dict()["optimizer"]
    assert set(section) == {field.name for field in dataclasses.fields(OptimizerConfig)}
    OptimizerConfig(**section)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("name", "adam", "adamw, sgd"),
        ("learning_rate", 0.0, "> 0"),
        ("learning_rate", math.nan, "> 0"),
        ("warmup_updates", -1, ">= 0"),
        ("decay_updates", -1, ">= 0"),
        ("final_fraction", 1.5, "0 .. 1"),
        ("b1", 1.0, "b1 < 1"),
        ("b2", -0.1, "b2 < 1"),
        ("epsilon", 0.0, "> 0"),
        ("weight_decay", -1.0, ">= 0"),
        ("moments", "float16", "float32, bfloat16"),
        ("rounding", "up", "nearest, stochastic, masters"),
        ("clip_norm", 0.0, "> 0"),
        ("freeze", "router", "a sequence"),
        ("rates", "router", "pairs"),
        ("rates", ("router", 30.0), "pairs"),
        ("rates", (("router",),), "pairs"),
        ("rates", (("router(", 30.0),), "a regular expression"),
        ("rates", (("router", 0.0),), "a factor > 0"),
        ("rates", (("router", math.nan),), "a factor > 0"),
        ("rates", (("router", "30"),), "a factor > 0"),
    ],
)
def test_a_bad_value_is_named(field, value, allowed):
    said = re.escape(f"optimizer.{field}={value!r}; allowed: ")
    with pytest.raises(ValueError, match=f"{said}.*{allowed}"):
        but(**{field: value})


def test_sgd_by_hand():
    params, _ = after(PLAIN, {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, -4.0])})
    np.testing.assert_allclose(params["w"], [0.7, 2.4], rtol=1e-6)


def test_clipping_is_by_the_norm_of_all_parameters():
    grads = {"w": jnp.array([3.0]), "v": jnp.array([4.0])}  # norm 5, clipped to 1: 0.6 and 0.8
    params, _ = after(but(clip_norm=1.0), {"w": jnp.zeros(1), "v": jnp.zeros(1)}, grads)
    np.testing.assert_allclose([params["w"][0], params["v"][0]], [-0.06, -0.08], rtol=1e-6)


def test_adamw_by_hand():
    """m = (1 - b1) g, v = (1 - b2) g^2, both bias-corrected -> g and g^2: w -= lr (g/|g| + decay
    w)."""
    config = but(name="adamw", weight_decay=0.5)
    params, state = after(config, {"w": jnp.array([2.0])}, {"w": jnp.array([0.25])})
    np.testing.assert_allclose(params["w"], [2 - 0.1 * (1 + 0.5 * 2)], rtol=1e-6)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["w"], [0.025], rtol=1e-6)


def test_clipped_adamw_is_optax_s_and_an_update_that_is_not_made_moves_no_moment():
    config = but(name="adamw", weight_decay=0.5, clip_norm=1.0)
    params = {"w": jnp.linspace(-1, 1, 8), "v": jnp.ones(3)}
    grads = [{"w": jnp.sin(jnp.arange(8.0) + n), "v": jnp.full(3, 0.1 * n)} for n in range(4)]
    grads.append(jax.tree.map(lambda g: g / 100, grads[0]))  # below the norm that is clipped
    adamw = optax.adamw(0.1, b1=config.b1, b2=config.b2, eps=config.epsilon, weight_decay=0.5)
    theirs, wanted = optax.chain(optax.clip_by_global_norm(1.0), adamw), params
    known = theirs.init(params)
    for grad in grads:
        changes, known = theirs.update(grad, known, wanted)
        wanted = optax.apply_updates(wanted, changes)
    moved, state = after(config, params, *grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), moved, wanted)
    for moments in ("float32", "bfloat16"):
        tx = build(dataclasses.replace(config, moments=moments))
        state = tx.update(grads[0], tx.init(params), params)[1]
        bad = jax.tree.map(lambda g: g * jnp.nan, grads[1])
        kept = tx.update(bad, state, params, made=jnp.array(False))[1]
        for name in ("mu", "nu"):
            jax.tree.map(
                np.testing.assert_array_equal,
                *(optax.tree.get(s, name) for s in (kept, state)),
            )


def test_the_bias_that_balances_a_router_is_not_decayed():
    names = ("blocks/mlp/router/bias", "blocks/mlp/router/kernel")
    params = {name: jnp.array([2.0]) for name in names}
    moved, _ = after(but(weight_decay=0.5), params, {name: jnp.zeros(1) for name in names})
    assert moved[names[0]] == 2 and moved[names[1]] == pytest.approx(2 - 0.1 * 0.5 * 2)


def test_a_rate_of_its_own():
    """w -= factor * lr * (g + decay w), by the first pattern that is found; moments are as ever."""
    names = ("a/router/kernel", "a/router/bias", "head")
    rates = (("router/kernel$", 30.0), ("router/", 0.5))
    config = but(weight_decay=0.5, rates=rates)
    params = {name: jnp.array([2.0]) for name in names}
    moved, _ = after(config, params, {name: jnp.array([3.0]) for name in names})
    found = [float(moved[name][0]) for name in names]
    wanted = [2 - 30 * 0.1 * (3 + 0.5 * 2), 2 - 0.5 * 0.1 * 3, 2 - 0.1 * (3 + 0.5 * 2)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    adam = dict(name="adamw", clip_norm=1.0)
    states = [after(but(**adam, rates=r), params, params)[1] for r in ((), rates)]
    same = [optax.tree.get(state, "nu") for state in states]
    assert all(same[0][name] == same[1][name] for name in names)
    assert optax.tree.get(states[1], "learning_rate") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("rates", "freeze", "named"),
    [
        ((("routr/", 30.0),), (), "'routr/'"),
        ((("router/", 30.0),), ("router/",), "'router/'"),  # it is frozen
        ((("kernel", 2.0), ("router/", 30.0)), (), "'router/'"),  # an earlier one takes it
    ],
)
def test_a_rate_that_changes_nothing_is_named(rates, freeze, named):
    said = f"optimizer.rates: {named} is the first to match no parameter that is trained.*query"
    with pytest.raises(ValueError, match=said):
        freezing(but(rates=rates, freeze=freeze), PARAMS)
    freezing(but(rates=(("router/", 30.0), ("kernel", 2.0))), PARAMS)


def rate(config, update) -> float:
    return float(jnp.asarray(schedule(config)(update)))


def test_warm_up_then_cosine_then_constant():
    config = but(warmup_updates=4, decay_updates=10)
    rising = [rate(config, update) for update in range(4)]
    np.testing.assert_allclose(rising, [0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    assert rate(config, 4) == pytest.approx(0.1)
    assert rate(config, 9) == pytest.approx(0.1 * (0.1 + 0.9 * 0.5))  # half-way down
    assert rate(config, 14) == pytest.approx(0.01)
    assert rate(config, 1000) == pytest.approx(0.01)
    assert rate(PLAIN, 0) == pytest.approx(0.1)
    assert rate(PLAIN, 1000) == pytest.approx(0.1)


def test_the_rate_that_was_used_can_be_read():
    config = but(warmup_updates=2)
    grad = {"w": jnp.ones(1)}
    params, state = after(config, {"w": jnp.zeros(1)}, grad)
    assert optax.tree.get(state, "learning_rate") == pytest.approx(0.05)
    np.testing.assert_allclose(params["w"], [-0.05], rtol=1e-6)
    _, state = after(config, {"w": jnp.zeros(1)}, grad, grad)
    assert optax.tree.get(state, "learning_rate") == pytest.approx(0.1)


def test_small_steps_move_float32_and_not_bfloat16():
    """Case 33: w = 0.02, 1000 steps of -1e-6 -> 0.019 in float32; bfloat16 stays at 0.020020."""
    tx = build(but(learning_rate=1e-6))

    def run(dtype) -> Any:
        params: Any = {"w": jnp.array([0.02], dtype)}
        state = tx.init({"w": jnp.zeros(1)})

        def one(carry: Any, _: None) -> Any:
            params, state = carry
            updates, state = tx.update({"w": jnp.ones(1)}, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, state), None, length=1000)[0][0]["w"][0]

    assert run(jnp.float32) == pytest.approx(0.019, rel=1e-4)
    assert float(run(jnp.bfloat16)) == pytest.approx(0.020020, abs=1e-6)


PARAMS: dict[str, Any] = {"blocks/router/kernel": 0, "blocks/query/kernel": 1, "embed": 2}


def grown(config, params, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """The chain, a gradient of normal numbers, and parameters and state after one such update."""
    keys = jax.random.split(jax.random.key(seed), (2, len(params)))

    def drawn(keys: Any) -> Any:
        pairs = zip(keys, params.items(), strict=True)
        return {name: jax.random.normal(key, x.shape) for key, (name, x) in pairs}

    tx, (first, grads) = build(config), map(drawn, keys)
    changes, state = tx.update(first, tx.init(params), params)
    return tx, grads, optax.apply_updates(params, changes), state


def told_and_true(tx, grads, params, state) -> tuple[Any, Any]:
    """What ``preview`` says of an update, and what it was: norm of changes, share that moved."""
    told = preview(tx, grads, state, params, optax.tree.norm(grads))
    changes, _ = tx.update(grads, state, params)
    new: Any = optax.apply_updates(params, changes)
    moved = sum(float((new[n] != x).sum()) for n, x in params.items())
    return told, (optax.tree.norm(changes), moved / sum(x.size for x in params.values()))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("clip_norm", [1.0, 1e9])
def test_a_preview_of_small_arrays_is_what_comes(name, clip_norm):
    params = {"a": jnp.ones((4, 3, 5)), "b": jnp.full((7,), 3e7), "c": jnp.zeros((2, 2))}
    config = but(name=name, clip_norm=clip_norm, rates=(("a", 3.0),))
    told, true = told_and_true(*grown(config, params))
    np.testing.assert_allclose(told, true, rtol=1e-6)
    assert 0 < told[1] < 1  # b is too large for such steps


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "masters"])
def test_a_preview_of_large_arrays_is_near_what_comes(moments, rounding):
    """Rows of 1 to 64: a wrong weight of what is looked at, or a corner alone, would show."""
    scale = jnp.arange(1.0, 65.0)
    large = jnp.ones((2, 64, 2048)) * scale[:, None]
    assert large.size > LARGE
    params = {"large": large.astype(jnp.bfloat16), "small": jnp.ones((16, 16))}
    config = but(
        name="adamw", learning_rate=3e-2, weight_decay=0.1, moments=moments, rounding=rounding
    )
    told, true = told_and_true(*grown(config, params))
    assert 0.2 < true[1] < 0.9 or rounding == "stochastic"
    np.testing.assert_allclose(told, true, rtol=0.1)


def test_a_preview_reads_no_other_device_s_parameters():
    """What it looks at lies evenly on all: only its sums meet."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    where = {
        "expert": PartitionSpec(None, None, "fsdp", "tensor"),
        "down": PartitionSpec(None, None, "tensor", "fsdp"),
        "embedding": PartitionSpec("tensor", "fsdp"),
    }
    shapes = {"expert": (2, 4, 128, 256), "down": (2, 4, 256, 128), "embedding": (2048, 64)}
    tx = build(but(name="adamw"))

    def whole(name: str) -> Any:
        spread = NamedSharding(mesh, where[name])
        return jax.ShapeDtypeStruct(shapes[name], jnp.float32, sharding=spread)

    def laid(path: Any, x: Any) -> Any:
        name = path[-1].key if hasattr(path[-1], "key") else ""
        return whole(name) if name in shapes else x

    params = {name: whole(name) for name in shapes}
    state = jax.tree_util.tree_map_with_path(laid, jax.eval_shape(tx.init, params))
    seen = jax.jit(lambda g, s, p: preview(tx, g, s, p, jnp.float32(1)))
    text = str(seen.lower(params, state, params).compile().as_text())
    assert "all-reduce" in text
    for moved in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert moved not in text


def test_split():
    assert split(PARAMS, ()) == (PARAMS, {})
    trainable, frozen = split(PARAMS, ("router", "^embed$"))
    assert (trainable, frozen) == (
        {"blocks/query/kernel": 1},
        {"blocks/router/kernel": 0, "embed": 2},
    )


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ValueError, match="'routr' matches no parameter.*blocks/query/kernel"):
        split(PARAMS, ("router", "routr"))


def test_nothing_left_to_train():
    with pytest.raises(ValueError, match="freezes every parameter"):
        split(PARAMS, ("kernel", "embed"))
