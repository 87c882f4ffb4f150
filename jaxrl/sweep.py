"""Lists of overrides for an experiment's ``sweep()``: all combinations, side by side, or drawn.

An override is a dict of dotted config fields. ``config`` among its keys takes the place of the
experiment's BASE for that run. The lists are plain, so that a comprehension serves as well.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Overrides = dict[str, Any]


def grid(values: Mapping[str, Sequence[Any]]) -> list[Overrides]:
    """All combinations; the last field turns fastest."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def zipped(values: Mapping[str, Sequence[Any]]) -> list[Overrides]:
    """First values together, second values together, ... ValueError for different lengths."""
    lengths = {field: len(row) for field, row in values.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{lengths} values; allowed: as many of each field")
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def drawn(values: Mapping[str, Any], runs: int, seed: int) -> list[Overrides]:
    """``runs`` random overrides, the same for the same seed: of a sequence one of its entries, of
    ``uniform`` and ``log_uniform`` a number. More runs keep those that were drawn before."""
    dice = random.Random(seed)

    def draw(kind: Any) -> Any:
        return kind(dice) if callable(kind) else dice.choice(kind)

    return [{field: draw(kind) for field, kind in values.items()} for _ in range(runs)]


def uniform(low: float, high: float) -> Callable[[random.Random], float]:
    """A number between the two, for ``drawn``."""
    return lambda dice: dice.uniform(low, high)


def log_uniform(low: float, high: float) -> Callable[[random.Random], float]:
    """A positive number whose logarithm is uniform, with three digits, for ``drawn``. ValueError
    unless 0 < low <= high."""
    if not 0 < low <= high:
        raise ValueError(f"low={low!r}, high={high!r}; allowed: 0 < low <= high")
    return lambda dice: float(f"{math.exp(dice.uniform(math.log(low), math.log(high))):.3g}")


def crossed(*lists: Sequence[Overrides]) -> list[Overrides]:
    """Each of the first list with each of the second, and so on; later ones win."""
    return [
        {field: value for part in parts for field, value in part.items()}
        for parts in itertools.product(*lists)
    ]
