"""How far a teacher's log-prob of a token is to be believed. Nats; advantages, no gradient."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.kernels.precision import widen

DEAD = 1e-5  # nats: two kernels' rounding of one log-prob is no discrepancy


def calibrated_advantage(
    logp: Float[Array, "row token"],
    teacher_logp: Float[Array, "row token"],
    right_logp: Float[Array, "row token"],
    wrong_logp: Float[Array, "row token"],
    *,
    width: float,
) -> Float[Array, "row token"]:
    """max(0, low - logp) - max(0, logp - high): how far the policy is outside of what the teacher
    may mean.

        low  = teacher_logp - width max(0, -d+, -d-)     d+ = right_logp - teacher_logp
        high = teacher_logp + width max(0,  d+,  d-)     d- = wrong_logp - teacher_logp

    right_logp, wrong_logp: the same teacher told that the response was judged right, or wrong; what
    moves with the verdict alone is not believed. Positive raises the log-prob; the sign is that of
    teacher_logp - logp or 0, and width = 0 is on-policy distillation's teacher_logp - logp. Less
    than 1e-5 counts as 0. width >= 0, finite. Source: Cal-OPD, arXiv 2609.21619, eq. 13 and 14.
    """
    logp, teacher_logp, right_logp, wrong_logp = (
        jax.lax.stop_gradient(widen(x)) for x in (logp, teacher_logp, right_logp, wrong_logp)
    )
    right, wrong = right_logp - teacher_logp, wrong_logp - teacher_logp
    low = teacher_logp - width * jnp.maximum(0, jnp.maximum(-right, -wrong))
    high = teacher_logp + width * jnp.maximum(0, jnp.maximum(right, wrong))
    advantage = jnp.maximum(0, low - logp) - jnp.maximum(0, logp - high)
    return jnp.where(jnp.abs(advantage) < DEAD, 0, advantage)


def reweighted_advantage(
    logp: Float[Array, "row token"],
    teacher_logp: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    *,
    share: float,
    band: float,
) -> Float[Array, "row token"]:
    """A (1 - share + share clip(exp(sign(A) (teacher_logp - logp)), 1 - band, 1 + band)).

    A verifier's advantage, larger on tokens where the teacher agrees with it; its sign stays.
    share in [0, 1], band in [0, 1). Source: RLSD's reweighting, as public code has it.
    """
    logp, teacher_logp, advantage = (
        jax.lax.stop_gradient(widen(x)) for x in (logp, teacher_logp, advantage)
    )
    # The band is clipped as a log-ratio, so that no exponential overflows.
    agreement = jnp.sign(advantage) * (teacher_logp - logp)
    factor = jnp.exp(jnp.clip(agreement, jnp.log1p(-band), jnp.log1p(band)))
    return advantage * (1 - share + share * factor)
