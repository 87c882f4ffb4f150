"""Optimizer state and weights in bfloat16: rounded at random, or with float32 masters beside.

Rounded to the nearest, a change below half a unit in the last place is lost, every time. Rounded up
with the probability that is its share of the way to the next number, it is kept on average:

    E[round(x)] = x,    |round(x) - x| < one unit in the last place

(Gupta et al. 2015, arXiv:1502.02551; of weights: Zamirai et al. 2020, arXiv:2010.06192.)
The numbers that decide depend on the count of updates and on an array's place among the others, so
a run repeats, on any mesh.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, Int

ROUNDINGS = ("nearest", "stochastic", "masters")


def round_stochastically(x: Float[Array, "..."], key: jax.Array) -> BFloat16[Array, "..."]:
    """``x`` (float32) in bfloat16, up or down at random so that the mean is ``x``. What is not
    finite stays what it is."""
    # bfloat16 is the upper half of float32: a carry out of the lower half rounds away from zero.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = jnp.where(jnp.isfinite(x), bits + noise, bits) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(upper, jnp.float32).astype(jnp.bfloat16)


class Moments(optax.ScaleByAdamState):
    """Count, ``mu`` and ``nu``, by a transformation that keeps the old ones where no update is
    made."""


def choose(made: jax.Array | bool, new: Any, old: Any) -> Any:
    """``new`` where an update is made, else ``old``; ``Moments`` are what they are to be."""

    def one(new: Any, old: Any) -> Any:
        return new if isinstance(new, Moments) else jnp.where(made, new, old)

    return jax.tree.map(one, new, old, is_leaf=lambda x: isinstance(x, Moments))


class Narrow(NamedTuple):
    """Updates made, and a state whose float arrays are bfloat16."""

    updates_made: Int[Array, ""]
    inner: optax.OptState


def in_bfloat16(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same transformation with its state held in bfloat16, rounded stochastically."""
    inner = optax.with_extra_args_support(inner)

    def floats(tree: Any, to: Any) -> Any:
        return jax.tree.map(lambda x: to(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    def init(params: optax.Params) -> Narrow:
        state = floats(inner.init(params), lambda x: x.astype(jnp.bfloat16))
        return Narrow(jnp.zeros((), jnp.int32), state)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        made: jax.Array | bool = True,
        **others: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, Narrow)
        wide = floats(state.inner, lambda x: x.astype(jnp.float32))
        changes, wide = inner.update(updates, wide, params, made=made, **others)
        keys = _keys(state.updates_made, stream=0)
        narrow = floats(wide, lambda x: round_stochastically(x, next(keys)))
        narrow = jax.tree.map(lambda new, old: jnp.where(made, new, old), narrow, state.inner)
        return changes, Narrow(state.updates_made + 1, narrow)

    return optax.GradientTransformationExtraArgs(init, update)


class Wide(NamedTuple):
    """Updates made, the float32 copies of weights that have one, and the state of the rest."""

    updates_made: Int[Array, ""]
    masters: dict[str, Float[Array, "..."]]
    inner: optax.OptState


def onto_weights(
    inner: optax.GradientTransformation, rounding: str
) -> optax.GradientTransformationExtraArgs:
    """``inner`` in float32, whatever the weights are; how narrower ones take its changes.

    nearest: rounded to the nearest. stochastic: see above. masters: ``inner`` changes a float32
    copy, and the weight is that copy, rounded to the nearest. Changes are returned in float32; what
    is added is the difference of two weights, which is exact unless a weight shrinks to less than
    2**-16 of what it was.
    """
    inner = optax.with_extra_args_support(inner)
    if rounding == "nearest":
        return optax.GradientTransformationExtraArgs(
            lambda params: inner.init(jax.tree.map(_float32, params)), inner.update
        )

    def init(params: optax.Params) -> Wide:
        weights = _flat(params)
        wide = {name: _float32(x) for name, x in weights.items()}
        narrow = [name for name, x in weights.items() if _is_narrow(x)]
        masters = {name: wide[name] for name in narrow if rounding == "masters"}
        return Wide(jnp.zeros((), jnp.int32), masters, inner.init(wide))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **others: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, Wide)
        weights = _flat(params)
        now = {name: _float32(x) for name, x in weights.items()} | state.masters
        changes, after = inner.update(updates, state.inner, now, **others)
        made, masters, keys = dict(_flat(changes)), {}, _keys(state.updates_made, stream=1)
        for name in [name for name, x in weights.items() if _is_narrow(x)]:
            aim = now[name] + made[name]
            if rounding == "masters":
                masters[name], weight = aim, aim.astype(weights[name].dtype)
            else:
                weight = round_stochastically(aim, next(keys))
            made[name] = _float32(weight) - _float32(weights[name])
        return made, Wide(state.updates_made + 1, masters, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _keys(count: Int[Array, ""], stream: int) -> Any:
    """A key for each array of an update; other ones in another stream."""
    key = jax.random.fold_in(jax.random.key(stream), count)
    place = 0
    while True:
        yield jax.random.fold_in(key, place)
        place += 1


def _flat(tree: Any) -> Mapping[str, jax.Array]:
    """Parameters or their changes, which are a flat tree everywhere."""
    assert isinstance(tree, Mapping)
    return tree


def _is_narrow(x: jax.Array) -> bool:
    return x.dtype == jnp.bfloat16


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
