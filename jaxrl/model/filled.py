"""Attention over the part of a cache that holds something: a decoding step costs what has been
said so far, however long the cache may get, and a piece of a prompt what was read before it.

A cache is gone through in blocks of one size, up to the furthest place that counts, with the
softmax renormalised on the way. A block in which a query sees nothing multiplies by one and adds
zeros: no bit of a sample depends on how far its neighbours have come. What lies in two caches, a
prompt that several samples share and what each has said since, is one softmax over both:

    peak = max p_i;  total = sum t_i exp(p_i - peak);  out = sum o_i exp(p_i - peak) / total
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128  # places; a cache that has no more is gone through at once
LOWEST = float(jnp.finfo(jnp.float32).min)  # a score that is not seen

# ``mesh.over_rows`` of a mesh: a function run by the devices on their own rows.
ByDevices = Callable[[Callable[..., Any]], Callable[..., Any]]


class Span(NamedTuple):
    """The places that a query sees: from ``low`` to before ``high``."""

    low: Int[Array, "row query"]
    high: Int[Array, "row query"]


class Part(NamedTuple):
    """What one cache gives: the highest score, the sum of weights over it, the weighted values."""

    peak: Float[Array, "row kv_head alike query 1"]
    total: Float[Array, "row kv_head alike query 1"]
    found: Float[Array, "row kv_head alike query value_size"]


@dataclasses.dataclass(frozen=True)
class PieceMask:
    """Queries are pieces of prompts, one after another from place ``start`` of the cache's
    ``row``; each sees the last ``window`` places up to its own, nothing past ``furthest``."""

    row: Int[Array, " piece"]
    start: Int[Array, " piece"]
    furthest: Int[Array, ""]
    window: int
    by_devices: ByDevices

    def attend(
        self,
        query: Float[Array, "piece head token size"],
        key: Float[Array, "row kv_head place size"],
        value: Float[Array, "row kv_head place value_size"],
        *,
        scale: float,
        sink: Float[Array, " head"] | None,
    ) -> Float[Array, "piece head token value_size"]:
        """``layers.attend`` of each piece over its row."""

        def own(by_rows: Any, whole: Any) -> Array:
            query, key, value, row, start = by_rows
            after = start + 1 + jnp.arange(query.shape[2])
            part = over_blocks(
                grouped(query, key.shape[1]),
                (key, value),
                Span(after - self.window, after),
                whole[0],
                scale=scale,
                row=row[:, 0],
            )
            return together([part], whole[1], value.dtype)

        by_rows = query, key, value, self.row[:, None], self.start[:, None]
        return self.by_devices(own)(by_rows, (self.furthest, sink))


@dataclasses.dataclass(frozen=True)
class Shared:
    """Prompts that decoding samples see, each held once: slot s sees the first ``length[s]`` places
    of the row whose seat it has; seats are numbered row after row, on each device by themselves.
    """

    cache: Any  # of each layer keys and values, [row kv_head place size]
    length: Int[Array, " slot"]
    seat: Int[Array, " slot"]
    slot: Int[Array, "row seat"]  # who has it; any slot where nobody does


@dataclasses.dataclass(frozen=True)
class SaidMask:
    """The newest token of each slot, at ``place`` of its cache, sees the last ``window`` places up
    to its own, the prompt's before them. Nothing past ``furthest`` of the cache and of the prompts
    is gone through: what is said of slots that have come further means nothing."""

    place: Int[Array, " slot"]
    furthest: tuple[Int[Array, ""], Int[Array, ""]]
    window: int
    by_devices: ByDevices
    shared: Shared | None = None
    prompts: tuple[Array, Array] | None = None  # keys and values of this layer

    def of_layer(self, layer: int) -> "SaidMask":
        """With the layer's prompts."""
        if self.shared is None:
            return self
        return dataclasses.replace(self, prompts=self.shared.cache[layer])

    def attend(
        self,
        query: Float[Array, "slot head 1 size"],
        key: Float[Array, "slot kv_head place size"],
        value: Float[Array, "slot kv_head place value_size"],
        *,
        scale: float,
        sink: Float[Array, " head"] | None,
    ) -> Float[Array, "slot head 1 value_size"]:
        """``layers.attend`` over the prompt and the cache."""

        def own(by_rows: Any, whole: Any) -> Array:
            query, key, value, place, shared = by_rows
            furthest, sink = whole
            query = grouped(query, key.shape[1])
            span = Span(place + 1 - self.window, place + 1)
            parts = [over_blocks(query, (key, value), span, furthest[0], scale=scale)]
            if shared is not None:
                prompts, length, seat, slot = shared
                after = (length + place + 1)[slot, 0] - self.window
                span = Span(after, length[slot, 0])
                seated = seats_of(query, slot)
                part = over_blocks(seated, prompts, span, furthest[1], scale=scale)
                parts.append(Part(*(slots_of(x, seat[:, 0]) for x in part)))
            return together(parts, sink, value.dtype)

        shared = None
        if self.shared is not None:
            of_slots = self.shared.length[:, None], self.shared.seat[:, None]
            shared = (self.prompts, *of_slots, self.shared.slot)
        by_rows = query, key, value, self.place[:, None], shared
        return self.by_devices(own)(by_rows, (self.furthest, sink))


def grouped(query: Float[Array, "row head query size"], kv_heads: int) -> Array:
    """Queries by the key head that they meet."""
    rows, _, queries, size = query.shape
    return query.reshape(rows, kv_heads, -1, queries, size)


def seats_of(query: Float[Array, "slot kv_head alike 1 size"], slot: Array) -> Array:
    """Queries of slots -> those of a row's seats: a prompt meets all its samples in one matmul."""
    return query[slot, :, :, 0].transpose(0, 2, 3, 1, 4)


def slots_of(x: Float[Array, "row kv_head alike seat size"], seat: Array) -> Array:
    """What was found for seats -> that of slots."""
    x = x.transpose(0, 3, 1, 2, 4)
    return x.reshape(-1, *x.shape[2:])[seat][:, :, :, None]


def over_blocks(
    query: Float[Array, "row kv_head alike query size"],
    cache: tuple[Array, Array],
    span: Span,
    furthest: Int[Array, ""],
    *,
    scale: float,
    row: Int[Array, " row"] | None = None,
) -> Part:
    """Go through keys and values of the cache's rows, or of the ``row`` of each, in blocks."""
    (rows, kv_heads, alike, queries, size), places = query.shape, cache[0].shape[2]
    flat, width = query.reshape(rows, kv_heads, -1, size), min(BLOCK, places)

    def piece(x: Array, start: Array) -> Array:
        if row is None:
            return jax.lax.dynamic_slice_in_dim(x, start, width, axis=2)
        shape = (1, kv_heads, width, x.shape[-1])
        return jax.vmap(lambda r: jax.lax.dynamic_slice(x, (r, 0, start, 0), shape)[0])(row)

    def go(i: Array, carry: Part) -> Part:
        peak, total, found = carry
        start = jnp.minimum(i * width, places - width)  # the last block reaches back
        keys, values = (piece(x, start) for x in cache)
        place = start + jnp.arange(width)
        seen = (place >= span.low[..., None]) & (place < span.high[..., None])
        seen &= place >= i * width
        scores = scale * _wide("rkqx,rkbx->rkqb", flat, keys)
        scores = scores.reshape(rows, kv_heads, alike, queries, width)
        scores = jnp.where(seen[:, None, None], scores, LOWEST)
        higher = jnp.maximum(peak, scores.max(-1, keepdims=True))
        weight, kept = jnp.exp(scores - higher), jnp.exp(peak - higher)
        heavy = weight.astype(values.dtype).reshape(rows, kv_heads, -1, width)
        added = _wide("rkqb,rkbx->rkqx", heavy, values).reshape(found.shape)
        total = kept * total + weight.sum(-1, keepdims=True)
        return Part(higher, total, kept * found + added)

    shape = query.shape[:4]
    lowest = jnp.full((*shape, 1), LOWEST)
    nothing = Part(lowest, jnp.zeros((*shape, 1)), jnp.zeros((*shape, cache[1].shape[-1])))
    if width == places:
        return go(jnp.int32(0), nothing)
    return jax.lax.fori_loop(0, furthest // width + 1, go, nothing)


def together(parts: Sequence[Part], sink: Float[Array, " head"] | None, dtype: Any) -> Array:
    """The softmax over all parts and the sink, [row head query value_size]."""
    rows, kv_heads, alike, queries, _ = parts[0].peak.shape
    peaks = [part.peak for part in parts]
    if sink is not None:
        lone = sink.astype(jnp.float32).reshape(kv_heads, alike, 1, 1)
        peaks.append(jnp.broadcast_to(lone, peaks[0].shape))
    peak = functools.reduce(jnp.maximum, peaks)
    kept = [jnp.exp(one - peak) for one in peaks]
    weighed = [(k * p.total, k * p.found) for k, p in zip(kept, parts, strict=False)]
    total, found = functools.reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), weighed)
    total = total if sink is None else total + kept[-1]
    return (found / total).reshape(rows, kv_heads * alike, queries, -1).astype(dtype)


def _wide(form: str, x: Array, y: Array) -> Array:
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32)
