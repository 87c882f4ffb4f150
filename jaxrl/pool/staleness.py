"""How old samples may be: how many groups to open, whether waiting will do, and what dropping
changes.

A version is the step after which its weights were published; a token is ``step - version`` steps
old when its step is taken, at most K. A batch is B groups. Only numbers here, so that each rule can
be tried on random traces.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.pool.rollout import ACTION, INJECTED, Rollout, Version


def room(versions: Sequence[int], step: int, batch: int, limit: int) -> int:
    """How many groups may be opened before ``step`` takes its batch, beside live ones of these
    versions: with them (K + 1) B are under way, which is one batch for each version that a step may
    use."""
    return (limit + 1) * batch - len(versions)


def waiting_room(versions: Sequence[int], newest: int, step: int, batch: int, limit: int) -> int:
    """``room`` where nobody may grow too old: of the version ``newest``, only so many that each
    deadline can still be met (see ``feasible``)."""
    least = room(versions, step, batch, limit)
    for j in range(max(newest - step + limit, 0), limit + 1):
        due = sum(version <= step - limit + j for version in versions)
        least = min(least, (j + 1) * batch - due)
    return least


def feasible(versions: Sequence[int], step: int, batch: int, limit: int) -> bool:
    """Whether all live groups of these versions can be consumed in time, from ``step`` on, B a
    step, oldest first: for each j in 0..K at most (j + 1) B are due within j + 1 steps, and none is
    too old already."""
    if any(version < step - limit for version in versions):
        return False
    return all(
        sum(version <= step - limit + j for version in versions) <= (j + 1) * batch
        for j in range(limit + 1)
    )


def ages(rollout: Rollout, step: int, resumed: Version, limit: int) -> np.ndarray:
    """Steps that each sampled token's weights are behind.

    Weights of a lineage that was given up (of an epoch before ``resumed``'s and a later step) count
    as K old, never as negative.
    """
    known = [
        limit
        if (version.epoch < resumed.epoch and version.step > resumed.step) or version.step > step
        else step - version.step
        for version in rollout.versions
    ]
    sampled = rollout.version_index[rollout.kind == ACTION]
    return np.array(known, np.int64)[sampled] if sampled.size else np.zeros(0, np.int64)


def untrain_old(rollout: Rollout, oldest: int) -> tuple[Rollout, int]:
    """The rollout with its tokens of versions before ``oldest`` no longer trained on (kind
    INJECTED), and how many those are."""
    old = np.array([version.step < oldest for version in rollout.versions] + [False])
    index = np.minimum(rollout.version_index, len(rollout.versions))
    hit = (rollout.kind == ACTION) & old[index]
    if not hit.any():
        return rollout, 0
    kind = np.where(hit, INJECTED, rollout.kind).astype(np.uint8)
    return dataclasses.replace(rollout, kind=kind), int(hit.sum())


@dataclasses.dataclass
class DropMeter:
    """What dropping old groups does to what is trained on: slow groups are the hard ones.

    Sums over groups that were consumed, and over those that were dropped: log seconds from being
    opened to being sealed, and mean rewards where they are known.
    """

    consumed: int = 0
    dropped: int = 0
    consumed_log_s: float = 0.0
    dropped_log_s: float = 0.0
    consumed_rewarded: int = 0
    dropped_rewarded: int = 0
    consumed_reward: float = 0.0
    dropped_reward: float = 0.0

    def add(self, seconds: float, rewards: Sequence[float], *, dropped: bool) -> None:
        """Count a group by its seconds and the rewards that are known of its samples."""
        log_s = math.log(max(seconds, 1e-3))
        reward = math.fsum(rewards) / len(rewards) if rewards else 0.0
        if dropped:
            self.dropped += 1
            self.dropped_log_s += log_s
            self.dropped_rewarded += bool(rewards)
            self.dropped_reward += reward
        else:
            self.consumed += 1
            self.consumed_log_s += log_s
            self.consumed_rewarded += bool(rewards)
            self.consumed_reward += reward

    def readings(self) -> dict[str, float]:
        """``drop_frac`` of all groups; ``drop_log_seconds_shift`` and ``drop_reward_shift``: mean
        over the consumed ones minus mean over all. 0 while nothing was dropped."""
        return {
            "drop_frac": self.dropped / max(self.consumed + self.dropped, 1),
            "drop_log_seconds_shift": _shift(
                self.consumed, self.consumed_log_s, self.dropped, self.dropped_log_s
            ),
            "drop_reward_shift": _shift(
                self.consumed_rewarded,
                self.consumed_reward,
                self.dropped_rewarded,
                self.dropped_reward,
            ),
        }

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "DropMeter":
        """The inverse of ``state``."""
        return cls(**state)


def _shift(kept: int, kept_sum: float, lost: int, lost_sum: float) -> float:
    if not (kept and lost):
        return 0.0
    return kept_sum / kept - (kept_sum + lost_sum) / (kept + lost)
