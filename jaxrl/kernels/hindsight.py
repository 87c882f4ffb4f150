"""Learning from what the environment answered: hindsight distillation and feedback likelihood.

A transition is one turn of a rollout: its action tokens and the feedback tokens that answered them,
under one label. Source: SELF, §3, its distillation and its environment term.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl.kernels.divergences import reverse_kl
from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.precision import widen
from jaxrl.kernels.weights import rollout_sum_mean


def turn_sum(
    x: Num[Array, "row token"] | Bool[Array, "row token"],
    turn: Int[Array, "row token"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """Sum of x over the counted tokens of the row with the same turn, at every token of that turn.

    ``turn`` is a label, any integers; the same one in another row is another turn.
    """
    # Relabelled for the reason of groups.group_sum: what is out of range would be dropped.
    tokens = turn.shape[1]
    rank = jax.vmap(lambda row: jnp.unique(row, size=tokens, return_inverse=True)[1])(turn)
    total = jax.vmap(lambda row, at: jax.ops.segment_sum(row, at, num_segments=tokens))(
        jnp.where(mask, widen(x), 0), rank
    )
    return jnp.take_along_axis(total, rank, axis=1)


def turn_mean(
    turn: Int[Array, "row token"],
    rollout: Int[Array, " row"],
    minibatch: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """mask / (tokens of the turn * turns of the rollout * rollouts of the minibatch).

    The expectation over a rollout drawn uniformly, then a turn of it drawn uniformly, of the mean
    over that turn's counted tokens: a rollout of many turns weighs no more than one of few. Turns
    and rollouts without a counted token are in no denominator. Source: SELF's sampling of
    transitions, in expectation.
    """
    tokens = turn_sum(mask, turn, mask)
    share = mask / jnp.maximum(tokens, 1)  # sums to 1 over a turn
    turns = group_sum(share.sum(-1), rollout, mask.any(-1))
    return share * rollout_sum_mean(rollout, minibatch, mask) / jnp.maximum(turns, 1)[:, None]


def hindsight_gap(
    logits: Float[Array, "position vocab"],
    hindsight_logits: Float[Array, "position vocab"],
) -> Float[Array, " position"]:
    """KL(p, q) = sum_v p_v (log p_v - log q_v), >= 0: p = softmax(logits) acts without the
    feedback, q = softmax(hindsight_logits) has seen it.

    To be minimised: it draws p to q. No gradient flows into q. Source: SELF, the self-distillation
    term, full vocabulary.
    """
    return reverse_kl(logits, jax.lax.stop_gradient(hindsight_logits))


def feedback_loss(
    logp: Float[Array, "row token"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """-log p of each counted feedback token, 0 elsewhere; to be minimised. Source: SELF, the
    environment term.
    """
    return jnp.where(mask, -widen(logp), 0)
