"""What an attempt needs besides a place among those under way: a permit of each unit.

    spool_bytes   bytes on disk of what was sealed and that no checkpoint covers yet
    judge_calls   verdicts that ask something which costs, at once
    sandboxes     processes that run programs, at once

A lease is the admission, and needs all of them. The ledger counts what is held from what it knows
anyway: attempts that are leased, and sealed samples. So there is nothing to give back: a permit
ends with its attempt, by a seal, a failure, or when the lease runs out. An attempt that was taken
from its worker (by the clock, a new epoch, its group's end) holds none, though the worker learns
that only at its next call.

Over the bytes nothing begins, and what is under way goes on and may be sealed. But a trainer that
waits needs whole groups: while it says so, the groups that it lacks may begin, so that no limit is
too small (``jaxrl.pool.waiting``). Only numbers here.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jaxrl.pool.contract import Questions

HELD_WHOLE = ("judge_calls", "sandboxes")  # one of each by every attempt, while it is under way
UNITS = ("spool_bytes", *HELD_WHOLE)

# Seconds for which a ledger believes that a trainer waits.
BELIEVED_S = 10.0


class Used(NamedTuple):
    """What is held now."""

    attempts: int  # under way, of groups that are wanted
    verdicts: int  # 1 while the trainer judges, or waits for a permit to
    spool_bytes: int


@dataclasses.dataclass(frozen=True)
class Permits:
    """How many there are of each unit; 0: any number, and they are not counted."""

    spool_bytes: int = 0
    judge_calls: int = 0
    sandboxes: int = 0

    def __bool__(self) -> bool:
        return bool(self.spool_bytes or self.judge_calls or self.sandboxes)

    def rooms(self, used: Used) -> dict[str, int]:
        """Of each unit that is held for whole attempts, how many are left; below 0 where the
        trainer waits for one."""
        held = used.attempts + used.verdicts
        limits = {unit: vars(self)[unit] for unit in HELD_WHOLE}
        return {unit: limit - held for unit, limit in limits.items() if limit}

    def shut(self, used: Used) -> bool:
        """Whether so much lies on disk that nothing begins."""
        return 0 < self.spool_bytes <= used.spool_bytes

    def held(self, used: Used) -> dict[str, int]:
        """How many of each unit that has a limit are held."""
        each = used.attempts + used.verdicts
        found = {"spool_bytes": used.spool_bytes, "judge_calls": each, "sandboxes": each}
        return {unit: found[unit] for unit in UNITS if vars(self)[unit]}


def permits_for(limits: Mapping[str, int], source: Questions) -> Permits:
    """What attempts at a source's tasks need a permit for, of ``limits`` by unit (0: none).

    Where whole groups are judged the trainer does so, one after the other: their attempts hold
    none, and no limit is too small. ValueError for a unit that is unknown, or that the source does
    not need.
    """
    if unknown := sorted({*source.needs} - {*HELD_WHOLE}):
        raise ValueError(
            f"the task source needs {', '.join(unknown)}; allowed: {', '.join(HELD_WHOLE)}"
        )
    for unit in HELD_WHOLE:
        if limits[unit] and unit not in source.needs:
            raise ValueError(
                f"pool.{unit}={limits[unit]!r}; allowed: 0 (no verdict of "
                f"{type(source).__module__} needs one)"
            )
    if source.grouped:
        return Permits(limits["spool_bytes"])
    return Permits(**{unit: limits[unit] for unit in UNITS})
