"""Tensors of a published checkpoint, read where they lie: the headers first, then row by row.

    <8 bytes: length of the header> <header: JSON, name -> dtype, shape, data_offsets> <data>

in one ``model.safetensors``, or in shards that ``model.safetensors.index.json`` maps names to.
Everything that a header says is checked against the file before a byte of data is read, and nothing
is ever unpickled: a checkpoint that holds pickled weights only is refused.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxrl.model.formats import load_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
ALIGNMENT = 64  # bytes
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
READABLE = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    file: epath.Path
    start: int  # byte of the file
    dtype: str  # as the header names it
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint by published name: what they are, and a reader of rows.

    ``rows(name, first, last)`` gives rows ``first .. last - 1`` as they are stored.
    """

    shapes: dict[str, tuple[int, ...]]
    unreadable: dict[str, str]  # name -> its type and those that are allowed
    rows: Callable[[str, int, int], np.ndarray]


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that begins where jax on CPU can use it as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def open_tensors(path: epath.Path) -> Tensors:
    """The tensors of a directory. Raises ValueError naming the file and what is wrong with it."""
    held = _sharded(path) if (path / INDEX).exists() else _single(path)

    def rows(name: str, first: int, last: int) -> np.ndarray:
        stored = held[name]
        inner = math.prod(stored.shape[1:])
        dtype = READABLE[stored.dtype]
        made = aligned((last - first, *stored.shape[1:]), dtype)
        with stored.file.open("rb") as file:
            file.seek(stored.start + first * inner * dtype.itemsize)
            into: Any = file  # every path's file has it, whatever their common type says
            if into.readinto(made.reshape(-1).view(np.uint8)) != made.nbytes:
                raise ValueError(f"{stored.file} ends within {name}: it was cut while it was read")
        return made

    return Tensors(
        shapes={name: stored.shape for name, stored in held.items()},
        unreadable={
            name: f"dtype {stored.dtype}, allowed: {', '.join(READABLE)}"
            for name, stored in held.items()
            if stored.dtype not in READABLE
        },
        rows=rows,
    )


def _single(path: epath.Path) -> dict[str, Stored]:
    """The tensors of the one file of a directory."""
    if (path / SINGLE).exists():
        return _header(path / SINGLE)
    if pickled := sorted(file.name for pattern in PICKLED for file in path.glob(pattern)):
        raise ValueError(
            f"{path} holds pickled weights only ({', '.join(pickled)}), which can run code when "
            "they are read and are never opened; allowed: safetensors"
        )
    found = sorted(file.name for file in path.glob("*.safetensors"))
    raise ValueError(
        f"{path}: {SINGLE} is missing, and so is {INDEX}"
        + (f" of {', '.join(found)}" if found else "")
    )


def _sharded(path: epath.Path) -> dict[str, Stored]:
    """The tensors of the shards that an index names; a shard is a plain name beside the index."""
    placed = load_json(path / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(x, str) for x in placed.values()):
        raise ValueError(f"{path / INDEX}: weight_map={placed!r}; allowed: tensor name -> file")
    files = sorted(set(placed.values()))
    for name in files:
        outside = "/" in name or "\\" in name or name in ("", ".", "..")
        if outside or not name.endswith(".safetensors"):
            raise ValueError(
                f"{path / INDEX}: weight_map names the file {name!r}; allowed: a .safetensors "
                "file beside the index"
            )
    if missing := [name for name in files if not (path / name).exists()]:
        raise ValueError(f"{path}: shards of {INDEX} are missing: {', '.join(missing)}")
    held = {name: _header(path / name) for name in files}
    faults = [f"{t} is not in {f}" for t, f in sorted(placed.items()) if t not in held[f]]
    faults += [
        f"{tensor} of {file} is not in the index, or at another file"
        for file, tensors in held.items()
        for tensor in sorted(tensors)
        if placed.get(tensor) != file
    ]
    if faults:
        raise ValueError(f"{path / INDEX} does not fit its shards: {'; '.join(faults)}")
    return {tensor: stored for tensors in held.values() for tensor, stored in tensors.items()}


def _header(path: epath.Path) -> dict[str, Stored]:
    """What a file's header says, checked against the file's length."""
    length = path.stat().length
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if length < 8 or size > min(length - 8, HEADER_LIMIT):
            raise ValueError(
                f"{path}: its header is said to be {size} bytes long; allowed: what the file of "
                f"{length} bytes holds, at most {HEADER_LIMIT}"
            )
        raw = file.read(size)
    try:
        held = json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path}: its header must be a mapping")
    found, ends = {}, [(8 + size, 8 + size, "the header")]
    for name, entry in held.items():
        if name == "__metadata__":
            continue
        start, end, stored = _entry(path, name, entry, 8 + size)
        found[name] = stored
        ends.append((start, end, name))
    ends.sort()
    for (_, end, before), (start, _, name) in zip(ends, ends[1:], strict=False):
        if start < end:
            raise ValueError(f"{path}: {name} overlaps {before}")
    if ends[-1][1] > length:
        raise ValueError(
            f"{path} is truncated: it has {length} bytes, its header says {ends[-1][1]}"
        )
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping whose every key is said once."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands twice in it")
    return made


def _entry(path: epath.Path, name: str, entry: Any, data: int) -> tuple[int, int, Stored]:
    """(first byte, byte after the last, tensor) of one entry of a header."""
    fault = ValueError(
        f"{path}: {name} is described by {entry!r}; allowed: dtype, shape and data_offsets"
    )
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fault
    numbers = (entry["shape"], entry["data_offsets"])
    if not all(isinstance(held, list) for held in numbers) or len(entry["data_offsets"]) != 2:
        raise fault
    if not all(type(x) is int and x >= 0 for held in numbers for x in held):
        raise fault
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(
            f"{path}: {name} has the unknown dtype {dtype!r}; allowed: {[*ITEM_BYTES]}"
        )
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(
            f"{path}: {name} has {end - start} bytes, but {dtype} {list(shape)} takes "
            f"{math.prod(shape) * ITEM_BYTES[dtype]}"
        )
    return data + start, data + end, Stored(path, data + start, dtype, shape)
