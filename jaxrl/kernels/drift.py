"""A sampler of tasks that moves with the learner, an archive of rules, and how far both may drift.

q is the probability of each universe (a family of tasks), kept as log q so that it never underflows
for good; w the weight of each rule (a program that maps an answer's distribution to a label). The
masks say which universes hold a task: others have probability 0 (log q = -inf is written as a large
negative number) and what is left sums to 1. Source: PRAXIS, §3, Eq. 1-5 and Theorem 5.4.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from jaxrl.kernels.precision import widen

NEVER = -1e4  # nats: exp gives 0, and a product with 0 stays finite
HALVINGS = 40


def renormalised(
    log_q: Float[Array, " universe"], mask: Bool[Array, " universe"]
) -> Float[Array, " universe"]:
    """log(q / sum of the counted q), detached; NEVER where the mask is off."""
    log_q = jnp.where(mask, widen(log_q), NEVER)
    total = jax.nn.logsumexp(jnp.where(mask, log_q, -jnp.inf))
    total = jnp.where(mask.any(), total, 0)
    return jax.lax.stop_gradient(jnp.where(mask, jnp.maximum(log_q - total, NEVER), NEVER))


def exponentiated_gradient(
    log_q: Float[Array, " universe"],
    gain: Float[Array, " universe"],
    mask: Bool[Array, " universe"],
    *,
    rate: float,
) -> Float[Array, " universe"]:
    """log q' with q' prop. to q exp(rate gain): the natural-gradient step on the simplex.

    gain is what the sampler seeks (a loss, for a curriculum towards what is hard). The gradient of
    KL(q', q) is 0 at q itself: one such step is not held back by it, only ``bounded_move`` is.
    """
    return renormalised(widen(log_q) + rate * widen(gain), mask)


def tilted(
    log_q: Float[Array, " universe"],
    log_base: Float[Array, " universe"],
    gain: Float[Array, " universe"],
    mask: Bool[Array, " universe"],
    *,
    stay: float,
    home: float,
) -> Float[Array, " universe"]:
    """log of argmax_p <p, gain> - stay KL(p, q) - home KL(p, base): the power 1 / (stay + home) of
    q^stay base^home exp(gain), renormalised.

    stay > 0, home >= 0, in units of gain. Source: PRAXIS, the sampler's objective, maximised
    exactly where the paper takes one gradient step.
    """
    log_q, log_base = (jnp.where(mask, widen(x), 0) for x in (log_q, log_base))
    mixed = (stay * log_q + home * log_base + jnp.where(mask, widen(gain), 0)) / (stay + home)
    return renormalised(mixed, mask)


def bounded_move(
    log_q: Float[Array, " universe"],
    log_target: Float[Array, " universe"],
    mask: Bool[Array, " universe"],
    *,
    kappa: float,
) -> Float[Array, " universe"]:
    """The farthest point of q^(1 - t) target^t, 0 <= t <= 1, with KL(q', q) <= kappa.

    The divergence grows with t, so bisection finds it, and what is returned was itself measured to
    keep the bound. With a target of ``exponentiated_gradient`` this maximises <q', gain> under the
    bound. kappa >= 0 nats; 0 leaves q as it is. Departs from PRAXIS, which keeps the old q whenever
    a step would break the bound.
    """
    start, goal = renormalised(log_q, mask), renormalised(log_target, mask)

    def at(t: Array) -> Float[Array, " universe"]:
        return renormalised(start + t * (goal - start), mask)

    def fits(t: Array) -> Bool[Array, ""]:
        return relative_entropy(at(t)[None], start[None], mask[None])[0] <= kappa

    def halve(_: Array | int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        good = fits(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    zero, one = jnp.zeros((), start.dtype), jnp.ones((), start.dtype)
    low, _ = jax.lax.fori_loop(0, HALVINGS, halve, (zero, one))
    t = jnp.where(fits(one), one, low)
    return jnp.where(kappa > 0, at(t), start)  # of a tiny step rounding may hide the divergence


def relative_entropy(
    log_q: Float[Array, "step universe"],
    log_p: Float[Array, "step universe"],
    mask: Bool[Array, "step universe"],
) -> Float[Array, " step"]:
    """KL(q, p) = sum_u q_u (log q_u - log p_u) of each step, >= 0, nats, for q and p that sum to 1
    over the counted universes; masked ones are left out."""
    log_q, log_p = (jnp.where(mask, widen(x), NEVER) for x in (log_q, log_p))
    # q x - q + p with x = log q / p: each term is >= 0, and of a tiny move about p x^2 / 2, where
    # the terms q x cancel down to their rounding (a distance of 0, and no bound for what moved).
    up, down = jnp.maximum(log_q - log_p, 0), jnp.minimum(log_q - log_p, 0)
    gained = jnp.exp(log_q) * (up + jnp.expm1(-up))
    lost = jnp.exp(log_p) * (down * jnp.exp(down) - jnp.expm1(down))
    return jnp.maximum(jnp.where(mask, gained + lost, 0).sum(-1), 0)


def archive_weights(score: Float[Array, " rule"], *, sharpness: float) -> Float[Array, " rule"]:
    """w = softmax(sharpness score), detached; with score += rate utility it is the multiplicative
    update w exp(sharpness rate utility), renormalised. Source: PRAXIS, the archive's weights.
    """
    return jax.lax.stop_gradient(jax.nn.softmax(sharpness * widen(score)))


def rule_utility(
    rule_right: Num[Array, "example rule"] | Bool[Array, "example rule"],
    model_right: Num[Array, " example"] | Bool[Array, " example"],
    mask: Bool[Array, " example"],
    *,
    harm: float,
) -> Float[Array, " rule"]:
    """F_j - harm B_j, detached: F_j the share of counted examples that rule j labels right, B_j the
    share that the model has right and the rule turns wrong; 0 without a counted example.

    Arrays hold 0 and 1. A rule that copies the model's own answer has B_j = 0. Source: PRAXIS, the
    archive's score.
    """
    counted = mask[:, None]
    rule_right = jnp.where(counted, widen(rule_right), 0)
    model_right = jnp.where(mask, widen(model_right), 0)[:, None]
    broken = jnp.where(counted, model_right * (1 - rule_right), 0)
    utility = (rule_right - harm * broken).sum(0) / jnp.maximum(mask.sum(), 1)
    return jax.lax.stop_gradient(utility)


def clipped_consistency(logp: Float[Array, "..."], *, cap: float) -> Float[Array, "..."]:
    """D = min(-log p(label), cap) / cap in [0, 1], of a rule's label: to be minimised.

    logp of the label under the model, <= 0; the label is a constant. Beyond the cap the gradient is
    exactly 0: a rule that contradicts a sure model does not pull. Source: PRAXIS, Eq. 2.
    """
    surprise = -widen(logp)
    return jnp.where(surprise < cap, surprise, cap) / cap


def drift_bound(
    log_q_next: Float[Array, "step universe"],
    log_q: Float[Array, "step universe"],
    weight_next: Float[Array, "step rule"],
    weight: Float[Array, "step rule"],
    mask: Bool[Array, "step universe"],
    *,
    loss_bound: float,
    consistency_weight: float,
) -> Float[Array, " step"]:
    """M sqrt(2 KL(q', q)) + lam |w' - w|_1 >= |F'(theta) - F(theta)| at any fixed theta; detached.

    F = E_q[loss + lam sum_j w_j D_j] with loss in [0, loss_bound] and D in [0, 1]; M = loss_bound +
    lam, lam = consistency_weight. Source: PRAXIS, Theorem 5.4.
    """
    tasks = jnp.sqrt(2 * jax.lax.stop_gradient(relative_entropy(log_q_next, log_q, mask)))
    rules = jax.lax.stop_gradient(jnp.abs(widen(weight_next) - widen(weight)).sum(-1))
    return (loss_bound + consistency_weight) * tasks + consistency_weight * rules


def tight_drift_bound(
    log_q_next: Float[Array, "step universe"],
    log_q: Float[Array, "step universe"],
    weight_next: Float[Array, "step rule"],
    weight: Float[Array, "step rule"],
    mask: Bool[Array, "step universe"],
    *,
    loss_bound: float,
    consistency_weight: float,
) -> Float[Array, " step"]:
    """(M / 2) |q' - q|_1 + (lam / 2) |w' - w|_1, detached: at most half of ``drift_bound``, and
    still above the drift, since what is averaged lies in an interval of length M, and of length
    lam.

    Ours: not in the paper, whose bound is loose by this factor of 2.
    """
    q_next, q = (jnp.where(mask, jnp.exp(widen(x)), 0) for x in (log_q_next, log_q))
    tasks, rules = jax.lax.stop_gradient(
        (jnp.abs(q_next - q).sum(-1), jnp.abs(widen(weight_next) - widen(weight)).sum(-1))
    )
    return ((loss_bound + consistency_weight) * tasks + consistency_weight * rules) / 2
