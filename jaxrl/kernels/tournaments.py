"""Places of a tournament -> rewards. Points are compared inside a group only, the most is best.

What a judge said is a fact of each rollout, by its own id: the order of the rollouts is no
information, so moving them moves the results along.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.precision import widen


def tournament_rank(
    points: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """Place in the group by points, 0 for the most; equal points share the mean of their places.

    0 at masked members, who take no place. No gradient.
    """
    size = group.shape[0]
    points = jax.lax.stop_gradient(jnp.where(mask, widen(points), 0))
    label = jnp.unique(group, size=size, return_inverse=True)[1]
    label = jnp.where(mask, label, size)  # those who do not count come last, by themselves
    order = jnp.lexsort((-points, label))
    label, points, place = label[order], points[order], jnp.arange(size, dtype=points.dtype)
    opens = (label[1:] != label[:-1]) | (points[1:] != points[:-1])
    run = jnp.cumsum(jnp.pad(opens.astype(jnp.int32), (1, 0)))  # of equal points, side by side
    alike = jax.ops.segment_sum(jnp.ones_like(place), run, num_segments=size)[run]
    shared = jax.ops.segment_sum(place, run, num_segments=size)[run] / alike
    first = jax.ops.segment_min(place, label, num_segments=size + 1)[label]
    return jnp.zeros_like(place).at[order].set(jnp.where(label < size, shared - first, 0))


def rank_reward(
    points: Num[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """1 - rank / (G - 1) for the G counted members of a group: 1 the best, 0 the last.

    0 at masked members, in groups of one and in groups that are tied throughout: nobody won.
    Source: ArenaRL, as ArenaFlow, arXiv 2609.21378, uses it. Departs from public code, which
    divides by 0 in a group of one.
    """
    rank = tournament_rank(points, group, mask)
    most = group_sum(mask, group, mask) - 1
    told = group_sum(jnp.abs(2 * rank - most), group, mask) > 0
    return jnp.where(mask & told, 1 - rank / jnp.maximum(most, 1), 0)
