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


def stratified_gap(
    logp: Float[Array, " rollout"],
    anchor_logp: Float[Array, " rollout"],
    reward: Float[Array, " rollout"],
    behaviour: Int[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    beta: float,
) -> tuple[Float[Array, " rollout"], Diagnostics]:
    """Each rollout's part of V / 2, to be summed over a group and minimised; 0 at masked rollouts.

    For groups that hold a fixed number k_s of rollouts from each behaviour policy s (a label), with
    x = r - R:

        V = 1/k sum_i (x_i - mean)^2 + 1/k^2 sum_s k_s / (k_s - 1) sum_{i in s} (x_i - mean_s)^2

    V is unbiased for the variance of x under the mixture of the policies, where ``centred_gap``
    counts the spread between them k / (k - 1) times; with one policy the two are equal. Needs k_s
    >= 2: leave groups with a lone rollout of some policy out (``accompanied``). ``residual`` is
    x_i - mean. Source: derived from the GVPO objective, arXiv 2504.19599, for stratified draws.
    """
    anchor_logp, reward = jax.lax.stop_gradient((widen(anchor_logp), widen(reward)))
    x = beta * (widen(logp) - anchor_logp) - reward
    residual, inner, rollouts, scale = _strata(x, behaviour, group, mask)
    each = residual**2 / rollouts + scale * inner**2 / rollouts**2
    return each / 2, jax.lax.stop_gradient({"residual": residual})


def stratified_weights(
    logp: Float[Array, " rollout"],
    anchor_logp: Float[Array, " rollout"],
    reward: Float[Array, " rollout"],
    behaviour: Int[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    beta: float,
) -> Float[Array, " rollout"]:
    """u_i = -d (V / 2) / d x_i of ``stratified_gap``, detached; sums to 0 over a group.

    -beta sum_i u_i l_i has the gradient of V / 2, and its rollouts may be taken one by one.
    """
    x = beta * (widen(logp) - widen(anchor_logp)) - widen(reward)
    residual, inner, rollouts, scale = _strata(x, behaviour, group, mask)
    return jax.lax.stop_gradient(-(residual / rollouts + scale * inner / rollouts**2))


def accompanied(
    behaviour: Int[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """1 at the counted rollouts of groups in which k_s >= 2 for every behaviour policy, else 0.

    A spread inside a policy cannot be told from one rollout of it, so these are the groups that
    ``stratified_gap`` speaks of.
    """
    alone = mask & (group_sum(mask, _stratum(behaviour, group), mask) < 2)
    return widen(mask & (group_sum(alone, group, mask) == 0))


def length_weight(
    length: Float[Array, " rollout"],
    *,
    alpha: float,
) -> Float[Array, " rollout"]:
    """f = length^-alpha, lengths below 1 counting as 1; detached. alpha >= 0: 0 weighs all alike.

    Times a difference of whole-response log-probs, it says which errors are mended first; the
    optimum is the teacher for any f > 0. Source: GVPO++, arXiv 2609.21432, group-variance
    distillation with length weights.
    """
    return jax.lax.stop_gradient(jnp.maximum(widen(length), 1) ** -alpha)


def _stratum(
    behaviour: Int[Array, " rollout"], group: Int[Array, " rollout"]
) -> Int[Array, " rollout"]:
    """One label for each (group, behaviour policy)."""
    size = group.shape[0]
    outer, inner = (
        jnp.unique(label, size=size, return_inverse=True)[1] for label in (group, behaviour)
    )
    return outer * size + inner


def _strata(
    x: Float[Array, " rollout"],
    behaviour: Int[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> tuple[Float[Array, " rollout"], ...]:
    """x - mean of the group, x - mean of the stratum, k, and k_s / (k_s - 1)."""
    stratum = _stratum(behaviour, group)
    members = group_sum(mask, stratum, mask)
    return (
        group_center(x, group, mask),
        group_center(x, stratum, mask),
        jnp.maximum(group_sum(mask, group, mask), 1),
        members / jnp.maximum(members - 1, 1),
    )
