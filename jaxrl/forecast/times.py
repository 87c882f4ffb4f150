"""Three counted times of a program on a slice: what computes, what HBM moves, what links move.

    compute       executed FLOPs of a device / peak
    hbm           bytes of a device read and written / bandwidth
    interconnect  sum over collectives of bytes sent / what a device's ports carry

The step takes the largest of the three if the other two hide behind it, and their sum if nothing
hides: the truth lies between. Of a result of b bytes in a group of n devices

    all-gather          b (n - 1) / n
    all-reduce          2 b (n - 1) / n
    reduce-scatter      b (n - 1)                b being the part that a device keeps
    all-to-all          b max((n - 1) / n, e / 4)   e: the largest extent that the group spans
    collective-permute  b

go over the ports of the dimensions that the group spans (``chips.links``). Of a group on several
slices, what is left after summing inside a slice goes over the network too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl.forecast.chips import Slice, links
from jaxrl.forecast.program import Collective, Counted


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a device is: its chip's coordinates, and its slice."""

    coordinates: tuple[int, ...]
    slice_index: int


def places(devices: Sequence[Any]) -> list[Place]:
    """Of the mesh's devices, in the order in which programs count them."""
    # Devices of a single slice do not tell which one it is.
    return [
        Place(tuple(x.coords), x.slice_index if hasattr(x, "slice_index") else 0) for x in devices
    ]


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds on each device."""

    compute: float
    hbm: float
    interconnect: float

    @property
    def longest(self) -> float:
        """All that can hide is hidden."""
        return max(self.compute, self.hbm, self.interconnect)

    @property
    def together(self) -> float:
        """Nothing hides."""
        return self.compute + self.hbm + self.interconnect

    @property
    def bound(self) -> str:
        """Which is the longest."""
        named = dataclasses.asdict(self)
        return max(named, key=lambda name: named[name])


def sent(kind: str, size: float, members: int, extent: int) -> float:
    """Bytes of a collective that pass a device's ports, by the size of its result."""
    if members < 2:
        return 0.0
    share = (members - 1) / members
    return (
        size
        * {
            "all-gather": share,
            "all-reduce": 2 * share,
            "reduce-scatter": float(members - 1),
            "all-to-all": max(share, extent / 4),
            "ragged-all-to-all": max(share, extent / 4),
            "collective-permute": 1.0,
        }[kind]
    )


def _members(one: Collective, count: int) -> tuple[int, ...]:
    """The devices of the first group; of a permutation, those that the first is linked with."""
    if not one.groups:
        return tuple(range(count))
    if one.kind != "collective-permute":
        return one.groups[0]
    found = set(one.groups[0])
    while more := [x for pair in one.groups if found & set(pair) for x in pair if x not in found]:
        found |= set(more)
    return tuple(sorted(found))


def collective_seconds(one: Collective, where: Slice, place: Sequence[Place]) -> float:
    """All collectives of one kind over the same groups."""
    group = [place[i] for i in _members(one, len(place))]
    slices = {x.slice_index for x in group}
    inside = [x.coordinates for x in group if x.slice_index == group[0].slice_index]
    axes = list(zip(*inside, strict=True))
    extent = max((len(set(axis)) for axis in axes), default=1)
    ports = links(where, inside) * where.chip.link_bytes
    passing = sent(one.kind, one.bytes, len(inside), extent) / ports
    if len(slices) > 1:
        shared = 1 if one.kind == "collective-permute" else len(inside)
        passing += sent(one.kind, one.bytes / shared, len(slices), 1) / where.chip.network_bytes
    return passing


def times(flops: float, counted: Counted, where: Slice, place: Sequence[Place]) -> Times:
    """``flops`` are those of one device."""
    linked = sum(collective_seconds(one, where, place) for one in counted.collectives)
    return Times(flops / where.chip.flops, counted.hbm_bytes / where.chip.hbm_bytes, linked)
