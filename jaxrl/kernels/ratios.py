"""Probability of the taken tokens under one policy over that under another.

Log-ratios are clamped to +-20 before the exponential, so that every ratio lies in [2e-9, 4.9e8] and
neither it nor its gradient overflows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.precision import widen

BOUND = 20.0  # nats


def token_ratio(
    logp: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
) -> Float[Array, "row token"]:
    """exp(logp - old_logp) for each token. Source: PPO, arXiv 1707.06347, the probability ratio."""
    return jnp.exp(jnp.clip(widen(logp) - widen(old_logp), -BOUND, BOUND))


def rollout_ratio(
    logp: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """s_i = exp(mean over the rollout's counted tokens of logp - old_logp), at each of them; 1
    elsewhere.

    Gradient: that of the token's own logp times s_i (the s_{i,t} form), so that a rollout shares
    one value and one clip decision. ``rollout`` is a label. Source: GSPO, arXiv 2507.18071,
    sequence-level ratio and its token variant.
    """
    logp = jnp.where(mask, widen(logp), 0)
    gap = jax.lax.stop_gradient(logp - jnp.where(mask, widen(old_logp), 0))
    counted = mask.any(-1)
    tokens = group_sum(mask.sum(-1), rollout, counted)
    mean = group_sum(gap.sum(-1), rollout, counted) / jnp.maximum(tokens, 1)
    ratio = jnp.exp(jnp.clip(mean, -BOUND, BOUND))[:, None]
    return jnp.where(mask, ratio * jnp.exp(logp - jax.lax.stop_gradient(logp)), 1)


def truncated_ratio(
    logp: Float[Array, "row token"],
    sampler_logp: Float[Array, "row token"],
    *,
    cap: float,
) -> Float[Array, "row token"]:
    """min(exp(logp - sampler_logp), cap), detached: a weight on the policy term (TIS). cap > 0, inf
    means no cap.
    """
    return jax.lax.stop_gradient(jnp.minimum(token_ratio(logp, sampler_logp), cap))


def band_ratio(
    logp: Float[Array, "row token"],
    sampler_logp: Float[Array, "row token"],
    *,
    low: float,
    high: float,
) -> Float[Array, "row token"]:
    """exp(logp - sampler_logp) inside [low, high], else 0, detached (IcePop, MIS).

    A token that is dropped leaves the numerator only: weights are counted over all tokens.
    """
    ratio = token_ratio(logp, sampler_logp)
    return jax.lax.stop_gradient(jnp.where((low <= ratio) & (ratio <= high), ratio, 0))
