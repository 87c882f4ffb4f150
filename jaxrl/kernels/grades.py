"""Rewards reshaped by what is known of a rollout besides its verdict."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from jaxrl.kernels.precision import widen


def overlong_penalty(
    length: Num[Array, " rollout"],
    *,
    limit: int,
    buffer: int,
    penalty: float,
) -> Float[Array, " rollout"]:
    """Added to the reward, <= 0: 0 up to limit - buffer tokens, then linear, -penalty from limit
    on.

    length, limit and buffer in tokens of the response, 0 < buffer <= limit; penalty >= 0 in units
    of reward. Source: DAPO, arXiv 2503.14476, soft overlong punishment.
    """
    excess = (widen(length) - (limit - buffer)) / buffer
    return -penalty * jnp.clip(excess, 0, 1)
