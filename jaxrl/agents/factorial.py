"""Credit for each of a few things in context together, from outcomes under subsets of them.

All subsets of one date are tried under the same market (task, backend, weights), so what they share
cancels in a contrast. The design is the half-fraction of even subsets: main effects stand apart
from effects of pairs, but three together cannot be told from the fourth alone.

Contributions of a thing over dates are pooled: m = mean + noise of variance s^2 / n, and its value
is z'b + u with b ~ N(0, sb^2 I), u ~ N(0, t^2), z features of its text, both variances by marginal
likelihood on a grid that has 0. Without evidence for a spread, values are exactly 0.

Source: MemTrial, from its own files.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

# Variances of the prior that are tried, in squares of the residual's standard deviation.
GRID = (0.0, *np.geomspace(0.01, 10, 10).tolist())


def designed(count: int) -> tuple[int, ...]:
    """The masks that are tried for so many things; bit i: thing i is in. Those with an even number
    of bits; all of them below four things, where half of them would confuse things with pairs."""
    return tuple(mask for mask in range(2**count) if count < 4 or mask.bit_count() % 2 == 0)


def present(masks: Sequence[int], count: int) -> np.ndarray:
    """[mask, thing] -> 1 where it is in."""
    return np.array([[mask >> i & 1 for i in range(count)] for mask in masks], float)


def contributions(
    masks: Sequence[int], utilities: Sequence[float | None], count: int
) -> np.ndarray | None:
    """[thing] mean utility with it, less that without it; None if what is there cannot tell.

    By least squares on an intercept and main effects, which for a whole design is the difference of
    means; where drafts are missing (None) a difference of means would be biased.
    """
    known = [(mask, u) for mask, u in zip(masks, utilities, strict=True) if u is not None]
    if not known:
        return None
    table = np.column_stack([np.ones(len(known)), present([mask for mask, _ in known], count)])
    if np.linalg.matrix_rank(table) <= count:
        return None
    return np.linalg.lstsq(table, np.array([u for _, u in known]), rcond=None)[0][1:]


def by_outcome(used: Sequence[Sequence[int]], utilities: Sequence[float], count: int) -> np.ndarray:
    """[thing] mean utility of where it was used, less that of where it was not: credit without a
    design, which takes on whatever else was different there. NaN for what was always or never in.
    """
    table = np.zeros((len(used), count), bool)
    for row, things in enumerate(used):
        table[row, list(things)] = True
    values = np.asarray(utilities, float)
    with np.errstate(invalid="ignore"):
        inside = (values @ table) / table.sum(0)
        outside = (values @ ~table) / (~table).sum(0)
    return inside - outside


def components(vectors: np.ndarray, size: int) -> np.ndarray:
    """[thing, size] principal components of [thing, feature], scaled to a mean square length of 1;
    fewer where there are fewer."""
    centred = vectors - vectors.mean(0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    found = (left * scale)[:, :size]
    return found / max(float(np.sqrt((found**2).sum(1).mean())), 1e-12)


@dataclasses.dataclass(frozen=True)
class Pooled:
    """Values of things, seen or not."""

    values: np.ndarray  # [thing] posterior mean
    by_text: float  # sb^2, in squares of the residual's standard deviation
    own: float  # t^2
    residual: float  # s; 0: too few readings to tell


def pool(
    readings: Mapping[int, Sequence[float]], dates: int, features: np.ndarray, *, content: bool
) -> Pooled:
    """Pool readings {thing: one a date}, each centred over its date, of ``dates`` dates.

    s^2 is the variance within things, with N - H - (dates - 1) degrees of freedom. ``content``:
    may the features tell? Else things are exchangeable and an unseen one has value 0.
    """
    total, nothing = len(features), np.zeros(len(features))
    seen = sorted(readings)
    freedom = sum(map(len, readings.values())) - len(seen) - (dates - 1)
    if freedom <= 0:
        return Pooled(nothing, 0.0, 0.0, 0.0)
    means = np.array([np.mean(readings[i]) for i in seen])
    within = sum(float(np.var(readings[i])) * len(readings[i]) for i in seen)
    residual = (within / freedom) ** 0.5
    if residual == 0:
        return Pooled(_scatter(means, seen, total), 0.0, 0.0, 0.0)
    noise = np.diag([1 / len(readings[i]) for i in seen])
    kernel, one = features @ features.T, np.eye(total)
    prior = kernel[np.ix_(seen, seen)]
    tried = np.array([(b, t) for b in (GRID if content else (0.0,)) for t in GRID])
    by_text, own = tried.T[:, :, None, None]
    spreads = by_text * prior + own * np.eye(len(seen)) + noise
    scaled = means / residual
    solved = np.linalg.solve(spreads, np.broadcast_to(scaled[:, None], (*spreads.shape[:2], 1)))
    solved = solved[..., 0]
    likelihood = -np.linalg.slogdet(spreads)[1] - solved @ scaled
    best = int(np.argmax(likelihood))
    (b, t), weights = tried[best], solved[best]
    values = (b * kernel + t * one)[:, seen] @ weights
    return Pooled(values * residual, b, t, residual)


def _scatter(values: np.ndarray, places: Sequence[int], total: int) -> np.ndarray:
    whole = np.zeros(total)
    whole[list(places)] = values
    return whole


def fall_back(gains: Sequence[float], scale: float, reference: float, points: int = 201) -> float:
    """The share of acting that stays with the reference, where nothing is trusted: of ``points``
    shares q the one with the most (1 - q) mean gain - l KL(q || reference), l = scale (sigma / n +
    1e-6) / sqrt(n) for n past gains of the mean draft over the reference; ``reference`` itself
    before there are two."""
    if len(gains) < 2:
        return reference
    n, sigma = len(gains), float(np.std(gains, ddof=1))
    weight = scale * (sigma / n + 1e-6) / n**0.5
    q = np.linspace(0, 1, points)
    rest = 1 - q
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.where(q > 0, q * np.log(q / reference), 0.0)
        kl = kl + np.where(rest > 0, rest * np.log(rest / (1 - reference)), 0.0)
    return float(q[np.argmax(rest * float(np.mean(gains)) - weight * kl)])
