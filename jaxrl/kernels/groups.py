"""Rollouts that share a prompt: sums, means and differences inside a group.

A group is a label, any integer; its members may lie anywhere on the axis and be any in number.
``mask`` says which members count. The same functions serve any other label (rows of a rollout,
rollouts of a minibatch).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl.kernels.precision import widen


def group_sum(
    x: Num[Array, " rollout"] | Bool[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """sum_{j in group of i, mask_j} x_j, at every member i of the group, masked ones included."""
    label, size = _label(group), group.shape[0]
    return jax.ops.segment_sum(jnp.where(mask, widen(x), 0), label, num_segments=size)[label]


def group_max(
    x: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """max_{j in group of i, mask_j} x_j, at every member i, detached; 0 where none counts."""
    label, size = _label(group), group.shape[0]
    counted = jax.lax.stop_gradient(jnp.where(mask, widen(x), -jnp.inf))
    top = jax.ops.segment_max(counted, label, num_segments=size)[label]
    return jnp.where(jnp.isfinite(top), top, 0)


def group_mean(
    x: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """Mean of x over the group's counted members, at every member; 0 where none counts."""
    return group_sum(x, group, mask) / jnp.maximum(group_sum(mask, group, mask), 1)


def group_center(
    x: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """x_i - mean of the group; 0 at masked members and in groups of one.

    Equal values give exactly 0, whatever their size. Source: Dr. GRPO's advantage.
    """
    # The group's largest value goes first: equal values leave no rounding residue for a division by
    # the standard deviation to blow up. A constant shift changes neither value nor gradient.
    x = jnp.where(mask, widen(x), 0) - group_max(x, group, mask)
    return jnp.where(mask, x - group_mean(x, group, mask), 0)


def group_scale(
    x: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """(x_i - mean) / std with std over n - 1; 0 where std < 1e-8, at masked members and in groups
    of one.

    Source: GRPO, arXiv 2402.03300, outcome supervision. Departs from public code: no epsilon is
    added to the standard deviation, and a group of one has advantage 0, not its raw reward.
    """
    centred = group_center(x, group, mask)
    freedom = group_sum(mask, group, mask) - 1
    variance = group_sum(centred**2, group, mask) / jnp.maximum(freedom, 1)
    varies = variance >= 1e-16
    # Selected twice: the square root has no finite slope at 0.
    return jnp.where(mask & varies, centred / jnp.sqrt(jnp.where(varies, variance, 1)), 0)


def group_normalize(
    x: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    bound: float,
) -> Float[Array, " rollout"]:
    """(x_i - mean) / std with std over n, clipped at +-bound; 0 where std < 1e-6, at masked members
    and in groups of one.

    bound > 0, inf for none: a single member that differs from n - 1 equal ones gets sqrt(n - 1).
    Values that come out of logarithms are equal up to 1e-7 only, hence 1e-6. Source: CoVer, arXiv
    2609.21208, which normalises each role of a task so; the clip is ours.
    """
    centred = group_center(x, group, mask)
    variance = group_mean(centred**2, group, mask)
    varies = variance >= 1e-12
    scaled = centred / jnp.sqrt(jnp.where(varies, variance, 1))
    return jnp.where(mask & varies, jnp.clip(scaled, -bound, bound), 0)


def leave_one_out(
    x: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """x_i - mean_{j != i} x_j = n / (n - 1) (x_i - mean); 0 at masked members and in groups of one.

    Source: RLOO, arXiv 2402.14740, the leave-one-out baseline.
    """
    members = group_sum(mask, group, mask)
    return group_center(x, group, mask) * members / jnp.maximum(members - 1, 1)


def size_factor(
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    full: float,
) -> Float[Array, " rollout"]:
    """(1 - 1 / full) / (1 - 1 / n) with n counted rollouts in the group; 0 at masked members and in
    groups of one.

    A mean that holds the rollout itself shrinks the expected gradient by 1 - 1 / n, so groups of
    different sizes count differently; times this factor all have the scale of a group of ``full``
    (> 1; inf: no shrinking, and R - mean becomes the leave-one-out advantage).
    """
    members = group_sum(mask, group, mask)
    factor = (1 - 1 / full) * members / jnp.maximum(members - 1, 1)
    return jnp.where(mask & (members > 1), factor, 0)


def group_quantile(
    x: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    fraction: float,
) -> Float[Array, " rollout"]:
    """Quantile of x over the group's counted members, at every member; 0 where none counts.

    Linear between order statistics: place fraction * (n - 1), fraction in [0, 1].
    """
    x, size = jnp.where(mask, widen(x), 0), group.shape[0]
    label = _label(group)
    # Counted members of one group lie side by side in this order, all others behind them.
    order = jnp.lexsort((jax.lax.stop_gradient(x), jnp.where(mask, label, size)))
    members = jax.ops.segment_sum(mask.astype(jnp.int32), label, num_segments=size)
    first, last = (jnp.cumsum(members) - members)[label], members[label] - 1
    place = fraction * jnp.maximum(last, 0).astype(x.dtype)
    low = jnp.floor(place).astype(jnp.int32)
    below, above = (
        x[order][jnp.minimum(first + jnp.clip(at, 0, last), size - 1)] for at in (low, low + 1)
    )
    return jnp.where(last >= 0, below + (place - low) * (above - below), 0)


def _label(group: Int[Array, " rollout"]) -> Int[Array, " rollout"]:
    """One number below the axis' size for each group: where its first member would be sorted to.

    Ids may be any integers (a slice of a batch holds ids beyond its length), and segment_sum drops
    what is out of range without a word. Sorting the ids alone and looking them up takes half the
    time of ``jnp.unique``, which sorts pairs; unrolled, equal look-ups become one.
    """
    return jnp.searchsorted(jnp.sort(group), group, method="scan_unrolled")
