"""What longest first is worth, on random traces with heavy tails: numbers only, no clock.

A trainer that takes B groups a step, an engine that works on so many samples at once, groups of
universes whose durations differ, each sample's besides. Expectations are learnt as the pool learns
them, and the order is that of the ledger's leases.
"""

import dataclasses
import heapq
import math
import random

import pytest

from jaxrl.pool import staleness
from jaxrl.pool.durations import Durations

UNIVERSES = (1.0, 2.0, 4.0, 16.0)  # seconds, medians
GROUPS, SAMPLES, SLOTS = 16, 8, 32
SPREAD = 0.4  # of log seconds, of a group and again of each sample
STEPS = 120


@dataclasses.dataclass
class Group:
    number: int
    version: int
    universe: str
    expected: float
    seconds: list[float]
    left: int = SAMPLES
    longest: float = 0.0


class World:
    """One run; ``longest`` first, or first come."""

    def __init__(self, seed: int, limit: int, longest: bool) -> None:
        self.seed, self.limit, self.longest = seed, limit, longest
        self.known, self.now, self.drawn = Durations(), 0.0, 0
        self.pending: list[tuple[tuple[float, ...], int]] = []  # order, sample
        self.running: list[tuple[float, int, int]] = []  # end, group, sample
        self.live: dict[int, Group] = {}
        self.idle, self.dropped, self.taken = 0.0, 0, 0

    def open(self, version: int) -> None:
        """The next group: a function of its number, so that both orders see the same trace."""
        number, chance = self.drawn, random.Random(f"{self.seed} {self.drawn}")
        self.drawn += 1
        place = chance.randrange(len(UNIVERSES))
        middle = UNIVERSES[place] * math.exp(SPREAD * chance.gauss(0, 1))
        seconds = [middle * math.exp(SPREAD * chance.gauss(0, 1)) for _ in range(SAMPLES)]
        expected = self.known.expected(f"{place}", f"{number}") if self.longest else 0.0
        self.live[number] = Group(number, version, f"{place}", expected, seconds)
        for sample in range(SAMPLES):
            heapq.heappush(self.pending, ((version, -expected, number, sample), number))
        self.lease()

    def lease(self) -> None:
        while self.pending and len(self.running) < SLOTS:
            order, number = heapq.heappop(self.pending)
            if number in self.live:
                sample = int(order[-1])
                end = self.now + self.live[number].seconds[sample]
                heapq.heappush(self.running, (end, number, sample))

    def until(self, when: float) -> None:
        """All seals up to a time."""
        while self.running and self.running[0][0] <= when:
            self.now, number, sample = heapq.heappop(self.running)
            if (group := self.live.get(number)) is not None:
                group.left -= 1
                group.longest = max(group.longest, group.seconds[sample])
                if not group.left:
                    self.known.learn(group.universe, f"{number}", group.longest)
            self.lease()
        self.now = when

    def run(self, step_s: float) -> None:
        for step in range(STEPS):
            for group in list(self.live.values()):
                if group.version < step - self.limit:  # dropped, and replaced
                    del self.live[group.number]
                    self.dropped += 1
            versions = [group.version for group in self.live.values()]
            for _ in range(staleness.room(versions, step, GROUPS, self.limit)):
                self.open(step)
            began = self.now
            while len(ready := [g for g in self.live.values() if not g.left]) < GROUPS:
                self.until(self.running[0][0])
            self.idle += self.now - began
            for group in sorted(ready, key=lambda g: (g.version, g.number))[:GROUPS]:
                del self.live[group.number]
                self.taken += 1
            self.until(self.now + step_s)


def run(limit: int, step_s: float, longest: bool) -> tuple[float, float]:
    """Shares over three seeds: of the time in which the trainer idles, of groups that are
    dropped."""
    worlds = [World(seed, limit, longest) for seed in range(3)]
    for world in worlds:
        world.run(step_s)
    idle = sum(world.idle for world in worlds) / sum(world.now for world in worlds)
    dropped = sum(world.dropped for world in worlds)
    return idle, dropped / (dropped + sum(world.taken for world in worlds))


@pytest.mark.parametrize(
    ("limit", "first_come", "longest"),
    [
        (0, (0.733, 0.0), (0.718, 0.0)),
        (1, (0.382, 0.107), (0.392, 0.050)),
        (2, (0.333, 0.095), (0.293, 0.036)),
    ],
)
def test_longest_first_drops_half_as_much_or_less(limit, first_come, longest):
    """Measured (idle share, dropped share), 120 steps of 20 s, seeds 0 to 2, K = 0, 1, 2: what is
    dropped falls from 10.7 to 5.0 % at K = 1 and from 9.5 to 3.6 % at K = 2; the trainer idles 73.3
    -> 71.8, 38.2 -> 39.2 and 33.3 -> 29.3 % of the time. At K = 1 it waits a little longer, for
    groups that first come, first served drops: over 36 settings of this world (samples 4 or 8, 32
    or 64 slots, steps of 10 to 30 s) the dropped share never rose, and the idle share rose by up to
    0.023 at K = 1, and by at most 0.002 otherwise.
    """
    told = [run(limit, 20.0, order) for order in (False, True)]
    assert told == [pytest.approx(first_come, abs=0.005), pytest.approx(longest, abs=0.005)]
    assert told[1][1] <= told[0][1] / 2
