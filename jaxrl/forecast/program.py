"""What a compiled TPU program does, read from its optimised text, with loop trips counted.

XLA's own cost analysis counts a loop's body once, and tells nothing of collectives. Here each
computation is walked as often as it runs:

    cycles       the compiler's own estimate of each operation; none for collectives, and none for
                 the inside of Pallas kernels
    flops        2 x products of matrix products (dots, and the convolutions they are turned into)
    hbm_bytes    operands read and results written in HBM; what lies in VMEM (memory space 1) is
                 free. Of an operand that is only sliced, the slices are read; an update in place
                 writes the update.
    collectives  by kind and by the devices that take part: how often, and the bytes of the result
                 on each device

A trip count that the program does not hold (a loop until enough sequences have ended) is taken for
1, and counted in ``unknown_trips``.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1.0),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2.0),
    **dict.fromkeys(("s32", "u32", "f32"), 4.0),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8.0),
    **dict.fromkeys(("s4", "u4"), 0.5),
}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
UNKNOWN_CYCLES = 1 << 60  # the compiler writes the largest integer for what it does not know
SLICES = ("dynamic-slice", "slice", "gather")
# Move no bytes of their own: names for what is there, or counted where they end or where they call.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "partition-id replica-id opt-barrier iota".split()
)

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of the program's text."""

    dtype: str
    dimensions: tuple[int, ...]
    space: int  # 0: HBM, 1: VMEM, others: scalar memory, flags, the host

    @property
    def bytes(self) -> float:
        """Without what tiles pad."""
        return BYTES.get(self.dtype, 0.0) * math.prod(self.dimensions)

    @property
    def hbm(self) -> float:
        """Its bytes if they lie in HBM."""
        return self.bytes if self.space == 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    made: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes, metadata, backend's settings
    text: str  # what stands between the parentheses
    root: bool

    def attribute(self, name: str) -> str | None:
        """A computation's name, or a list in braces, after ``name=``."""
        found = re.search(rf"\b{name}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.rest)
        return None if found is None else found.group(1) or found.group(2)


@dataclasses.dataclass
class Computation:
    """Its instructions by name, in order."""

    name: str
    entry: bool
    instructions: dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same groups of devices."""

    kind: str
    groups: Groups
    count: float
    bytes: float  # of the results on each device, all together
    name: str  # where the source asked for the largest


@dataclasses.dataclass
class Counted:
    """What the whole program does on each device."""

    cycles: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    kernels: float = 0.0  # calls of Pallas kernels
    unknown_trips: int = 0
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    operations: dict[str, float] = dataclasses.field(default_factory=dict)  # source -> cycles

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Count and bytes of each kind of collective."""
        found: dict[str, dict[str, float]] = {}
        for one in self.collectives:
            total = found.setdefault(one.kind, {"count": 0.0, "bytes": 0.0})
            total["count"] += one.count
            total["bytes"] += one.bytes
        return found


def closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"no closing parenthesis in {text[start : start + 80]!r}")


def arrays(shape: str) -> tuple[Array, ...]:
    """``(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, f32[])`` -> its arrays."""
    found = []
    for dtype, sizes, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape):
        space = re.search(r"S\((\d+)\)", layout)
        dimensions = tuple(int(size) for size in sizes.split(",") if size)
        found.append(Array(dtype, dimensions, int(space.group(1)) if space else 0))
    return tuple(found)


def instruction(line: str) -> Instruction | None:
    """One line of the program's text; None if it is none."""
    found = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if not found:
        return None
    body = line[found.end() :]
    cut = closing(body, 0) + 1 if body.startswith("(") else body.index(" ")
    called = re.match(r"\s*([\w\-]+)\(", body[cut:])
    if not called:
        return None
    start = cut + called.end() - 1
    end = closing(body, start)
    inside = body[start + 1 : end]
    names = re.findall(r"%([\w.\-]+)", inside)
    return Instruction(
        name=found.group(2),
        made=arrays(body[:cut]),
        opcode=called.group(1),
        operands=tuple(names),
        rest=body[end + 1 :],
        text=inside,
        root=bool(found.group(1)),
    )


def computations(text: str) -> dict[str, Computation]:
    """The program's computations by name."""
    found: dict[str, Computation] = {}
    current: Computation | None = None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head:
            current = Computation(head.group(2), bool(head.group(1)), {})
            found[current.name] = current
        elif current is not None and (made := instruction(line)):
            current.instructions[made.name] = made
    return found


def groups_of(rest: str) -> Groups:
    """Devices that exchange with one another: ``{{0,1},{2,3}}``, ``[2,2]<=[4]`` (0..3 in that
    shape), ``[2,2]<=[2,2]T(1,0)`` (transposed first), ``mesh['a'=2,'b'=2] {'b'}`` (along named axes
    of a mesh), or pairs of a permutation.
    """
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", rest)
    if listed:
        inner = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return tuple(tuple(int(x) for x in part.split(",") if x) for part in inner)
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if not counted:
        return _along_axes(rest)
    shape, source = (tuple(int(x) for x in counted.group(i).split(",")) for i in (1, 2))
    numbers = np.arange(math.prod(source)).reshape(source)
    if counted.group(3):
        numbers = numbers.transpose([int(x) for x in counted.group(3).split(",")])
    return tuple(tuple(int(x) for x in row) for row in numbers.reshape(shape))


def _along_axes(rest: str) -> Groups:
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\))\))? ?\{([^}]*)\}", rest
    )
    if not named:
        return ()
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    among = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", named.group(3))]
    kept = [axis for axis in range(len(sizes)) if axis not in among]
    width = math.prod(numbers.shape[axis] for axis in among)
    rows = numbers.transpose([*kept, *among]).reshape(-1, width)
    return tuple(tuple(int(x) for x in row) for row in rows)


@functools.lru_cache(maxsize=4096)
def positions(
    out: int, size: int, stride: int, low: int, dilate: int, kernel: int, have: int
) -> int:
    """Pairs of an output and a kernel place that meet an element: those on padding or between
    dilated elements cost nothing.
    """
    place = np.arange(out)[:, None] * stride + np.arange(size)[None, :] * kernel - low
    return int(((place >= 0) & (place % dilate == 0) & (place // dilate < have)).sum())


def _window(text: str, field: str, axes: int, default: str) -> list[str]:
    found = re.search(rf"\b{field}=([\w\-x]+)", text)
    return found.group(1).split("x") if found else [default] * axes


def product_flops(one: Instruction, shapes: list[Array]) -> float:
    """2 x the products of a dot or a convolution, by its shapes."""
    out, (left, right) = one.made[0], shapes[:2]
    if one.opcode == "dot":
        axes = one.attribute("lhs_contracting_dims") or ""
        depth = math.prod(left.dimensions[int(axis)] for axis in axes.split(",") if axis)
        return 2.0 * math.prod(out.dimensions) * depth
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    if not labels:
        return 0.0
    of_left, of_right, of_out = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", one.rest)
    text = window.group(1) if window else ""
    spatial = sorted(label for label in of_out if label.isdigit())
    sizes = [int(x) for x in _window(text, "size", len(spatial), "1")]
    strides = [int(x) for x in _window(text, "stride", len(spatial), "1")]
    lows = [int(x.split("_")[0]) for x in _window(text, "pad", len(spatial), "0_0")]
    dilates = [int(x) for x in _window(text, "lhs_dilate", len(spatial), "1")]
    kernels = [int(x) for x in _window(text, "rhs_dilate", len(spatial), "1")]
    pairs = 1
    for i, label in enumerate(spatial):
        extent = out.dimensions[of_out.index(label)]
        have = left.dimensions[of_left.index(label)]
        pairs *= positions(extent, sizes[i], strides[i], lows[i], dilates[i], kernels[i], have)
    rows = out.dimensions[of_out.index("b")] * out.dimensions[of_out.index("f")]
    return 2.0 * pairs * rows * right.dimensions[of_right.index("i")]


def trips(loop: Instruction, within: dict[str, Computation]) -> int | None:
    """How often a loop's body runs, if the program says so: by the compiler, or by a condition
    that compares with the one constant it holds what the body counts up to from 0.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(known.group(1))
    condition = within.get(loop.attribute("condition") or "")
    if condition is None:
        return None
    lines = list(condition.instructions.values())
    constants = [one.text for one in lines if one.opcode == "constant" and one.text.isdigit()]
    below = any("direction=LT" in one.rest for one in lines)
    called = [within.get(one.attribute("calls") or "") for one in lines]
    below |= any("direction=LT" in x.rest for c in called if c for x in c.instructions.values())
    if not below or len(constants) != 1:
        return None
    return math.ceil(
        int(constants[0]) / _stride(condition, within.get(loop.attribute("body") or ""))
    )


def _stride(condition: Computation, body: Computation | None) -> int:
    """What the body adds to the counter: 2 where the compiler took two turns together; 1 where it
    cannot be seen."""
    root = next((x for x in body.instructions.values() if x.root), None) if body else None
    counters = [
        int(found.group(1))
        for one in condition.instructions.values()
        if one.opcode == "get-tuple-element" and (found := re.search(r"index=(\d+)", one.rest))
    ]
    if body is None or root is None or len(counters) != 1 or counters[0] >= len(root.operands):
        return 1
    counted = body.instructions.get(root.operands[counters[0]])
    if counted is None or counted.opcode != "add":
        return 1
    added = [body.instructions[name] for name in counted.operands if name in body.instructions]
    steps = [one.text for one in added if one.opcode == "constant" and one.text.isdigit()]
    return max(int(steps[0]), 1) if steps else 1


def _starts(where: Computation) -> bool:
    """Whether a fusion starts a collective that others carry on."""
    return any('"AsyncCollectiveStart"' in one.rest for one in where.instructions.values())


class Walk:
    """One walk through a program."""

    def __init__(self, text: str) -> None:
        self.computations = computations(text)
        self.counted = Counted()
        self.found: dict[tuple[str, Groups], list[float]] = {}
        self.largest: dict[tuple[str, Groups], tuple[float, str]] = {}
        self.seen: set[str] = set()  # channels met in fusions of the computation that is walked
        self.started = {
            channel.group(1)
            for where in self.computations.values()
            if _starts(where)
            for one in where.instructions.values()
            if (channel := re.search(r"channel_id=(\d+)", one.rest))
        }

    def shapes(self, where: Computation, one: Instruction) -> list[Array]:
        """Arrays of the operands; a tuple counts as its first."""
        known = (where.instructions.get(name) for name in one.operands)
        return [operand.made[0] for operand in known if operand is not None and operand.made]

    def run(self, name: str, times: float, *, fused: bool) -> None:
        """Count a computation that runs so often; inside a fusion no bytes move."""
        where = self.computations.get(name)
        if where is None:
            return
        outside = self.seen
        if not fused:
            self.seen = set()
        for one in where.instructions.values():
            self.one(where, one, times, fused=fused)
        self.seen = outside

    def one(self, where: Computation, one: Instruction, times: float, *, fused: bool) -> None:
        """Count one instruction, and what it calls."""
        for cycles in re.findall(r'"estimated_cycles":"(\d+)"', one.rest):
            if int(cycles) < UNKNOWN_CYCLES:
                self.counted.cycles += times * int(cycles)
                source = re.search(r'op_name="([^"]*)"', one.rest)
                told = source.group(1) if source else one.opcode
                operations = self.counted.operations
                operations[told] = operations.get(told, 0.0) + times * int(cycles)
        if one.opcode in ("dot", "convolution"):
            self.counted.flops += times * product_flops(one, self.shapes(where, one))
        if 'custom_call_target="tpu_custom_call"' in one.rest:
            self.counted.kernels += times
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES and not (fused and self.again(where, one)):
            self.collective(kind, one, times, where)
        if not fused:
            self.counted.hbm_bytes += times * self.moved(where, one)
        self.called(one, times, fused=fused)

    def again(self, where: Computation, one: Instruction) -> bool:
        """Whether a collective inside a fusion is counted elsewhere: one that runs beside other
        operations stands in the fusion that starts it, in all those beside it (in loops too), and
        in the last.
        """
        channel = re.search(r"channel_id=(\d+)", one.rest)
        if channel is None:
            return False
        if channel.group(1) in self.started:
            return not _starts(where)
        met = channel.group(1) in self.seen
        self.seen.add(channel.group(1))
        return met

    def called(self, one: Instruction, times: float, *, fused: bool) -> None:
        """Count what an instruction calls."""
        if one.opcode == "while":
            known = trips(one, self.computations)
            self.counted.unknown_trips += known is None
            self.run(one.attribute("body") or "", times * (known or 1), fused=fused)
        elif one.opcode == "conditional":
            branches = one.attribute("branch_computations")
            names = re.findall(r"[\w.\-]+", branches) if branches else []
            names += [one.attribute(f"{side}_computation") or "" for side in ("true", "false")]
            for name in names:
                self.run(name, times, fused=fused)
        elif one.opcode in ("fusion", "call", "async-start"):
            name = one.attribute("calls") or one.attribute("to_apply") or ""
            self.run(name, times, fused=fused or one.opcode == "fusion")

    def collective(self, kind: str, one: Instruction, times: float, where: Computation) -> None:
        """Count a collective. One that starts gives its operand and its result: the larger is the
        result, but of a reduce-scatter. An all-reduce of which the computation keeps a slice is a
        reduce-scatter that the compiler wrote so.
        """
        sizes = [array.bytes for array in one.made]
        started = one.opcode.endswith("-start") and kind != "all-reduce"
        size = (
            (min(sizes[:2]) if kind == "reduce-scatter" else max(sizes)) if started else sum(sizes)
        )
        root = next((x for x in where.instructions.values() if x.root), None)
        if kind == "all-reduce" and "all-reduce-scatter" in where.name and root is not None:
            kind, size = "reduce-scatter", sum(array.bytes for array in root.made)
        key = kind, groups_of(one.rest)
        total = self.found.setdefault(key, [0.0, 0.0])
        total[0] += times
        total[1] += times * size
        source = re.search(r'op_name="([^"]*)"', one.rest)
        told = times * size, source.group(1) if source else one.name
        self.largest[key] = max(self.largest.get(key, told), told)

    def moved(self, where: Computation, one: Instruction) -> float:
        """HBM bytes that an instruction reads and writes."""
        if one.opcode in FREE or one.opcode.endswith("-done"):
            return 0.0
        shapes = self.shapes(where, one)
        written = sum(array.hbm for array in one.made)
        if one.opcode.endswith("-start"):  # its operand stands in the result too
            return max((array.hbm for array in one.made), default=0.0) * 2
        if one.opcode in SLICES:
            return 2 * written
        if one.opcode == "dynamic-update-slice":
            return 2 * shapes[1].hbm if len(shapes) > 1 else written
        inner = (
            self.computations.get(one.attribute("calls") or "") if one.opcode == "fusion" else None
        )
        if inner is None:
            return written + sum(array.hbm for array in shapes)
        return self._fused(inner, shapes, written)

    def _fused(self, inner: Computation, shapes: list[Array], written: float) -> float:
        """Of a fusion: operands that it only slices are read by slices; if it updates an operand in
        place, the update is written; what a collective under way carries through is not touched.
        """
        lines = list(inner.instructions.values())
        users: dict[str, list[Instruction]] = {}
        for line in lines:
            for name in line.operands:
                users.setdefault(name, []).append(line)
        read = 0.0
        for line in (line for line in lines if line.opcode == "parameter"):
            number = int(line.text)
            if number >= len(shapes) or not shapes[number].hbm:
                continue
            using = list(_through(users, line.name))
            if using and all(x.opcode in SLICES and x.operands[0] in y for x, y in using):
                read += sum(array.bytes for x, _ in using for array in x.made)
            elif using and all(
                x.opcode == "dynamic-update-slice" and x.operands[0] in y for x, y in using
            ):
                for x, _ in using:
                    update = inner.instructions[x.operands[1]].made[0].bytes
                    written -= x.made[0].bytes - update
            elif not all(_carries(x) for x, _ in using):
                read += shapes[number].hbm
        root = next((line for line in lines if line.root), None)
        for name in root.operands if root is not None and root.opcode == "tuple" else ():
            made = inner.instructions.get(name)
            if made is not None and (made.opcode == "parameter" or _carries(made)):
                written -= sum(array.hbm for array in made.made)
        moving = sum(
            array.hbm
            for line in lines
            if _starts(inner) and line.opcode in COLLECTIVES
            for array in line.made
        )
        return read + max(written, 0.0) + moving


def _carries(one: Instruction) -> bool:
    """Part of a collective that is under way: it moves no bytes of its own here."""
    return one.opcode in (*COLLECTIVES, "tuple") or '"AsyncCollective' in one.rest


def _through(
    users: dict[str, list[Instruction]], name: str
) -> Iterator[tuple[Instruction, tuple[str, ...]]]:
    """Who uses a value inside a fusion, seen through bitcasts; beside each the name it uses."""
    for user in users.get(name, []):
        if user.opcode == "bitcast":
            yield from _through(users, user.name)
        else:
            yield user, (name,)


def count(text: str) -> Counted:
    """What a program does on each device. Raises ValueError for a text without an entry."""
    walk = Walk(text)
    entry = next((one.name for one in walk.computations.values() if one.entry), None)
    if entry is None:
        raise ValueError("the program has no ENTRY computation")
    walk.run(entry, 1.0, fused=False)
    walk.counted.collectives = [
        Collective(kind, groups, count, size, walk.largest[kind, groups][1])
        for (kind, groups), (count, size) in walk.found.items()
    ]
    return walk.counted
