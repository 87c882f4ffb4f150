"""How much better a taken token is under a teacher than under the student, as a bounded advantage.

Notation, at one position: pS = softmax(logits) the student, pT = softmax(teacher_logits) the
teacher, both over the same vocabulary and the student's own prefix, y the taken token, d = pT - pS:

    a = d(y) - sum_v pS(v) d(v)

Under y ~ pS the mean of a is 0, and the mean of a grad log pS(y) is -grad 1/2 |pT - pS|^2: policy
gradient on the squared distance, with a in [-1/2, 2] where log-ratios know no bound. Source:
Residual Advantage, arXiv 2610.11519, equations 1-10. Everything here is a constant: no gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.precision import widen
from jaxrl.kernels.weights import row_tokens


def residual_advantage(
    logits: Float[Array, "position vocab"],
    teacher_logits: Float[Array, "position vocab"],
    taken: Int[Array, " position"],
) -> Float[Array, " position"]:
    """a = d(y) - sum_v pS(v) d(v), in [-1/2, 2]; exactly 0 where the logits are equal.

    Positive: the teacher gives the token more than the student does. One number a position is what
    has to be kept of the two distributions.
    """
    p, teacher = _distributions(logits, teacher_logits)
    gap = teacher - p
    return jax.lax.stop_gradient(_at(gap, taken) - (p * gap).sum(-1))


def overlap(
    logits: Float[Array, "position vocab"],
    other_logits: Float[Array, "position vocab"],
) -> Float[Array, " position"]:
    """sum_v p(v) q(v), in (0, 1]: the chance that two draws, one from each, agree."""
    p, other = _distributions(logits, other_logits)
    return jax.lax.stop_gradient((p * other).sum(-1))


def stored_residual(
    logp: Float[Array, "row token"],
    teacher_logp: Float[Array, "row token"],
    teacher_overlap: Float[Array, "row token"],
    self_overlap: Float[Array, "row token"],
) -> Float[Array, "row token"]:
    """a = pT(y) - pS(y) - (sum_v pS pT - sum_v pS^2), from what may be stored without a vocabulary.

    ``logp`` and ``teacher_logp`` are of the taken token, ``teacher_overlap`` is ``overlap`` of
    student and teacher, ``self_overlap`` that of the student with itself. Equals
    ``residual_advantage``.
    """
    at_taken = jnp.exp(widen(teacher_logp)) - jnp.exp(widen(logp))
    return jax.lax.stop_gradient(at_taken - (widen(teacher_overlap) - widen(self_overlap)))


def top_residual(
    logits: Float[Array, "position vocab"],
    teacher_logits: Float[Array, "position vocab"],
    taken: Int[Array, " position"],
    *,
    kept: int,
) -> Float[Array, " position"]:
    """a, with sum_v pS pT over the ``kept`` tokens that the teacher finds likeliest.

    What a teacher allows that reports the taken token and its k likeliest. Too large by at most
    ``missing_mass``. Departs from the paper, which has the whole vocabulary.
    """
    p, teacher = _distributions(logits, teacher_logits)
    likeliest, at = jax.lax.top_k(teacher, kept)
    agree = (jnp.take_along_axis(p, at, axis=-1) * likeliest).sum(-1)
    return jax.lax.stop_gradient(_at(teacher - p, taken) - (agree - (p * p).sum(-1)))


def missing_mass(
    teacher_logits: Float[Array, "position vocab"],
    *,
    kept: int,
) -> Float[Array, " position"]:
    """1 - the probability of the ``kept`` likeliest tokens, in [0, 1)."""
    teacher = jax.nn.softmax(widen(teacher_logits), axis=-1)
    likeliest, _ = jax.lax.top_k(teacher, kept)
    return jax.lax.stop_gradient(jnp.maximum(1 - likeliest.sum(-1), 0))


def response_center(
    x: Float[Array, "row token"],
    weight: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """x_t - sum_t w_t x_t / sum_t w_t over the counted tokens of the rollout, 0 elsewhere.

    ``weight`` >= 0 is how much a token counts in the loss, so that the centred x moves no
    rollout's loss as a whole. Exactly 0 for a lone counted token; x itself where none of several
    has weight. ``rollout`` is a label.
    """
    x, weight = (jnp.where(mask, widen(part), 0) for part in (x, weight))
    tokens = row_tokens(mask)
    counted = tokens > 0
    total = group_sum(weight.sum(-1), rollout, counted)[:, None]
    center = group_sum((weight * x).sum(-1), rollout, counted)[:, None]
    center = jnp.where(total > 0, center / jnp.where(total > 0, total, 1), 0)
    several = group_sum(tokens, rollout, counted)[:, None] > 1  # w x / w may round
    return jax.lax.stop_gradient(jnp.where(mask & several, x - center, 0))


def _distributions(
    logits: Float[Array, "position vocab"], other_logits: Float[Array, "position vocab"]
) -> tuple[Float[Array, "position vocab"], Float[Array, "position vocab"]]:
    return jax.nn.softmax(widen(logits), axis=-1), jax.nn.softmax(widen(other_logits), axis=-1)


def _at(
    x: Float[Array, "position vocab"], taken: Int[Array, " position"]
) -> Float[Array, " position"]:
    return jnp.take_along_axis(x, taken[:, None], axis=-1)[:, 0]
