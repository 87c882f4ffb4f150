"""Probability of the taken tokens under one policy over that under another.

Log-ratios are clamped to +-20 before the exponential, so that every ratio lies in [2e-9, 4.9e8] and
neither it nor its gradient overflows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.precision import widen
from jaxrl.kernels.weights import row_tokens

BOUND = 20.0  # nats


def token_ratio(
    logp: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
) -> Float[Array, "row token"]:
    """exp(logp - old_logp) for each token. Source: PPO, arXiv 1707.06347, the probability ratio."""
    return jnp.exp(bounded(widen(logp) - widen(old_logp)))


def bounded(gap: Float[Array, "..."]) -> Float[Array, "..."]:
    """A log-ratio held within +-20; slope 1 inside, 0 from the bounds on (that of jnp.clip halves
    at a bound, for two divisions a token)."""
    gap = widen(gap)
    bound = jnp.asarray(BOUND, gap.dtype)
    return jax.lax.clamp(-bound, gap, bound)


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
    total, tokens = _gap(jax.lax.stop_gradient(logp), old_logp, rollout, mask)
    ratio = jnp.exp(jnp.clip(total / jnp.maximum(tokens, 1), -BOUND, BOUND))[:, None]
    return jnp.where(mask, _exponential(ratio, widen(logp)), 1)


@jax.custom_jvp
def _exponential(
    ratio: Float[Array, "row 1"], logp: Float[Array, "row token"]
) -> Float[Array, "row token"]:
    """ratio exp(logp - sg(logp)), the ratio a constant: its value at each token, its slope by logp.

    Written out, so that the value is known not to depend on logp: no pass over the log-probs, and
    no exponential a token.
    """
    return jnp.broadcast_to(ratio, logp.shape)


@_exponential.defjvp
def _exponential_slope(primals, tangents):
    ratio, logp = primals
    return _exponential(ratio, logp), ratio * tangents[1]


def _gap(
    logp: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> tuple[Float[Array, " row"], Float[Array, " row"]]:
    """Sum of logp - old_logp over the counted tokens of the row's rollout, and their number."""
    gap = jnp.where(mask, widen(logp) - widen(old_logp), 0)
    rows = jnp.ones_like(rollout, bool)  # one without a counted token adds 0 to both
    return group_sum(gap.sum(-1), rollout, rows), group_sum(row_tokens(mask), rollout, rows)


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


def truncated_rollout_ratio(
    logp: Float[Array, "row token"],
    sampler_logp: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    cap: float,
) -> Float[Array, "row token"]:
    """min(exp(sum over the rollout's counted tokens of logp - sampler_logp), cap) at each of them,
    detached; 1 elsewhere.

    A product over tokens, not their geometric mean (both are called sequence TIS): unbiased with
    cap = inf, and of a variance that grows with the length. ``rollout`` is a label.
    """
    total, _ = _gap(logp, sampler_logp, rollout, mask)
    ratio = jnp.minimum(jnp.exp(jnp.clip(total, -BOUND, BOUND)), cap)[:, None]
    return jax.lax.stop_gradient(jnp.where(mask, ratio, 1))


def rollout_band(
    logp: Float[Array, "row token"],
    sampler_logp: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    low: float,
    high: float,
) -> Float[Array, "row token"]:
    """1 if exp(mean over the rollout's counted tokens of logp - sampler_logp) is in [low, high],
    else 0, at each of them; 1 elsewhere. Detached: keeps or drops whole rollouts (geometric
    rejection).
    """
    total, tokens = _gap(logp, sampler_logp, rollout, mask)
    ratio = jnp.exp(jnp.clip(total / jnp.maximum(tokens, 1), -BOUND, BOUND))
    kept = ((low <= ratio) & (ratio <= high))[:, None]
    return jax.lax.stop_gradient(jnp.where(mask, kept.astype(ratio.dtype), 1))


def rollout_mask(
    logp: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    limit: float,
) -> Float[Array, "row token"]:
    """0 at tokens with A < 0 of a rollout whose mean over counted tokens of old_logp - logp is
    above ``limit`` (nats a token, > 0), else 1; detached.

    A bad rollout that the policy has already left behind pushes no further. Source: DeepSeek-V3.2,
    arXiv 2512.02556, off-policy sequence masking; here the advantage is the token's own.
    """
    total, tokens = _gap(logp, old_logp, rollout, mask)
    left = (-total > limit * jnp.maximum(tokens, 1))[:, None]
    dropped = left & mask & (widen(advantage) < 0)
    return jax.lax.stop_gradient(1 - dropped.astype(total.dtype))
