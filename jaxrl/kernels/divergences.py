"""Distance between two policies, from taken tokens or over the whole vocabulary. Nats.

An estimator of a value is not an estimator of its gradient. With tokens drawn from the policy p
itself and x = log q - log p:

    as a value   k1 = -x and k3 = exp(x) - 1 - x are unbiased for KL(p, q), k2 = x^2 / 2 is biased
    as a loss    k1 has expected gradient 0, k2 that of KL(p, q), k3 that of KL(q, p)
    as a reward  -k1 descends KL(p, q); -k3 adds the ascent of KL(q, p) to it, and close to q the
                 two cancel

To pull p towards q by KL(p, q) use ``reverse_kl_loss``; k1, k2 and k3 are for curves. Estimators:
J. Schulman, "Approximating KL divergence", 2020.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.precision import widen
from jaxrl.kernels.ratios import BOUND, bounded, token_ratio
from jaxrl.kernels.readings import taken_logp

FLOOR = math.log(1e-10)  # nats


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
    return excess(bounded(widen(ref_logp) - widen(logp)))


@jax.custom_jvp
def excess(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(x) - 1 - x >= 0, with slope exp(x) - 1 as x + excess(x).

    A series where |x| < 1 / 2: there the difference loses all its digits as x goes to 0, and expm1
    costs three times as much. float64 has expm1, its rounding is below what anyone reads.
    """
    if x.dtype == jnp.float64:
        return jnp.expm1(x) - x
    near = jnp.abs(x) < 0.5
    small = jnp.where(near, x, 0)
    series = jnp.zeros_like(x)
    for n in range(9, 1, -1):  # the first term left out is below 4e-8 of the sum
        series = series * small + 1 / math.factorial(n)
    return jnp.where(near, small * small * series, jnp.exp(x) - 1 - x)


@excess.defjvp
def _excess_slope(primals, tangents):
    value = excess(*primals)
    return value, (primals[0] + value) * tangents[0]


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


def floored_logp(
    logits: Float[Array, "position vocab"], taken: Int[Array, " position"]
) -> Float[Array, " position"]:
    """max(log softmax(logits)[taken], log 1e-10): what a teacher says of a token that it may rule
    out.
    """
    return jnp.maximum(taken_logp(logits, taken), FLOOR)


def floored_logits(logits: Float[Array, "position vocab"]) -> Float[Array, "position vocab"]:
    """max(x, logsumexp(x) + log 1e-10): no token is less likely than 1e-10, nor a log-prob -inf.

    Untouched, bit for bit, where no token is; elsewhere the softmax gives away at most 1e-10 for
    each token of the vocabulary.
    """
    logits = widen(logits)
    return jnp.maximum(logits, jax.nn.logsumexp(logits, axis=-1, keepdims=True) + FLOOR)


def reverse_kl(
    logits: Float[Array, "position vocab"],
    ref_logits: Float[Array, "position vocab"],
) -> Float[Array, " position"]:
    """KL(p, ref) = sum_v p_v (log p_v - log ref_v), exact, p = softmax(logits), ref =
    softmax(ref_logits).

    Gradient by logits p_v (log p_v - log ref_v - KL); ref is a constant.
    """
    p, gap, _ = _compared(logits, ref_logits)
    terms = jnp.where(p > 0, -p * gap, 0)
    return _sloped(terms.sum(-1), terms - p * terms.sum(-1, keepdims=True), logits)


def forward_kl(
    logits: Float[Array, "position vocab"],
    ref_logits: Float[Array, "position vocab"],
) -> Float[Array, " position"]:
    """KL(ref, p) = sum_v ref_v (log ref_v - log p_v), exact, p = softmax(logits), ref =
    softmax(ref_logits).

    Gradient by logits p_v - ref_v; ref is a constant.
    """
    p, gap, ref = _compared(logits, ref_logits)
    return _sloped(jnp.where(ref > 0, ref * gap, 0).sum(-1), p - ref, logits)


def generalised_jsd(
    logits: Float[Array, "position vocab"],
    ref_logits: Float[Array, "position vocab"],
    *,
    alpha: float,
) -> Float[Array, " position"]:
    """(1 - alpha) KL(p, m) + alpha KL(ref, m), m = (1 - alpha) p + alpha ref, alpha in (0, 1).

    At the ends, by the field's convention, alpha = 0 is ``forward_kl`` and alpha = 1
    ``reverse_kl``. The scale jumps there: the formula itself goes to 0, as alpha KL(ref, p) and
    (1 - alpha) KL(p, ref). Gradient by logits (1 - alpha) p_v (log p_v / m_v - KL(p, m)); ref is a
    constant. Source: GKD, arXiv 2306.13649, with its beta.
    """
    if alpha == 0:
        return forward_kl(logits, ref_logits)
    if alpha == 1:
        return reverse_kl(logits, ref_logits)
    p, gap, ref = _compared(logits, ref_logits)
    over_p, over_ref = _mixture(gap, alpha)
    p_kl = jnp.where(p > 0, -p * over_p, 0)
    ref_kl = jnp.where(ref > 0, -ref * over_ref, 0)
    value = (1 - alpha) * p_kl.sum(-1) + alpha * ref_kl.sum(-1)
    return _sloped(value, (1 - alpha) * (p_kl - p * p_kl.sum(-1, keepdims=True)), logits)


def sampled_jsd_advantage(
    logp: Float[Array, "row token"],
    ref_logp: Float[Array, "row token"],
    *,
    alpha: float,
) -> Float[Array, "row token"]:
    """A = (1 - alpha) log(1 - alpha + alpha rho), rho = exp(ref_logp - logp), alpha in (0, 1).

    For tokens drawn from p, E[-A grad log p] is the gradient of ``generalised_jsd``: positive A
    raises the log-prob, A = 0 exactly where the two agree, A >= (1 - alpha) log(1 - alpha). At the
    ends, as there: alpha = 1 is log rho (reverse KL, -k1), alpha = 0 is rho - 1 with log rho
    clamped to +-20 (forward KL; its variance is that of rho). Detached.
    """
    gap = jax.lax.stop_gradient(widen(ref_logp) - widen(logp))
    if alpha == 1:
        return gap
    if alpha == 0:
        return jnp.expm1(jnp.clip(gap, -BOUND, BOUND))
    return (1 - alpha) * _mixture(gap, alpha)[0]


def top_k_tail(
    logits: Float[Array, "position vocab"],
    chosen_logits: Float[Array, "position vocab"],
    *,
    k: int,
) -> Float[Array, "position bucket"]:
    """Log-probs of the k tokens that softmax(chosen_logits) holds most likely, then of all others
    together: k + 1 numbers whose exponentials sum to 1.

    Any divergence of ``generalised_jsd`` taken between two such vectors, of the same
    ``chosen_logits``, is at most that over the vocabulary. Without the tail, renormalised, it could
    be 0 for policies that share no mass. No gradient flows into the choice. 0 < k < vocabulary,
    else ValueError.
    """
    if not 0 < k < logits.shape[-1]:
        raise ValueError(f"k={k}; allowed: 1 to {logits.shape[-1] - 1}, one less than tokens")
    logits = widen(logits)
    _, kept = jax.lax.top_k(jax.lax.stop_gradient(widen(chosen_logits)), k)
    others = jnp.put_along_axis(logits, kept, -jnp.inf, axis=-1, inplace=False)
    buckets = [jnp.take_along_axis(logits, kept, axis=-1)]
    buckets += [jax.nn.logsumexp(others, axis=-1, keepdims=True)]
    return jax.nn.log_softmax(jnp.concatenate(buckets, axis=-1), axis=-1)


def _compared(logits: Array, ref_logits: Array) -> tuple[Array, Array, Array]:
    """p, log ref - log p where either may happen (0 elsewhere), ref; detached. ValueError if the
    vocabularies differ in size.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(
            f"{logits.shape[-1]} logits against {ref_logits.shape[-1]}; allowed: one vocabulary"
        )
    logp, ref_logp = (
        jax.nn.log_softmax(jax.lax.stop_gradient(widen(x)), axis=-1) for x in (logits, ref_logits)
    )
    p, ref = jnp.exp(logp), jnp.exp(ref_logp)
    possible = (p > 0) | (ref > 0)
    return p, jnp.where(possible, ref_logp, 0) - jnp.where(possible, logp, 0), ref


def _mixture(gap: Array, alpha: float) -> tuple[Array, Array]:
    """log m / p and log m / ref for gap = log ref / p, 0 < alpha < 1; both exactly 0 at gap 0.

    Near 0 by the series of log(1 - alpha + alpha exp(gap)), where the logarithm has no right digit
    left and log1p costs as much as all else; float64 has log1p.
    """
    share = jnp.where(gap > 0, 1 - alpha, alpha)
    above, below = jnp.maximum(gap, 0), jnp.maximum(-gap, 0)
    if gap.dtype == jnp.float64:
        tail = jnp.log1p(share * jnp.expm1(-jnp.abs(gap)))
        return above + tail, below + tail
    tail = jnp.log(1 - share + share * jnp.exp(-jnp.abs(gap)))
    near = jnp.abs(gap) < 0.5
    small = jnp.where(near, gap, 0)
    over_p = jnp.where(near, _polynomial(_cumulants(alpha), small), above + tail)
    return over_p, jnp.where(near, _polynomial(_cumulants(1 - alpha), -small), below + tail)


def _cumulants(alpha: float) -> list[float]:
    """Coefficients of log(1 - alpha + alpha exp(x)) from x to x^10: cumulants of a coin over
    factorials. It converges for |x| < pi; where |x| < 1 / 2 what is left out is below 2e-9 x."""
    moments = [1.0, *(alpha / math.factorial(n) for n in range(1, 11))]
    found = [0.0]
    for n in range(1, 11):
        found.append(moments[n] - sum(k * found[k] * moments[n - k] for k in range(1, n)) / n)
    return found[1:]


def _polynomial(coefficients: list[float], x: Array) -> Array:
    """Without a constant term."""
    total = jnp.zeros_like(x)
    for one in reversed(coefficients):
        total = total * x + one
    return total * x


def _sloped(value: Array, slope: Array, logits: Array) -> Array:
    """The value with this gradient by the logits.

    The slopes are written out since automatic ones vanish at p = ref only up to rounding, and Adam
    makes whole steps of what is left.
    """
    held = jnp.where(jnp.isfinite(logits), widen(logits), 0)
    slope = jnp.where(jnp.isfinite(value)[:, None], slope, 0)  # inf * 0 would hide an infinite KL
    return value + (slope * (held - jax.lax.stop_gradient(held))).sum(-1)
