"""Rows in which the rollouts of a group share their prompt: what their tokens see, how they attend,
and the way from the plain rows there and back (``batch.Packed`` says how such a row is laid out).

    scores of a bin's token = q K_prefix^T beside q K_bin^T, one softmax over both

No bin is scored against another, so no ``[place place]`` array is formed: a group of n rollouts
with a prompt of P tokens and answers of R holds P P + n R (P + R) scores, not n (P + R)^2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.batch import Batch, Packed
from jaxrl.model.layers import Routing, attend

LOWEST = float(jnp.finfo(jnp.float32).min)  # a score that is not seen


@dataclasses.dataclass(frozen=True)
class Bins:
    """How a packed row is cut: ``prefix`` places, then ``count`` bins of equal size."""

    prefix: int
    count: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedMask:
    """What the tokens of packed rows see. ``shared`` has 1 for ``bin`` and for ``token`` where it
    is the same for all of them."""

    prefix: Bool[Array, "group token source"]  # of the prefix, by itself
    shared: Bool[Array, "group bin token source"]  # of the prefix, by the bins' tokens
    own: Bool[Array, "group bin token source"]  # of a bin, by its own tokens

    def attend(
        self,
        query: Float[Array, "group head place size"],
        key: Float[Array, "group kv_head place size"],
        value: Float[Array, "group kv_head place value_size"],
        *,
        scale: float,
        sink: Float[Array, " head"] | None,
    ) -> Float[Array, "group head place value_size"]:
        """``layers.attend`` under the mask over all places that this one stands for."""
        found = self._bins(query, key, value, scale=scale, sink=sink)
        first = self.prefix.shape[-1]
        if not first:
            return found
        query, key, value = query[:, :, :first], key[:, :, :first], value[:, :, :first]
        before = attend(query, key, value, self.prefix, scale=scale, sink=sink, causal=True)
        return jnp.concatenate([before, found], axis=2)

    def _bins(
        self, query: Array, key: Array, value: Array, *, scale: float, sink: Array | None
    ) -> Array:
        """[group head place value_size] of the bins' places.

        Queries go by bin, then head: so the prefix meets all of them in one matmul a key head, a
        bin its own in one, and both give their scores in one order.
        """
        (groups, heads), kv_heads = query.shape[:2], key.shape[1]
        first, bins, places = self.prefix.shape[-1], *self.own.shape[1:3]
        alike = heads // kv_heads

        def cut(x: Array, count: int) -> Array:
            x = x[:, :, first:].reshape(groups, kv_heads, count, bins, places, x.shape[-1])
            return x.swapaxes(2, 3).reshape(groups, kv_heads, bins, count * places, x.shape[-1])

        def together(x: Array) -> Array:
            return x.reshape(groups, kv_heads, bins * alike * places, x.shape[-1])

        def apart(x: Array) -> Array:
            return x.reshape(groups, kv_heads, bins, alike, places, x.shape[-1])

        def product(form: str, x: Array, y: Array) -> Array:
            return apart(jnp.einsum(form, x, y, preferred_element_type=jnp.float32))

        queries = cut(query, alike)
        shared = product("gktx,gkux->gktu", together(queries), key[:, :, :first])
        own = product("gkbtx,gkbux->gkbtu", queries, cut(key, 1))
        shared = jnp.where(self.shared[:, None, :, None], scale * shared, LOWEST)
        own = jnp.where(self.own[:, None, :, None], scale * own, LOWEST)
        lone = None if sink is None else sink.reshape(1, kv_heads, 1, alike, 1, 1)
        (shared, own), total = weights(shared, own, lone)
        shared, own = together(shared.astype(value.dtype)), own.astype(value.dtype)
        own = own.reshape(groups, kv_heads, bins, alike * places, places)
        found = product("gktu,gkux->gktx", shared, value[:, :, :first])
        found = (found + product("gkbtu,gkbux->gkbtx", own, cut(value, 1))) / total
        return found.swapaxes(2, 3).reshape(groups, heads, bins * places, -1).astype(value.dtype)


def weights(
    shared: Float[Array, "... source"], own: Float[Array, "... other"], lone: Array | None
) -> tuple[tuple[Array, Array], Float[Array, "... 1"]]:
    """``exp(scores - peak)`` of both parts and their sum, that of a ``lone`` score included: what
    is divided by the sum are the values, which are fewer than the scores."""
    peak = jnp.maximum(
        shared.max(-1, keepdims=True, initial=LOWEST), own.max(-1, keepdims=True, initial=LOWEST)
    )
    if lone is not None:
        lone = lone.astype(jnp.float32)
        peak = jnp.maximum(peak, lone)
    peak = jax.lax.stop_gradient(peak)
    shared, own = jnp.exp(shared - peak), jnp.exp(own - peak)
    total = shared.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
    return (shared, own), total if lone is None else total + jnp.exp(lone - peak)


def visible(segment: Int[Array, "row token"]) -> Bool[Array, "row token source"]:
    """Causal and block-diagonal: same segment, not later in the row.

    Padding (segment 0) sees padding only, and nothing sees it.
    """
    tokens = segment.shape[1]
    causal = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)[None, :]
    return causal[None] & (segment[:, :, None] == segment[:, None, :])


def shared_masks(
    position: Int[Array, "group place"],
    segment: Int[Array, "group place"],
    bins: Bins,
    *,
    window: int,
) -> tuple[SharedMask, SharedMask]:
    """What the tokens of global and of local layers see; a local layer's see those less than
    ``window`` positions before them. A place of padding in a bin may see the prefix."""
    groups, first = segment.shape[0], bins.prefix

    def parts(x: Array) -> tuple[Array, Array]:
        return x[:, :first], x[:, first:].reshape(groups, bins.count, -1)

    (before, after), (told, rests) = parts(position), parts(segment)

    def near(token: Array, source: Array) -> Array:
        return token[..., :, None] - source[..., None, :] < window

    own = visible(rests.reshape(groups * bins.count, -1))
    own = own.reshape(groups, bins.count, *own.shape[1:])
    everywhere = SharedMask(visible(told), (told > 0)[:, None, None, :], own)
    return everywhere, SharedMask(
        everywhere.prefix & near(before, before),
        everywhere.shared & near(after, before[:, None]),
        everywhere.own & near(after, after),
    )


@dataclasses.dataclass(frozen=True)
class PlainRows:
    """A batch as it is: every rollout a row of the trunk, every token of it a target."""

    batch: Batch

    @property
    def bins(self) -> Bins | None:
        """None: tokens see their own segment."""
        return None

    @property
    def shown(self) -> Batch | Packed:
        """Whose tokens, positions and segments the trunk goes through."""
        return self.batch

    @property
    def scored(self) -> Bool[Array, "row token"]:
        """Targets that an earlier token of the same segment predicts."""
        segment = self.batch.segment
        before = jnp.pad(segment, ((0, 0), (1, 0)))[:, :-1]
        return (segment != 0) & (segment == before)

    def before(self, states: Float[Array, "row token embed"]) -> Array:
        """The state just before each target."""
        return jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]

    def targets(self, x: Array) -> Array:
        """[row token ...] -> that of the targets."""
        return x

    def inputs(self, x: Array) -> Array:
        """[row token ...] -> that of the trunk's tokens, -1 on its padding."""
        return x

    def back(self, x: Array) -> Array:
        """What was found at the targets -> [row token ...], 0 where nothing is found."""
        return x

    def told(self, routing: Routing) -> Routing:
        """What the trunk's routers did -> the same by row and token."""
        return routing


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """``PlainRows`` of a packed batch: the targets are the bins' tokens. All that is fetched comes
    from the same group, so that nothing moves between devices that hold whole groups."""

    batch: Batch
    packed: Packed

    @property
    def bins(self) -> Bins | None:
        """How a row is cut."""
        return Bins(self.packed.prefix, self.packed.bins)

    @property
    def shown(self) -> Batch | Packed:
        """Whose tokens, positions and segments the trunk goes through."""
        return self.packed

    @property
    def _rests(self) -> Int[Array, "group bin token"]:
        groups, first = self.packed.tokens.shape[0], self.packed.prefix
        return self.packed.segment[:, first:].reshape(groups, self.packed.bins, -1)

    @property
    def _first(self) -> Bool[Array, "group bin token"]:
        """Where a segment begins, which goes on from the prefix."""
        segment = self._rests
        return segment != jnp.pad(segment, ((0, 0), (0, 0), (1, 0)))[:, :, :-1]

    @property
    def scored(self) -> Bool[Array, "group target"]:
        """Targets that a token of their segment or of the prefix predicts."""
        last = self.packed.segment[:, : self.packed.prefix][:, -1:] > 0  # it ends at its last place
        begun = last[:, :, None] if self.packed.prefix else False
        scored = (self._rests > 0) & (~self._first | begun)
        return scored.reshape(scored.shape[0], -1)

    def before(self, states: Float[Array, "group place embed"]) -> Array:
        """The state just before each target: of the token before it, or the prefix's last."""
        groups, first, width = states.shape[0], self.packed.prefix, states.shape[-1]
        after = states[:, first:].reshape(groups, self.packed.bins, -1, width)
        after = jnp.pad(after, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
        if first:
            last = states[:, first - 1, :][:, None, None]
            after = jnp.where(self._first[..., None], last, after)
        return after.reshape(groups, -1, width)

    def targets(self, x: Array) -> Array:
        """[row token ...] -> that of the targets."""
        return fetched(self._by_group(x), self.packed.source[:, self.packed.prefix :])

    def inputs(self, x: Array) -> Array:
        """[row token ...] -> that of the trunk's tokens, -1 on its padding; the prefix as in the
        first of its rollouts."""
        return selected(self.packed.segment > 0, fetched(self._by_group(x), self.packed.source), -1)

    def back(self, x: Array) -> Array:
        """What was found at the targets -> [row token ...], 0 where nothing is found."""
        return self._to_rows(x, self.packed.prefix, 0)

    def told(self, routing: Routing) -> Routing:
        """What the trunk's routers did -> the same by row and token: for a shared token at each
        rollout that shares it."""
        chosen = self._to_rows(routing.chosen, 0, -1)
        return Routing(chosen, self._to_rows(routing.balance, 0, 0))

    def _by_group(self, x: Array) -> Array:
        """[row token ...] -> [group token ...], the rows of a group one after another."""
        groups = self.packed.tokens.shape[0]
        return x.reshape(groups, -1, *x.shape[2:])

    def _to_rows(self, x: Array, first: int, nothing: int) -> Array:
        place = self._by_group(self.packed.place) - first
        found = selected(place >= 0, fetched(x, jnp.maximum(place, 0)), nothing)
        return found.reshape(*self.batch.tokens.shape, *x.shape[2:])


def fetched(x: Array, index: Int[Array, "group one"]) -> Array:
    """``x[group other ...]`` at an index of each group."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def selected(mask: Bool[Array, "group one"], x: Array, nothing: int) -> Array:
    """``x[group one ...]`` where the mask is true."""
    return jnp.where(
        mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), x, jnp.asarray(nothing, x.dtype)
    )


def rows_of(batch: Batch) -> PlainRows | PackedRows:
    """How the trunk goes through a batch."""
    return PlainRows(batch) if batch.packed is None else PackedRows(batch, batch.packed)
