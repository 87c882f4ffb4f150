"""What a test tells of the programs that it is run on. Nats. Source: CoVer, arXiv 2609.21208.

``outcome[i, j]`` is above 1/2 where program i passes test j; ``truth[i]`` in [0, 1] is the part of
the ground-truth tests that program i passes; ``mask[i, j]`` says which cells count (measured twice
alike, by a program of the group). A group is the programs and tests of one task. What is found of a
test stands at every rollout of its group, programs or not. Rewards: nothing here is differentiated.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.precision import widen

ROUNDING = (
    1e-6  # a covariance so close to 0 is 0; the least that 64 programs and tests give is 4e-6
)

# [rollout test] of values, labels [rollout], [rollout test] of masks -> [rollout test]
_column_sum = jax.vmap(group_sum, in_axes=(1, None, 1), out_axes=1)


def _counted(outcome: Array, truth: Array, mask: Array) -> tuple[Array, Array]:
    """1 where passed, and the truth of the row's program, both 0 where not counted."""
    passed = widen(outcome > 0.5).astype(widen(outcome).dtype)
    truth = jnp.clip(jax.lax.stop_gradient(widen(truth)), 0, 1)[:, None]
    return jnp.where(mask, passed, 0), jnp.where(mask, truth, 0)


def _share(x: Array, group: Array, mask: Array) -> Array:
    """Mean over the column's counted cells; 0 where none counts."""
    return _column_sum(x, group, mask) / jnp.maximum(_column_sum(mask, group, mask), 1)


def _term(joint: Array, rows: Array, columns: Array) -> Array:
    """P log(P / (P_row P_column)), 0 at P = 0."""
    possible = joint > 0
    ratio = joint / jnp.where(possible, rows * columns, 1)
    return jnp.where(possible, joint * jnp.log(jnp.where(possible, ratio, 1)), 0)


def pass_rate(
    outcome: Num[Array, "rollout test"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, "rollout test"],
) -> Float[Array, "rollout test"]:
    """Part of the counted programs that pass; 0 where none counts.

    As a reward it is a baseline to compare with: a test that everything passes earns most.
    """
    passed, _ = _counted(outcome, jnp.zeros(outcome.shape[0], widen(outcome).dtype), mask)
    return _share(passed, group, mask)


def covariance(
    outcome: Num[Array, "rollout test"],
    truth: Float[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, "rollout test"],
) -> Float[Array, "rollout test"]:
    """mean_i (E_ij - mean E_j) (y_i - mean y) over the counted programs; 0 where none counts.

    Exactly 0 up to rounding (1e-6): a gate on it asks for more than 0, and rounding would open it.
    """
    passed, truth = _counted(outcome, truth, mask)
    apart = jnp.where(mask, passed - _share(passed, group, mask), 0)
    found = _share(apart * truth, group, mask)
    return jnp.where(jnp.abs(found) > ROUNDING, found, 0)


def soft_information(
    outcome: Num[Array, "rollout test"],
    truth: Float[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, "rollout test"],
) -> Float[Array, "rollout test"]:
    """Mutual information of passing and being right, a program being right with probability y_i.

    sum over e, right of P log(P / (P(e) P(right))) with P(1, right) = mean_i E_ij y_i and the like:
    a 2 x 2 table, however many values y takes. Exactly 0 at covariance 0, so for a column or a
    truth that is constant. Departs from the paper, whose released code counts y's values exactly:
    with distinct values that estimate is the entropy of the column, whatever the test.
    """
    zero = covariance(outcome, truth, group, mask) == 0
    passed, truth = _counted(outcome, truth, mask)
    share, right = _share(passed, group, mask), _share(truth, group, mask)
    both = _share(passed * truth, group, mask)
    table = ((both, share, right), (share - both, share, 1 - right))
    table += ((right - both, 1 - share, right), (1 - share - right + both, 1 - share, 1 - right))
    found = sum(_term(*cell) for cell in table)
    return jnp.where(zero, 0, jnp.maximum(found, 0))


def binned_information(
    outcome: Num[Array, "rollout test"],
    truth: Float[Array, " rollout"],
    group: Int[Array, " rollout"],
    mask: Bool[Array, "rollout test"],
    *,
    levels: int,
    miller_madow: bool,
) -> Float[Array, "rollout test"]:
    """Plug-in mutual information of passing and v = round(levels y), v in 0 .. levels.

    Biased up by about (occupied v - 1) / (2 n) for n programs; ``miller_madow`` takes that off,
    down to 0. Source: CoVer's released code (levels: the number of ground-truth tests, at most 8).
    """
    passed, truth = _counted(outcome, truth, mask)
    level = jnp.round(truth * levels)
    share = _share(passed, group, mask)
    found, occupied = jnp.zeros_like(share), jnp.zeros_like(share)
    for v in range(levels + 1):
        here = (mask & (level == v)).astype(truth.dtype)
        of_level = _share(here, group, mask)
        both = _share(passed * here, group, mask)
        found += _term(both, share, of_level) + _term(of_level - both, 1 - share, of_level)
        occupied += of_level > 0
    programs = jnp.maximum(_column_sum(mask, group, mask), 1)
    excess = jnp.maximum(occupied - 1, 0) / (2 * programs) * miller_madow
    return jnp.maximum(found - excess, 0)


def gated(
    information: Float[Array, "rollout test"], covariance: Float[Array, "rollout test"]
) -> Float[Array, "rollout test"]:
    """information where covariance > 0, else 0: a test that the better programs fail earns nothing.

    Source: CoVer, the covariance gate (strict).
    """
    return jnp.where(covariance > 0, widen(information), 0)
