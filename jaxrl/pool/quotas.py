"""How many groups of a universe may be sampled at once, so that slow ones do not fill the pool."""

import math
import re
from collections.abc import Collection, Mapping, Sequence

# Draws that wait for room of their universe; with more, nothing is drawn until one is opened.
DEFERRED = 1024


class Quotas:
    """Pairs of a regular expression, searched in a universe's name, and the largest share of the
    groups that it may have under way; the first that is found counts, others have no bound.

    What counts is groups that are still sampled (OPEN): one that is READY waits for the trainer and
    takes up no engine, and if it counted, a batch of one universe could wait for itself.
    ValueError for a pair that is the first to match no universe.
    """

    def __init__(self, pairs: Sequence[tuple[str, float]], universes: Collection[str]) -> None:
        self._shares: dict[str, float] = {}
        first = {name: _first(pairs, name) for name in universes}
        for place, (pattern, share) in enumerate(pairs):
            if place not in first.values():
                raise ValueError(
                    f"pool.quotas: {pattern!r} is the first to match no universe; allowed: to "
                    f"match one of {sorted(universes)}"
                )
            self._shares |= {name: share for name, at in first.items() if at == place}

    def full(self, opened: Mapping[str, int], whole: int) -> set[str]:
        """The universes that may have no further group, of ``whole`` groups in all; each may have
        one."""
        return {
            name
            for name, share in self._shares.items()
            if opened.get(name, 0) >= max(1, math.floor(share * whole))
        }


def _first(pairs: Sequence[tuple[str, float]], name: str) -> int:
    """Which pair is the first that is found in a name; -1 for none."""
    return next((at for at, (pattern, _) in enumerate(pairs) if re.search(pattern, name)), -1)
