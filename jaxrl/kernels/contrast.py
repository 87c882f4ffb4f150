"""One model as two teachers of a wrong response: shown what is right, and shown what is wrong."""

import jax
from jaxtyping import Array, Float

from jaxrl.kernels.divergences import sampled_jsd_advantage
from jaxrl.kernels.precision import widen


def contrastive_advantage(
    logp: Float[Array, "row token"],
    right_logp: Float[Array, "row token"],
    wrong_logp: Float[Array, "row token"],
    *,
    alpha: float,
) -> Float[Array, "row token"]:
    """1/2 (A(right_logp) - A(wrong_logp)) with A of ``sampled_jsd_advantage``; nats, detached.

    Drawn to the teacher that was shown a right response, pushed off the one that was shown a wrong
    one: positive raises the log-prob. alpha = 1, the reverse-KL limit, is 1/2 (right_logp -
    wrong_logp): the policy cancels, and so does whatever both contexts do alike (style); with
    alpha < 1 a shared shift leaks in. No policy makes it 0: stop early, or hold on to the start.
    Source: contrastive self-distillation, arXiv 2609.21561.
    """
    if alpha == 1:
        return jax.lax.stop_gradient(widen(right_logp) - widen(wrong_logp)) / 2
    right, wrong = (sampled_jsd_advantage(logp, x, alpha=alpha) for x in (right_logp, wrong_logp))
    return (right - wrong) / 2
