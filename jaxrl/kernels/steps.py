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
    last = mask & (jnp.cumsum(mask, axis=-1) == mask.sum(-1, keepdims=True))
    return jnp.where(last, widen(x)[rollout][:, None], 0)
