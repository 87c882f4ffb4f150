"""How many attempts may be under way at once: slowly more while engines have room, at once fewer
when they have not. Only numbers here, so that each rule can be tried on random traces.

Additive steps would be too slow for a limit that may be 8 or 8,000; both directions multiply, as in
prime-rl's controller of in-flight rollouts (grow by at most 1.25, trim at 0.8 of the KV cache, cut
at 0.9, aim at 0.7).
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from jaxrl.pool.pressure import Pressure

GROWTH = 1.25  # most that a look multiplies the limit with
BURST = 64  # most that a look adds to it
CUT = 0.75  # what a cut leaves at most, whatever the usage says
UNBOUNDED = 2**31 - 1  # attempts; nobody has so many

Name = TypeVar("Name")


class Move(enum.StrEnum):
    """What a look at the engines did to the limit."""

    HELD = "held"
    GREW = "grew"
    TRIMMED = "trimmed"  # nothing new begins until enough have ended
    CUT = "cut"  # those over the limit end now


@dataclasses.dataclass(frozen=True)
class Marks:
    """Shares of an engine's KV cache: 0 < target <= trim <= hard <= 1."""

    target: float  # below it the limit may grow; a trim aims here
    trim: float  # from here on it is trimmed
    hard: float  # from here on it is cut

    def __post_init__(self) -> None:
        if not 0 < self.target <= self.trim <= self.hard <= 1:
            told = (self.target, self.trim, self.hard)
            raise ValueError(f"marks={told}; allowed: 0 < target <= trim <= hard <= 1")


class Admission:
    """The limit of one gateway, from ``floor`` (a group's samples: less would be no group at all)
    to ``ceiling``. Without ``marks`` it is the ceiling, whatever engines say."""

    def __init__(self, floor: int, ceiling: int, start: int, marks: Marks | None) -> None:
        if not 1 <= floor <= ceiling:
            raise ValueError(f"floor={floor}, ceiling={ceiling}; allowed: 1 <= floor <= ceiling")
        self._floor, self._ceiling, self._marks = floor, ceiling, marks
        self._level = float(ceiling if marks is None else min(max(start, floor), ceiling))
        self._preempted: dict[int, int] = {}  # by each server, when it was looked at last
        self.counts: Counter[str] = Counter()
        # the fullest server, all that waits, and what was preempted, when that was told last
        self.told = Pressure(0.0, 0, 0)

    @property
    def adapts(self) -> bool:
        """Whether engines are to be asked."""
        return self._marks is not None

    @property
    def bounds(self) -> bool:
        """Whether there is a limit at all."""
        return self._ceiling < UNBOUNDED

    @property
    def limit(self) -> int:
        """Attempts that may be under way."""
        return int(self._level)

    def look(
        self, pressures: Sequence[Pressure | None], under_way: int, most: int | None = None
    ) -> Move:
        """Move the limit by what each server tells (None: nothing), always the same servers in the
        same order. ``under_way``: attempts now; ``most``: at most, since the look before.

        A preemption, or a server at the hard mark: cut, from what is under way. A server at the
        trim mark: trim to what would use the target. Else, if all are below the target, nothing
        waits, and attempts came up to the limit: grow. Where no server tells anything, hold.
        """
        new = self._newly(pressures)
        told = [one for one in pressures if one is not None]
        self.counts["untold"] += len(told) < len(pressures)
        if not told or self._marks is None:
            return Move.HELD
        marks, usage = self._marks, max(one.usage for one in told)
        waiting = sum(one.waiting for one in told)
        self.told = Pressure(usage, waiting, self.told.preempted + new)
        before, move = self.limit, Move.HELD
        if new or usage >= marks.hard:
            share = min(CUT, marks.target / max(usage, marks.target))
            self._lower(share * min(self._level, under_way))
            over = under_way > self.limit
            move = Move.CUT if over or self.limit < before else Move.HELD  # it is at the floor
        elif usage >= marks.trim and under_way <= before:  # else an earlier one is not done yet
            self._lower(marks.target / usage * min(self._level, under_way))
            move = Move.TRIMMED if self.limit < before else Move.HELD
        elif usage < marks.target and not waiting and self._reached(under_way, most):
            self._level = min(GROWTH * self._level, self._level + BURST, float(self._ceiling))
            move = Move.GREW if self.limit > before else Move.HELD
        self.counts[move.value] += 1
        return move

    def _reached(self, under_way: int, most: int | None) -> bool:
        return max(under_way, most or 0) >= self.limit

    def _lower(self, level: float) -> None:
        """Down to this level, not below the floor."""
        self._level = max(min(self._level, level), float(self._floor))

    def _newly(self, pressures: Sequence[Pressure | None]) -> int:
        """Preemptions since the last look. The first one only begins to count; a server that has
        counted fewer than before was started again."""
        new = 0
        for place, one in enumerate(pressures):
            if one is not None:
                before = self._preempted.get(place, one.preempted)
                new += one.preempted - (before if before <= one.preempted else 0)
                self._preempted[place] = one.preempted
        return new


def youngest(order: Mapping[Name, tuple[int, ...]], limit: int) -> list[Name]:
    """The attempts to end so that at most ``limit`` are left: whole groups, the youngest first.
    ``order``: of each attempt its group's age, older ones smaller; equal only in a group."""
    groups: dict[tuple[int, ...], list[Name]] = {}
    for name, group in order.items():
        groups.setdefault(group, []).append(name)
    ended: list[Name] = []
    for group in sorted(groups, reverse=True):
        if len(order) - len(ended) <= limit:
            break
        ended += groups[group]
    return ended


def unbounded() -> Admission:
    """As many as workers lease."""
    return Admission(1, UNBOUNDED, UNBOUNDED, None)
