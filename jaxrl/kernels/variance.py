"""Squared distance of centred implicit and true reward, inside a group. Source: GVPO, arXiv
2504.19599.

Notation, for the k counted rollouts of one prompt: l_i, l'_i log-probs of the whole response (sums
over its tokens, never means) under the policy and under the anchor; r_i = beta (l_i - l'_i) the
implicit reward; c(.) subtracts the mean over the counted rollouts; e_i = c(r)_i - c(R)_i the
residual. Rewards are not divided by their standard deviation: that would make beta another number
for each prompt.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.groups import group_center, group_sum
from jaxrl.kernels.precision import widen

Diagnostics = dict[str, Array]


def centred_gap(
    logp: Float[Array, " rollout"],
    anchor_logp: Float[Array, " rollout"],
    reward: Float[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    beta: float,
) -> tuple[Float[Array, " rollout"], Diagnostics]:
    """e_i^2 / (2 (k - 1)); 0 at masked rollouts and in groups of one. To be minimised, summed over
    a group.

    The sum over a group has gradient -beta / (k - 1) sum_i w_i grad l_i with w_i = -e_i, which
    needs the whole group in one call. ``implicit_reward`` is c(r)_i, ``residual`` e_i. beta > 0.
    Source: the GVPO objective, arXiv 2504.19599.
    """
    anchor_logp, reward = jax.lax.stop_gradient((widen(anchor_logp), widen(reward)))
    implicit = group_center(beta * (widen(logp) - anchor_logp), group, mask)
    residual = implicit - group_center(reward, group, mask)
    freedom = jnp.maximum(group_sum(mask, group, mask) - 1, 1)
    diagnostics = {"implicit_reward": implicit, "residual": residual}
    return residual**2 / (2 * freedom), jax.lax.stop_gradient(diagnostics)


def gap_weights(
    logp: Float[Array, " rollout"],
    anchor_logp: Float[Array, " rollout"],
    reward: Float[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    beta: float,
) -> Float[Array, " rollout"]:
    """w_i / (k - 1) with w_i = c(R)_i - c(r)_i, detached; sums to 0 over a group; 0 in groups of
    one.

    -beta sum_i (w_i / (k - 1)) l_i has the gradient of ``centred_gap``, and its rollouts may be
    taken one by one. Left attached it would punish the variance of the log-probs besides. Source:
    the gradient identity of GVPO, arXiv 2504.19599.
    """
    implicit = group_center(beta * (widen(logp) - widen(anchor_logp)), group, mask)
    freedom = jnp.maximum(group_sum(mask, group, mask) - 1, 1)
    return jax.lax.stop_gradient((group_center(reward, group, mask) - implicit) / freedom)
