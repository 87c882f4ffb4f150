"""From tokens to rollouts and back.

``rollout[row]`` is an index into the rollout axis: whoever slices a batch must count it from the
slice's start.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl.kernels.precision import widen


def rollout_sum(
    x: Num[Array, "row token"] | Bool[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    rollouts: int,
) -> Float[Array, " rollout"]:
    """Sum of x over the counted tokens of each rollout; 0 for a rollout without any. ``rollouts``:
    axis size.
    """
    row = jnp.where(mask, widen(x), 0).sum(-1)
    return jax.ops.segment_sum(row, rollout, num_segments=rollouts)


def over_tokens(
    x: Num[Array, " rollout"] | Bool[Array, " rollout"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """x of the rollout at each of its counted tokens, 0 elsewhere."""
    return jnp.where(mask, widen(x)[rollout][:, None], 0)


def over_last_token(
    x: Num[Array, " rollout"] | Bool[Array, " rollout"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """x of the rollout at the last counted token of each of its rows, 0 elsewhere."""
    place = jnp.arange(mask.shape[-1])
    last = jnp.where(mask, place, -1).max(-1, keepdims=True)  # running counts take five times this
    return jnp.where(place == last, widen(x)[rollout][:, None], 0)


def step_over_tokens(
    x: Num[Array, "rollout step"] | Bool[Array, "rollout step"],
    step: Int[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """x of the rollout's step that a counted token belongs to; 0 elsewhere, and at steps that x has
    no entry for (-1: outside of steps).
    """
    steps = x.shape[-1]
    known = mask & (0 <= step) & (step < steps)
    each = jnp.take_along_axis(widen(x)[rollout], jnp.clip(step, 0, steps - 1), axis=-1)
    return jnp.where(known, each, 0)


def step_gain(
    named: Num[Array, "rollout round step"],
) -> Float[Array, "rollout step"]:
    """g(s) = W(s) / max_s W(s), W(s) = sum_d exp(d) named[d, s]; in [0, 1], 0 where no step is
    named.

    ``named`` counts the matches of round d (0 the first) that the rollout won and in which the
    judge named its step s as pivotal, >= 0. Source: ArenaFlow, arXiv 2609.21378, step attribution
    (exponential in the depth, the largest is 1); the sum over matches is ours.
    """
    named = jnp.maximum(widen(named), 0)
    rounds = named.shape[-2]
    worth = (jnp.exp(jnp.arange(rounds, dtype=named.dtype) - rounds)[:, None] * named).sum(-2)
    top = worth.max(-1, keepdims=True)
    return jnp.where(top > 0, worth / jnp.where(top > 0, top, 1), 0)


def amplified(
    advantage: Float[Array, "row token"],
    gain: Float[Array, "row token"],
    *,
    weight: float,
) -> Float[Array, "row token"]:
    """A (1 + weight g) where A > 0, A elsewhere, bit for bit: no sign turns, no blame grows.

    With g in [0, 1] and weight >= 0 the factor is in [1, 1 + weight]. A group's sum over tokens is
    no longer 0 but >= 0: a bounded push towards winners. Source: ArenaFlow, arXiv 2609.21378, with
    weight 1.
    """
    advantage = widen(advantage)
    return jnp.where(advantage > 0, advantage * (1 + weight * widen(gain)), advantage)
