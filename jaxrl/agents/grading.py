"""The arithmetic of MiMo-V2.6's graders on the host: what a group's grades do to its advantages.

The same formulas as jaxrl/kernels/grades.py, which the algorithm ``mimo`` uses on the device; the
tests hold one against the other.
"""

from collections.abc import Sequence

import numpy as np

TIED = 1e-6  # qualities that differ by less are equal


def centred(reward: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """R - mean(R) over the rollouts that count; 0 for the others."""
    mean = reward[counted].mean() if counted.any() else 0.0
    return np.where(counted, reward - mean, 0.0)


def redistributed(
    quality: np.ndarray, passed: np.ndarray, counted: np.ndarray, cap: float
) -> tuple[np.ndarray, float, bool]:
    """Advantages of a group whose passes share theirs by quality f in (0, 1]; they sum to 0.

        A = R - mean(R), lam = min(sum_P A / sum_P f A, cap), A_i <- lam f_i A_i on P, re-centred

    Returns them, lam, and whether the cap held. With f tied on the passes A stays as it is.
    """
    passes = passed & counted
    base = centred(passes.astype(float), counted)
    f = np.where(passes, quality, 0.0)
    share, spent = float(base[passes].sum()), float((f * base)[passes].sum())
    lam = min(share / spent, cap) if spent > 0 else 0.0
    capped = bool(spent > 0 and share / spent > cap)
    tied = not passes.any() or float(np.abs(f[passes] - f[passes].mean()).sum()) <= TIED
    moved = base if tied else np.where(passes, lam * f * base, base)
    return centred(moved, counted), lam, capped


def product(
    solution: np.ndarray, behaviour: np.ndarray, passed: np.ndarray, counted: np.ndarray
) -> np.ndarray:
    """Advantages of R = R_test S_sol S_beh: a failure stays 0, and R is at most R_test."""
    return centred(np.where(passed & counted, solution * behaviour, 0.0), counted)


def order_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean difference between the grades that the same rollouts got in two orders."""
    return float(np.mean(np.abs(np.subtract(one, other)))) if len(one) else 0.0


def length_premium(plain: Sequence[float], padded: Sequence[float]) -> float:
    """Mean of what a rollout gains by words that say nothing: padded twin less plain."""
    return float(np.mean(np.subtract(padded, plain))) if len(plain) else 0.0
