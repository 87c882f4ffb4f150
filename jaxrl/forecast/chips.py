"""What is published of each TPU, and the devices of a named slice without its hardware.

    slice = <chip>:<extents>[*<slices>]     v5e:2x2, v5p:4x4x8, v6e:16x16, tpu7x:2x2x2, v5p:8x8x8*2

``libtpu`` holds the whole compiler for TPUs. It describes the devices of a slice, for which a
jitted function is compiled as on the slice itself. Nothing can be executed.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

GIB = 2.0**30

# Read by libtpu when it is loaded; said so that it looks for no metadata server, no other process
# of its own and no hardware.
ENVIRONMENT = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process dies on the first one's lock
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one device (half a chip of tpu7x), bytes and operations a second."""

    kind: str  # as the compiler calls it
    flops: float  # bfloat16
    hbm_bytes: float  # bandwidth
    hbm_gib: float  # capacity
    link_bytes: float  # one way over one port of the interconnect
    network_bytes: float  # to devices of other slices, one way
    clock_hz: float  # of the compiler's cycles
    dimensions: int  # of the torus
    wraps: int  # an extent that is a multiple of this closes to a ring
    hosts_devices: int  # devices of a host


# Peaks, bandwidths and capacities: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}, read
# 2026-11-29. A port's bytes one way are the chip's bidirectional interconnect over twice its ports:
# v5e 400 GB/s and 4 ports, v5p 1200 and 6, v6e 800 and 4, tpu7x 1200 and 6 for two devices, which
# share them. Network: v5e 2 x 100 Gb/s and v6e 4 x 200 Gb/s for the 8 chips of a host, v5p 50 Gb/s
# a chip, tpu7x 100 Gb/s a chip. Rings: 2D slices wrap at 16, 3D slices of whole 4x4x4 cubes.
# Clocks are those with which the compiler's cycles of a large matmul come to the peak.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip("TPU v5 lite", 197e12, 819e9, 16, 50e9, 3.125e9, 1.5e9, 2, 16, 8),
        "v5p": Chip("TPU v5", 459e12, 2765e9, 95, 100e9, 6.25e9, 1.75e9, 3, 4, 4),
        "v6e": Chip("TPU v6 lite", 918e12, 1640e9, 32, 100e9, 12.5e9, 1.75e9, 2, 16, 8),
        "tpu7x": Chip("TPU7x", 1153e12, 3690e9, 96, 50e9, 6.25e9, 1.9e9, 3, 4, 8),
    }
)
ALIASES = MappingProxyType({"v7x": "tpu7x", "v5": "v5p"})


class NoCompilerError(RuntimeError):
    """libtpu is not installed."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A named slice, or several equal ones joined by the network."""

    name: str
    chip: Chip
    extents: tuple[int, ...]
    slices: int

    @property
    def devices(self) -> int:
        """Devices of all slices."""
        each = 2 if self.chip is CHIPS["tpu7x"] else 1
        return each * math.prod(self.extents) * self.slices


def read_slice(name: str) -> Slice:
    """The slice of a name. Raises ValueError naming what is allowed."""
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?", name)
    known = f"<chip>:<extents>[*<slices>] with a chip of {', '.join(CHIPS)} (v5p:4x4x8, v5e:2x2*2)"
    if not found:
        raise ValueError(f"slice={name!r}; allowed: {known}")
    called, shape, slices = found.groups()
    called = ALIASES.get(called, called)
    if called not in CHIPS:
        raise ValueError(f"slice={name!r}: the chip {called!r} is unknown; allowed: {known}")
    chip, extents = CHIPS[called], tuple(int(x) for x in shape.split("x"))
    if len(extents) != chip.dimensions or min(extents) < 1:
        raise ValueError(
            f"slice={name!r}: extents {shape}; allowed for {called}: {chip.dimensions} of them, "
            "each at least 1"
        )
    count = int(slices or 1)
    if count < 1:
        raise ValueError(f"slice={name!r}: {count} slices; allowed: at least 1")
    return Slice(f"{called}:{shape}" + (f"*{count}" if count > 1 else ""), chip, extents, count)


def devices_of(where: Slice) -> list[Any]:
    """The slice's devices, which can be compiled for. Raises NoCompilerError without libtpu, and
    ValueError for a slice that the compiler does not know.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompilerError(
            "libtpu, which holds the compiler for TPUs, is not installed: "
            "pip install -c constraints.txt -e '.[aot]'"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    more: dict[str, Any] = {"num_slices": where.slices} if where.slices > 1 else {}
    if math.prod(where.extents) == 1:  # older libtpu takes a host to have more chips than one
        more["chips_per_host_bounds"] = (1, 1, 1)
    bare = where.name.split("*")[0]
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=bare, **more)
    except Exception as error:  # whatever the compiler's library raises: it has no type of its own
        raise ValueError(f"slice={where.name!r}: the compiler refuses it: {error}") from error
    devices = list(described.devices)
    if len(devices) != where.devices:
        raise ValueError(
            f"slice={where.name!r} has {len(devices)} devices, expected {where.devices}; allowed: "
            "slices that are whole"
        )
    return devices


def links(where: Slice, coordinates: list[tuple[int, ...]]) -> int:
    """Ports over which each of these devices can send at once to the others of the group: two in
    each dimension in which they differ and which closes to a ring, else one; at least one.
    """
    count = 0
    for axis, extent in enumerate(where.extents):
        among = len({place[axis] for place in coordinates})
        ring = extent % where.chip.wraps == 0 and among == extent
        count += 0 if among == 1 else 2 if ring else 1
    return max(count, 1)
