"""One token for each slot: the draw, its log-prob, and its key.

    logp = log_softmax(logits / T)[token]     in float32, over the whole vocabulary, never above 0
    key  = fold_in(fold_in(fold_in(run key, group), sample), index of the new token)
           (calls after a conversation's first one fold in 2**31 + their number before the index)

The draw inverts the cumulative distribution with one uniform number a token, where Gumbel noise
takes one a vocabulary entry.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

FIRST_CALL = 2**31  # added to a call's number in its key: no index of a token is as large
VOCAB_BLOCK = 128  # entries of the inner of the two cumulative sums of a draw


def first(mask: Bool[Array, "row entry"], otherwise: Int[Array, " row"]) -> Int[Array, " row"]:
    """Index of the first true entry of each row, ``otherwise`` where there is none."""
    return jnp.where(mask.any(-1), jnp.argmax(mask, -1), otherwise)


def _blocks(x: Float[Array, "row entry"], fill: float) -> Float[Array, "row block entry"]:
    """A row in blocks, so that what is done along it is short."""
    rows, entries = x.shape
    block = min(entries, VOCAB_BLOCK)
    padded = jnp.pad(x, ((0, 0), (0, -entries % block)), constant_values=fill)
    return padded.reshape(rows, -1, block)


def largest(x: Float[Array, "row entry"]) -> tuple[Int[Array, " row"], Float[Array, " row"]]:
    """The index of each row's first largest entry, and that entry.

    Maxima of blocks first, then inside the block found: XLA's argmax on CPU compares one entry
    after the other, with its index, and takes forty times as long as a maximum.
    """
    blocks = _blocks(x, -jnp.inf)
    tops = blocks.max(-1)
    top = tops.max(-1, keepdims=True)
    zero = jnp.zeros(x.shape[0], jnp.int32)
    block = first(tops == top, zero)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    within = first(inner == top, zero)
    return (block * blocks.shape[-1] + within).astype(jnp.int32), top[:, 0]


def invert(mass: Float[Array, "row vocab"], uniform: Float[Array, " row"]) -> Int[Array, " row"]:
    """The entry whose stretch of the cumulative mass holds ``uniform * total``; never one of zero
    mass.

    In two steps, over blocks and inside the block found, so that the long cumulative sum is short.
    Parallel sums are not monotone in the last bit: entries of zero mass are refused by name, and a
    target that rounding leaves past the end goes to the largest entry.
    """
    mass = _blocks(mass, 0)
    total = mass.sum(-1)
    upto = jnp.cumsum(total, -1)
    target = uniform * upto[:, -1]
    chosen = first((upto > target[:, None]) & (total > 0), jnp.argmax(total, -1))
    take = functools.partial(jnp.take_along_axis, indices=chosen[:, None], axis=1)
    rest = target - (take(upto) - take(total))[:, 0]
    inner = jnp.take_along_axis(mass, chosen[:, None, None], axis=1)[:, 0]
    within = first((jnp.cumsum(inner, -1) > rest[:, None]) & (inner > 0), jnp.argmax(inner, -1))
    return (chosen * mass.shape[-1] + within).astype(jnp.int32)


def draw(
    logits: Float[Array, "slot vocab"],
    key: UInt32[Array, "slot 2"],
    index: Int[Array, " slot"],
    temperature: Float[Array, " slot"],
) -> tuple[Int[Array, " slot"], Float[Array, " slot"]]:
    """One token for each slot and its log-prob. Temperature 0 is greedy, its log-prob that of
    temperature 1.
    """
    greedy = temperature == 0
    logits = logits / jnp.where(greedy, 1, temperature)[:, None]
    best, top = largest(logits)
    mass = jnp.exp(logits - top[:, None])
    uniform = jax.vmap(
        lambda data, i: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(data), i))
    )(key, index)
    token = jnp.where(greedy, best, invert(mass, uniform))
    taken = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - top
    return token, jnp.minimum(taken - jnp.log(mass.sum(-1)), 0)


def sample_keys(seed: int, group: Array, sample: Array, call: Array) -> UInt32[Array, "slot 2"]:
    """fold_in(fold_in(run key, group), sample) of each entry, as key data, with later calls of a
    conversation folded in."""
    run = jax.random.key(seed)

    def key(g: Array, s: Array, c: Array) -> UInt32[Array, "2"]:
        one = jax.random.fold_in(jax.random.fold_in(run, g), s)
        later = jax.random.key_data(jax.random.fold_in(one, jnp.uint32(FIRST_CALL) + c))
        return jnp.where(c > 0, later, jax.random.key_data(one))

    return jax.vmap(key)(group, sample, call)
