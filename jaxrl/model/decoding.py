"""What a sampler asks of a policy: prompts read in pieces into a cache, and one decoding step.

A piece is so many tokens of a prompt, whatever the prompt's length: pieces of one prompt or of
several go through the model side by side, each writes its keys and values to its row of the cache
before it looks at that row. So the memory of reading is that of the pieces of a call, a prompt that
was read up to some piece is gone on with from there, and lengths change no shape.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from jaxrl.mesh import over_rows, spec
from jaxrl.model import transformer
from jaxrl.model.filled import ByDevices, PieceMask, SaidMask, Shared
from jaxrl.model.form import DTYPES
from jaxrl.model.layers import Guide
from jaxrl.model.policy import Policy
from jaxrl.model.transformer import Params

Cache = tuple[tuple[Array, Array], ...]  # for each layer keys and values, [row kv_head place size]
Decoded = tuple[Array, Cache, Array | None]  # logits, the grown cache, routes

EVERYTHING = 2**30  # the window of a global layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """Pieces of prompts: where each is put. A row that the cache does not have is no row."""

    tokens: Int[Array, "piece token"]
    row: Int[Array, " piece"]  # of the cache, on each device by themselves
    start: Int[Array, " piece"]  # place of the first token; a multiple of a piece's tokens
    count: Int[Array, " piece"]  # tokens that are there, the rest is padding


def by_devices(policy: Policy) -> ByDevices:
    """How a function is run by the devices on their own rows."""
    return functools.partial(over_rows, mesh=policy.mesh, rules=policy.rules)


def put(policy: Policy, old: Array, row: Int[Array, " piece"], new: Array) -> Array:
    """Rows of an array that a device holds, replaced; those that it has not are dropped."""

    def own(by_rows: Any, _: Any) -> Array:
        old, row, new = by_rows
        return old.at[row[:, 0]].set(new, mode="drop")

    return by_devices(policy)(own)((old, row[:, None], new), None)


def put_pieces(policy: Policy, old: Array, pieces: Pieces, new: Array, axis: int) -> Array:
    """The places of pieces along an axis, replaced."""
    width = pieces.tokens.shape[1]

    def own(by_rows: Any, _: Any) -> Array:
        old, row, start, new = by_rows
        at = start[:, 0] // width
        cut = old.reshape(*old.shape[:axis], -1, width, *old.shape[axis + 1 :])
        where = (row[:, 0], *(slice(None),) * (axis - 1), at)
        return cut.at[where].set(new.astype(old.dtype), mode="drop").reshape(old.shape)

    by_rows = old, pieces.row[:, None], pieces.start[:, None], new
    return by_devices(policy)(own)(by_rows, None)


def read(
    policy: Policy, params: Params, pieces: Pieces, cache: Cache
) -> tuple[Float[Array, "piece token embed"], Cache, Int[Array, "piece token layer k"] | None]:
    """States after the last block, the cache with the pieces' keys and values, and the experts
    chosen (-1 on padding; None of a dense model). The cache's places are a multiple of a piece's.
    """
    model = transformer.bind(policy.config, params)
    width = pieces.tokens.shape[1]
    inside = jnp.arange(width) < pieces.count[:, None]
    position = jnp.where(inside, pieces.start[:, None] + jnp.arange(width), 0)

    def mask(window: int) -> PieceMask:
        return PieceMask(pieces.row, pieces.start, position.max(), window, by_devices(policy))

    sights = model.sights(mask(EVERYTHING), mask(policy.config.window), position)
    x, grown, chosen = model.embed(pieces.tokens), [], []
    for index, layer in enumerate(model.layers()):

        def write(key: Array, value: Array, old: Any = cache[index]) -> Any:
            return tuple(
                put_pieces(policy, held, pieces, new, 2)
                for held, new in zip(old, (key, value), strict=True)
            )

        here = sights[policy.config.is_local(index)]
        x, keys, values, routing = layer(x, here, write, Guide(inside, None, None), policy.mix)
        grown.append((keys, values))
        chosen += [] if routing is None else [routing.chosen]
    return x, tuple(grown), _stacked(chosen)


def after(
    policy: Policy, params: Params, state: Float[Array, "row embed"]
) -> Float[Array, "row vocab"]:
    """Logits of a state that ``read`` gave."""
    model = transformer.bind(policy.config, params)
    return model.logits(model.norm(state))


def prefill(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "row token"],
    length: Int[Array, " row"],
) -> tuple[Float[Array, "row vocab"], Cache, Int[Array, "row token layer k"] | None]:
    """Whole prompts at once, each one piece: logits after each one's last token, the cache, and the
    experts chosen. Prompts are padded on the right.
    """
    rows, width = tokens.shape
    row = jnp.arange(rows)
    cache = empty_cache(policy, rows, width)
    x, cache, chosen = read(policy, params, Pieces(tokens, row, 0 * row, length), cache)
    last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]
    return after(policy, params, last), cache, chosen


def decoder(policy: Policy, params: Params) -> Callable[..., Decoded]:
    """One decoding step: (token [slot], place [slot], active [slot], cache, shared prompts or None)
    -> (logits [slot vocab] in float32, cache, experts chosen for the token [slot layer k] or None).

    The token's keys and values go to ``place``; it sees its prompt and the places up to its own, of
    which only the part that active slots have filled is gone through: what others get means
    nothing. The layers are taken apart here, once, so that a loop around the step does not slice
    them again.
    """
    model, config = transformer.bind(policy.config, params), policy.config
    layers = model.layers()

    def step(
        token: Array, place: Array, active: Array, cache: Cache, shared: Shared | None = None
    ) -> Decoded:
        slot = jnp.arange(token.shape[0])
        length = 0 * place if shared is None else shared.length
        furthest = jnp.where(active, place, 0).max(), jnp.where(active, length - 1, 0).max()

        def mask(window: int) -> SaidMask:
            return SaidMask(place, furthest, window, by_devices(policy), shared)

        sights = model.sights(mask(EVERYTHING), mask(config.window), (length + place)[:, None])
        guide = Guide(jnp.ones(token.shape, bool)[:, None], None, None)
        x, grown, chosen = model.embed(token[:, None]), [], []
        for index, layer in enumerate(layers):

            def write(key: Array, value: Array, old: Any = cache[index]) -> Any:
                return tuple(
                    held.at[slot, :, place].set(new[:, :, 0])
                    for held, new in zip(old, (key, value), strict=True)
                )

            here = sights[config.is_local(index)]
            here = dataclasses.replace(here, mask=here.mask.of_layer(index))
            x, keys, values, routing = layer(x, here, write, guide, policy.mix)
            grown.append((keys, values))
            chosen += [] if routing is None else [routing.chosen]
        routes = _stacked(chosen)
        logits = model.logits(model.norm(x[:, 0]))
        return logits, tuple(grown), None if routes is None else routes[:, 0]

    return step


def empty_cache(policy: Policy, rows: int, places: int) -> Cache:
    """Zeroed keys and values of the compute dtype, rows split like those of a batch and heads like
    parameters.
    """
    config, sharding = policy.config, None
    if policy.mesh is not None:
        lying = spec(("rows", "kv_heads", None, "head"), policy.rules)
        sharding = NamedSharding(policy.mesh, lying)

    def new(heads: int, size: int) -> Array:
        return jnp.zeros((rows, heads, places, size), DTYPES[config.dtype], device=sharding)

    heads = [config.kind(layer).kv_heads for layer in range(config.layers)]
    return tuple((new(n, config.head_size), new(n, config.value_width)) for n in heads)


def _stacked(chosen: Sequence[Array]) -> Array | None:
    """Routes of each sparse layer, [row token k] -> [row token layer k]."""
    return jnp.stack(chosen, axis=2) if chosen else None
