"""Losses for each token whose gradient moves the policy along the advantage. To be minimised.

No sum over tokens here, see kernels/weights.py. Advantages are constants: no gradient flows into
them.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.kernels.precision import widen

Diagnostics = dict[str, Array]


def policy_gradient(
    logp: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """-A logp: gradient -A for each nat (REINFORCE)."""
    return -jax.lax.stop_gradient(widen(advantage)) * widen(logp), {}


def clipped_surrogate(
    ratio: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), with r from kernels/ratios.py.

    Exactly on a boundary the unclipped branch is taken, with its whole gradient (as torch does;
    jnp.clip would halve it), so clip_low = clip_high = 0 on-policy has gradient -A. ``clipped``: 1
    where the clipped branch was chosen. Source: PPO, arXiv 1707.06347, and the decoupled clip of
    DAPO, arXiv 2503.14476.
    """
    ratio, advantage = widen(ratio), jax.lax.stop_gradient(widen(advantage))
    plain = -advantage * ratio
    bounded = -advantage * jnp.clip(jax.lax.stop_gradient(ratio), 1 - clip_low, 1 + clip_high)
    clipped = bounded > plain
    token_loss = jnp.where(clipped, bounded, plain)
    return token_loss, {
        "ratio": jax.lax.stop_gradient(ratio),
        "clipped": clipped.astype(ratio.dtype),
    }


def dual_clip(
    token_loss: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    *,
    cap: float,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """min(loss, -cap A) where A < 0, the loss elsewhere: cap > 1 bounds the ratio of a bad token,
    inf does not.

    ``dual_clipped``: 1 where the bound was chosen; there the gradient is 0. Source: dual-clip PPO,
    arXiv 1912.09729.
    """
    token_loss, advantage = widen(token_loss), jax.lax.stop_gradient(widen(advantage))
    if cap == math.inf:
        return token_loss, {"dual_clipped": jnp.zeros_like(token_loss)}
    bound = jnp.where(advantage < 0, -cap * advantage, jnp.inf)
    capped = bound < token_loss
    return jnp.where(capped, bound, token_loss), {"dual_clipped": capped.astype(token_loss.dtype)}


def detached_ratio(
    logp: Float[Array, "row token"],
    ratio: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    *,
    low: float,
    high: float,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """-sg(clip(r, low, high)) A logp: gradient -clip(r, low, high) A by logp, never cut off.

    The bounds are absolute, 0 <= low <= 1 <= high, low 0 for a cap alone: on-policy the weight is
    1. ``clipped``: 1 where a bound holds. Source: CISPO, arXiv 2506.13585, equation 4. Public
    code also has bounds 1 -+ epsilon, and bounds that are not above 1.
    """
    ratio = jax.lax.stop_gradient(widen(ratio))
    held = jnp.clip(ratio, low, high)
    token_loss = -held * jax.lax.stop_gradient(widen(advantage)) * widen(logp)
    return token_loss, {"ratio": ratio, "clipped": (held != ratio).astype(ratio.dtype)}


def signed_band(
    logp: Float[Array, "row token"],
    ratio: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    *,
    positive_low: float,
    positive_high: float,
    negative_low: float,
    negative_high: float,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """-sg(r) A logp where r lies in the band of A's sign, else 0; gradient -r A by logp, or 0.

    A token outside of its band is dropped, not clamped, and stays in the denominators (weights are
    counted over all tokens). Each bound is its own: those for A >= 0 never touch a token with A <
    0. ``ratio`` is detached here, current policy over sampler. ``dropped``: 1 outside of the band.
    Source: MiMo-V2.6, equation 1, whose bounds move with the entropy by a rule that is not
    published.
    """
    ratio, advantage = jax.lax.stop_gradient((widen(ratio), widen(advantage)))
    low = jnp.where(advantage < 0, negative_low, positive_low)
    high = jnp.where(advantage < 0, negative_high, positive_high)
    kept = (low <= ratio) & (ratio <= high)
    token_loss = -jnp.where(kept, ratio, 0) * advantage * widen(logp)
    return token_loss, {"ratio": ratio, "dropped": (~kept).astype(ratio.dtype)}
