"""Rewards reshaped by what is known of a rollout besides its verdict."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl.kernels.groups import group_center, group_quantile, group_sum
from jaxrl.kernels.precision import widen

TIED = 1e-6  # qualities that differ by less are equal


def overlong_penalty(
    length: Num[Array, " rollout"],
    *,
    limit: int,
    buffer: int,
    penalty: float,
) -> Float[Array, " rollout"]:
    """Added to the reward, <= 0: 0 up to limit - buffer tokens, then linear, -penalty from limit
    on.

    length, limit and buffer in tokens of the response, 0 < buffer <= limit; penalty >= 0 in units
    of reward. Source: DAPO, arXiv 2503.14476, soft overlong punishment.
    """
    excess = (widen(length) - (limit - buffer)) / buffer
    return -penalty * jnp.clip(excess, 0, 1)


def usable_quality(
    quality: Num[Array, " rollout"],
    graded: Bool[Array, " rollout"],
    passed: Bool[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """f_i at the counted passes of groups in which every pass has a grade in (0, 1]; 1 elsewhere.

    One missing grade makes the grader's whole answer unusable: it is not known where that pass
    stands among the others.
    """
    passes = mask & passed
    fine = graded & (0 < quality) & (quality <= 1)
    complete = group_sum(passes & ~fine, group, passes) == 0
    return jnp.where(passes & complete, widen(quality), 1)


def quality_product(
    quality: Float[Array, " rollout"],
    passed: Bool[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    least_spread: float,
) -> Float[Array, " rollout"]:
    """R_i = pass_i f_i, where the standard deviation (over n) of f among the group's passes is at
    least ``least_spread``, else R_i = pass_i. A failure's reward is 0 whatever its quality.

    f in (0, 1] is the product of the scores of frozen rubrics, solution times behaviour; so R <=
    pass. A product that hardly differs says nothing about a group: centring erases it, and
    division by a deviation blows its noise up. Source: MiMo-V2.6, equation 2; the floor is ours.
    """
    passes = mask & passed
    centred = group_center(quality, group, passes)
    passing = group_sum(passes, group, passes)
    variance = group_sum(centred**2, group, passes) / jnp.maximum(passing, 1)
    return jnp.where(passes, jnp.where(variance >= least_spread**2, widen(quality), 1), 0)


def redistributed(
    quality: Float[Array, " rollout"],
    passed: Bool[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    cap: float,
) -> Float[Array, " rollout"]:
    """Advantages of a group whose passes share theirs by quality; sums to 0 over a group.

        A = R - mean(R), R = 1 at passes P, else 0
        lam = min(sum_P A / sum_P f A, cap)
        A_i <- lam f_i A_i on P, then A <- A - mean(A)

    With rho = lam mean_P(f), which is 1 unless the cap holds, and the pass rate m: passes get (1 -
    m) (rho f_i / mean_P(f) + (1 - rho) m), failures -m (1 - (1 - rho) (1 - m)). So no advantage
    changes its sign, for any cap >= 1, and the order on P is that of f in (0, 1]. A stays as it is
    with a single pass or with all f tied; it is 0 without a failure or a pass. Exploits are no
    passes: take them out of ``passed`` first. Source: MiMo-V2.6, equation 3.
    """
    passes = mask & passed
    f = jnp.where(passes, widen(quality), 0)
    base = group_center(passes.astype(f.dtype), group, mask)
    share = group_sum(base, group, passes)
    spent = jnp.maximum(group_sum(f * base, group, passes), share / cap)
    lam = jnp.where(spent > 0, share / jnp.where(spent > 0, spent, 1), 0)
    spread = group_sum(jnp.abs(group_center(f, group, passes)), group, passes)
    moved = jnp.where(passes & (spread > TIED), lam * f * base, base)
    return group_center(moved, group, mask)


def length_penalty(
    length: Num[Array, " rollout"],
    passed: Bool[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    penalty: float,
    quantile: float,
    pass_rate: float,
    slack: float,
    full: float,
    power: float,
) -> Float[Array, " rollout"]:
    """X clip((L / l* - 1 - slack) / (full - slack), 0, 1)^power at passes, 0 at failures; >= 0.

    l* is the ``quantile`` of the lengths of the group's passes, at least 1 token, and the group is
    left alone unless more than ``pass_rate`` of it passes. Taken off what a pass is worth:
    ``slack`` is how much longer than l* costs nothing, ``full`` > slack how much longer costs the
    whole ``penalty`` X in [0, 1). power >= 1. Source: MiMo-V2.6, equation 4; slack and full are
    not published.
    """
    passes = mask & passed
    often = group_sum(passes, group, mask) > pass_rate * group_sum(mask, group, mask)
    short = jnp.maximum(group_quantile(length, group, passes, fraction=quantile), 1)
    excess = (jnp.where(passes, widen(length), 0) / short - 1 - slack) / (full - slack)
    return jnp.where(passes & often, penalty * jnp.clip(excess, 0, 1) ** power, 0)


def segment_scale(
    advantage: Float[Array, "row token"],
    flagged: Bool[Array, "row token"],
    group: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    harsher: float,
    most: float,
    least: float,
) -> Float[Array, "row token"]:
    """Flagged tokens earn nothing and take ``harsher`` times the blame; clean ones make up for it.

    With H+, C+ the sums of A over the group's flagged and clean tokens where A > 0, and H-, C-
    those of -A where A < 0, A is multiplied by

        A > 0    flagged 0          clean min(most, 1 + H+ / C+)
        A < 0    flagged harsher    clean max(least, 1 - (harsher - 1) H- / C-)

    Where no bound holds the sums of both signs stay; where a group has no clean token of a sign its
    sum is not made up for. 0 at masked tokens. harsher >= 1, most >= 1, least in [0, 1]. Source:
    MiMo-V2.6, equation 5; sums inside a group are ours, since its tokens count alike there.
    """

    def total(where: Bool[Array, "row token"]) -> Float[Array, "row one"]:
        x = jnp.where(where, jnp.abs(widen(advantage)), 0).sum(-1)
        return group_sum(x, group, x > 0)[:, None]

    good, bad = mask & (advantage > 0), mask & (advantage < 0)
    earned, clean = total(good & flagged), total(good & ~flagged)
    blamed, others = total(bad & flagged), total(bad & ~flagged)
    lift = jnp.minimum(most, 1 + earned / jnp.where(clean > 0, clean, 1))
    ease = jnp.maximum(least, 1 - (harsher - 1) * blamed / jnp.where(others > 0, others, 1))
    of_good = jnp.where(flagged, 0, jnp.where(clean > 0, lift, 1))
    of_bad = jnp.where(flagged, harsher, jnp.where(others > 0, ease, 1))
    return jnp.where(good, of_good, of_bad) * jnp.where(good | bad, widen(advantage), 0)
