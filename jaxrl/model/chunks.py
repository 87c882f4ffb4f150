"""A walk over the positions that count, a chunk at a time: the logits that are read there are made
again in the backward pass, or kept for it, and chunks in which nothing counts are skipped in both.

Positions that count are brought together first. How many there are is known to the device alone,
so shapes are those of all positions, and what is saved is work.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Piece = tuple[dict[str, Array], Array, Array]  # states by scorer, taken ids, temperatures
Look = Callable[[Piece, Any], Mapping[str, Array]]  # of a piece and of what all pieces share
Read = Callable[[Mapping[str, Array], Array], Mapping[str, Array]]  # of logits and taken ids


MOST_KEPT = 8  # pieces, each a part of the program, when logits are kept


@jax.custom_vjp
def permuted(x: Array, order: Int[Array, " position"], place: Int[Array, " position"]) -> Array:
    """``x[order]``, where ``place`` is the inverse of ``order``: the gradient is fetched as well,
    where that of any other index would be scattered."""
    del place
    return x[order]


def _permuted(x: Array, order: Array, place: Array) -> tuple[Array, Array]:
    return x[order], place


permuted.defvjp(_permuted, lambda place, given: (given[place], None, None))


def over_some(
    head: Look,
    read: Read,
    pieces: Piece,
    wide: Any,
    counts: Bool[Array, "row token"],
    limit: int,
    *,
    keep: bool,
) -> dict[str, Array]:
    """``read(head(piece, wide), taken)`` of all positions, [row token ...]; anything where nothing
    counts.

    ``head`` sees ``limit`` positions at most. Gradients are taken by the states and by ``wide``.
    With ``keep`` the backward pass has what ``head`` gave and what ``read`` keeps of it; all of it
    is alive then, so the limit is no less than an eighth of the positions.
    """
    rows, tokens = counts.shape
    size = min(max(limit, -(-counts.size // MOST_KEPT)) if keep else limit, counts.size)
    order = jnp.argsort(~counts.reshape(-1), stable=True)
    place = jnp.argsort(order)
    live = jnp.arange(0, counts.size, size) < counts.sum()

    def cut(x: Array) -> Array:
        flat = x.reshape(-1, *x.shape[2:])
        flat = (
            permuted(flat, order, place) if x.dtype in (jnp.float32, jnp.bfloat16) else flat[order]
        )
        flat = jnp.pad(
            flat, ((0, -flat.shape[0] % size),) + ((0, 0),) * (flat.ndim - 1), mode="edge"
        )
        return flat.reshape(-1, size, *flat.shape[1:])

    def join(x: Array) -> Array:
        flat = x.reshape(-1, *x.shape[2:])[: counts.size]
        return permuted(flat, place, order).reshape(rows, tokens, *flat.shape[1:])

    states, *told = jax.tree.map(cut, pieces)
    found = _walk(head, _Reader(read, keep))(states, wide, (live, *told))
    return {name: join(x) for name, x in found.items()}


class _Reader:
    """What is read of a piece's logits, and the slope of that, once the logits are there again.

    Slopes need things of the forward pass. These are kept, all but the logits themselves: a number
    or two a position, in place of passes over the vocabulary. Where they need more that is as large
    as the logits, like the slope of an entropy, it is read again. With ``keep`` all are kept.
    """

    def __init__(self, read: Read, keep: bool) -> None:
        self.read, self.keep = read, keep

    def ahead(self, logits: Any, taken: Array) -> tuple[Mapping[str, Array], list[Array]]:
        """What is read, and what is kept."""
        found, pull = jax.vjp(lambda logits: self.read(logits, taken), logits)
        needed, self.tree = jax.tree.flatten(pull)
        wide = jax.tree.leaves(logits)
        self.places = [next((i for i, x in enumerate(wide) if x is y), None) for y in needed]
        if self.keep:
            return found, needed
        rest = [x for x, place in zip(needed, self.places, strict=True) if place is None]
        self.again = any(x.size >= wide[0].size for x in rest)
        return found, [] if self.again else rest

    def back(self, logits: Any, taken: Array, kept: list[Array], given: Any) -> Any:
        """The gradient by the logits."""
        if self.keep:
            needed = kept
        elif self.again:
            return jax.vjp(lambda logits: self.read(logits, taken), logits)[1](given)[0]
        else:
            wide, rest = jax.tree.leaves(logits), iter(kept)
            needed = [next(rest) if place is None else wide[place] for place in self.places]
        return jax.tree.unflatten(self.tree, needed)(given)[0]


def _walk(head: Look, reader: _Reader) -> Callable[[Any, Any, Any], Mapping[str, Array]]:
    """(states, wide, (live, taken, temperature)) of all pieces -> what is read of each.

    Going back, a piece's part of the gradient by ``wide`` is added where it is made: the sum is as
    large as the head, and is gone through only where something counts. It lies transposed, for a
    product of few rows and many columns takes XLA on CPU a quarter less time than its transpose.
    """

    def logits_of(states: Any, wide: Any, told: Any) -> Any:
        return head((states, *told[1:]), wide)

    @jax.custom_vjp
    def walk(states: Any, wide: Any, told: Any) -> Mapping[str, Array]:
        def one(x: Any) -> Mapping[str, Array]:
            states, told = x
            return _either(told[0], lambda: reader.read(logits_of(states, wide, told), told[1]))

        return jax.lax.map(one, (states, told))

    def forward(states: Any, wide: Any, told: Any) -> tuple[Any, Any]:
        def one(x: Any) -> tuple[Any, Any]:
            states, told = x
            return _either(told[0], lambda: reader.ahead(logits_of(states, wide, told), told[1]))

        if reader.keep:
            # One by one: a loop would write what it keeps into one array, and fetch it from there.
            made = [one(x) for x in _apart((states, told))]
            found, kept = _together([x for x, _ in made]), [x for _, x in made]
        else:
            found, kept = jax.lax.map(one, (states, told))
        return found, (states, wide, told, kept)

    def backward(held: Any, given: Any) -> tuple[Any, Any, None]:
        states, wide, told, kept = held

        def one(total: Any, x: Any) -> tuple[Any, Any]:
            (states, told, given), kept = x

            def pulled(total: Any) -> tuple[Any, Any]:
                own = lambda states, wide: logits_of(states, wide, told)  # noqa: E731
                logits, pull = jax.vjp(own, states, wide)
                by_states, by_wide = pull(reader.back(logits, told[1], kept, given))
                return jax.tree.map(lambda x, own: x + own.T, total, by_wide), by_states

            def passed(total: Any) -> tuple[Any, Any]:
                return total, jax.tree.map(jnp.zeros_like, states)

            return jax.lax.cond(told[0], pulled, passed, total)

        total, over = jax.tree.map(lambda x: jnp.zeros_like(x.T), wide), (states, told, given)
        if reader.keep:
            by_states = []
            for x in zip(_apart(over), kept, strict=True):
                total, own = one(total, x)
                by_states.append(own)
            return _together(by_states), jax.tree.map(lambda x: x.T, total), None
        total, by_states = jax.lax.scan(one, total, (over, kept))
        return by_states, jax.tree.map(lambda x: x.T, total), None

    walk.defvjp(forward, backward)
    return walk


def _apart(tree: Any) -> list[Any]:
    """The entries along the first axis of arrays."""
    count = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]


def _together(trees: list[Any]) -> Any:
    """Entries as the first axis of arrays."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _either(live: Bool[Array, ""], function: Callable[[], Any]) -> Any:
    """What ``function`` gives; zeros, and no work, where ``live`` is off."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))

    return jax.lax.cond(live, function, zeros)
