"""Distance between two policies, from taken tokens or over the whole vocabulary. Nats.

An estimator of a value is not an estimator of its gradient. With tokens drawn from the policy p
itself and x = log q - log p:

    as a value   k1 = -x and k3 = exp(x) - 1 - x are unbiased for KL(p, q), k2 = x^2 / 2 is biased
    as a loss    k1 has expected gradient 0, k2 that of KL(p, q), k3 that of KL(q, p)

To pull p towards q by KL(p, q) use ``reverse_kl_loss``; k1, k2 and k3 are for curves. Estimators:
J. Schulman, "Approximating KL divergence", 2020.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.kernels.precision import widen
from jaxrl.kernels.ratios import BOUND, token_ratio


def k1(
    logp: Float[Array, "row token"], ref_logp: Float[Array, "row token"]
) -> Float[Array, "row token"]:
    """logp - ref_logp: unbiased value, may be negative. As a loss it has no expected gradient."""
    return widen(logp) - widen(ref_logp)


def k2(
    logp: Float[Array, "row token"], ref_logp: Float[Array, "row token"]
) -> Float[Array, "row token"]:
    """(logp - ref_logp)^2 / 2: biased value. As a loss on-policy its gradient is KL(p, ref)'s."""
    return (widen(logp) - widen(ref_logp)) ** 2 / 2


def k3(
    logp: Float[Array, "row token"], ref_logp: Float[Array, "row token"]
) -> Float[Array, "row token"]:
    """exp(x) - 1 - x with x = ref_logp - logp clamped to +-20: unbiased value, >= 0.

    As a loss on-policy it has the gradient of the forward KL(ref, p).
    """
    gap = jnp.clip(widen(ref_logp) - widen(logp), -BOUND, BOUND)
    return jnp.expm1(gap) - gap


def reverse_kl_loss(
    logp: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
    ref_logp: Float[Array, "row token"],
) -> Float[Array, "row token"]:
    """Value r k3, gradient r (logp - ref_logp) with respect to logp, r = exp(logp - old_logp).

    Tokens drawn from the old policy: both are unbiased, value for KL(p, ref) and gradient for its
    gradient (it is also the derivative of r k3 with r differentiated). Written out so that clamped
    log-ratios (+-20) bound the gradient by 20 r.
    """
    ratio = jax.lax.stop_gradient(token_ratio(logp, old_logp))
    slope = jax.lax.stop_gradient(jnp.clip(k1(logp, ref_logp), -BOUND, BOUND))
    value = jax.lax.stop_gradient(k3(logp, ref_logp))
    return ratio * (value + slope * (widen(logp) - jax.lax.stop_gradient(widen(logp))))


def reverse_kl(
    logits: Float[Array, "position vocab"],
    ref_logits: Float[Array, "position vocab"],
) -> Float[Array, " position"]:
    """KL(p, ref) = sum_v p_v (log p_v - log ref_v), exact, p = softmax(logits), ref =
    softmax(ref_logits).
    """
    logp = jax.nn.log_softmax(widen(logits), axis=-1)
    ref_logp = jax.nn.log_softmax(widen(ref_logits), axis=-1)
    possible = logp > -jnp.inf
    gap = jnp.where(possible, logp, 0) - jnp.where(possible, ref_logp, 0)
    return jnp.where(possible, jnp.exp(logp) * gap, 0).sum(-1)


def forward_kl(
    logits: Float[Array, "position vocab"],
    ref_logits: Float[Array, "position vocab"],
) -> Float[Array, " position"]:
    """KL(ref, p) = sum_v ref_v (log ref_v - log p_v), exact, p = softmax(logits), ref =
    softmax(ref_logits).
    """
    return reverse_kl(ref_logits, logits)
