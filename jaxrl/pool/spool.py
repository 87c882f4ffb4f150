"""Rollouts on disk: a JSON header and little-endian token arrays, every block with its crc32c.

    file    = magic "JAXRLREC", u32 schema version, record*
    record  = magic "ROLL", u64 bytes of its blocks, u32 crc32c of those 8 bytes, block*
    block   = u32 bytes, u32 crc32c, the bytes
    blocks  = the header; then its ``columns`` [[name, dtype], ...] in that order

A record is a rollout, or many that are alike (``jaxrl.pool.rows``; its header has ``rows``). A
record's frame has a check of its own, so a broken block costs one record and a broken frame the
rest of the file.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from jaxrl.pool.compact import compact
from jaxrl.pool.rollout import SCHEMA_VERSION, TYPES, Rollout, check_schema
from jaxrl.pool.rows import rollouts

SUFFIX = ".rollouts"
RECORDS = 8  # that were read last and are kept: neighbours of a group lie in one

_FILE_MAGIC = b"JAXRLREC"
_RECORD_MAGIC = b"ROLL"
_SCHEMA = struct.Struct("<I")
_FRAME = struct.Struct("<4sQI")
_BLOCK = struct.Struct("<II")
_NAMED: list[list[Any]] = [[name, dtype.str] for name, dtype in TYPES.items()]


class RecordError(ValueError):
    """A record that cannot be read; the message names file and offset."""


@dataclasses.dataclass(frozen=True)
class Damage:
    """Bytes ``offset .. offset + length`` of a file hold no readable record."""

    path: pathlib.Path
    offset: int
    length: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a readable rollout lies, and whose it is."""

    path: pathlib.Path
    offset: int
    run_id: str
    group_id: int
    sample: int
    idempotency_key: str
    digest: str
    row: int = 0  # of its record, if that holds several


def encode(rollout: Rollout, *, checked: bool = False) -> bytes:
    """A rollout as one record. ValueError, naming the field, if it does not fit together; one that
    is ``checked`` is not looked at again."""
    if not checked:
        rollout.check()
    columns = rollout.to_columns()
    named = [*_NAMED]
    for name, column in columns.items():
        if name in TYPES:
            continue
        if column.dtype.hasobject or column.ndim < 1 or 0 in column.shape[1:]:
            raise ValueError(
                f"column {name} is {column.dtype}{list(column.shape)}; allowed: numbers, one axis "
                "or more, none but the first empty"
            )
        # The first axis follows from the block's length; the others stand behind the type.
        named.append([name, column.dtype.str, *column.shape[1:]])
    return _framed(rollout.to_header() | {"columns": named}, columns)


def encode_rows(
    shared: Mapping[str, Any], rows: Mapping[str, Any], columns: Mapping[str, np.ndarray]
) -> bytes:
    """Many rollouts as one record; see ``jaxrl.pool.rows``. ValueError for a number that is not
    finite, TypeError for what JSON has not."""
    named = [[name, column.dtype.str] for name, column in columns.items()]
    header = {"schema_version": SCHEMA_VERSION, **shared, "rows": rows, "columns": named}
    return _framed(header, columns)


def _framed(header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """A record of its header and columns."""
    parts: list[bytes] = []
    for part in (compact(header), *[one.tobytes() for one in columns.values()]):
        parts += (_BLOCK.pack(len(part), google_crc32c.value(part)), part)
    blocks = b"".join(parts)
    length = struct.pack("<Q", len(blocks))
    return _FRAME.pack(_RECORD_MAGIC, len(blocks), google_crc32c.value(length)) + blocks


class Writer:
    """Appends rollouts to a file that gets its name when it is closed: nothing can be read half.

    ``path`` replaces an older file of that name, so that a step that is run again leaves one
    record. As a context manager it closes on success and leaves nothing behind on an error.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._half = self.path.with_name(self.path.name + ".tmp")
        self._file = self._half.open("wb")
        self._file.write(_FILE_MAGIC + _SCHEMA.pack(SCHEMA_VERSION))

    def append(self, rollout: Rollout) -> None:
        """Add one rollout. ValueError, with nothing written, if it does not fit together."""
        self._file.write(encode(rollout))

    def write(self, records: bytes) -> int:
        """Add records that are encoded already; at which byte of the file."""
        at = self._file.tell()
        self._file.write(records)
        return at

    def close(self) -> None:
        """Make the file durable and give it its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._half.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Drop what was written."""
        self._file.close()
        self._half.unlink(missing_ok=True)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _blocks(data: bytes) -> list[bytes]:
    """The checked blocks of a record. ValueError saying which one is broken."""
    blocks: list[bytes] = []
    at = 0
    while at < len(data):
        if at + _BLOCK.size > len(data):
            raise ValueError(f"block {len(blocks)} is cut off")
        length, check = _BLOCK.unpack_from(data, at)
        block = data[at + _BLOCK.size : at + _BLOCK.size + length]
        if len(block) != length:
            raise ValueError(f"block {len(blocks)} has {len(block)} of {length} bytes")
        if google_crc32c.value(block) != check:
            raise ValueError(f"crc32c of block {len(blocks)} does not match")
        blocks.append(block)
        at += _BLOCK.size + length
    return blocks


def _decode(data: bytes) -> list[Rollout]:
    """The rollouts of a record, from its blocks. ValueError if anything is amiss."""
    blocks = _blocks(data)
    if not blocks:
        raise ValueError("the record is empty")
    header = json.loads(blocks[0])
    check_schema(header.get("schema_version"))
    named = header["columns"]
    if len(named) != len(blocks) - 1:
        raise ValueError(f"the header names {len(named)} columns, the record has {len(blocks) - 1}")
    columns = {
        name: np.frombuffer(block, dtype).reshape(-1, *shape)
        for (name, dtype, *shape), block in zip(named, blocks[1:], strict=True)
    }
    if "rows" in header:
        return rollouts(header, columns)
    return [Rollout.from_header(header, columns)]


def decode(data: bytes) -> list[Rollout]:
    """The rollouts of records that stand one after the other. ValueError if any is damaged."""
    file, found = io.BytesIO(data), []
    while left := len(data) - file.tell():
        found += _decode(file.read(_frame(file, left)))
    return found


def _frame(file: BinaryIO, left: int) -> int:
    """Bytes of the blocks of the record that starts here. ValueError if no whole record does."""
    data = file.read(_FRAME.size)
    if len(data) < _FRAME.size:
        raise ValueError(
            f"the file ends inside of a record ({len(data)} of {_FRAME.size} frame bytes)"
        )
    magic, length, check = _FRAME.unpack(data)
    if magic != _RECORD_MAGIC or google_crc32c.value(struct.pack("<Q", length)) != check:
        raise ValueError("no record starts here")
    if length > left - _FRAME.size:
        raise ValueError(
            f"the file ends inside of a record ({left - _FRAME.size} of {length} bytes)"
        )
    return length


def _open(path: pathlib.Path) -> BinaryIO:
    """The file, at its first record. RecordError for another kind of file and for a newer
    schema."""
    file = path.open("rb")
    start = file.read(len(_FILE_MAGIC) + _SCHEMA.size)
    try:
        if len(start) < len(_FILE_MAGIC) + _SCHEMA.size or not start.startswith(_FILE_MAGIC):
            raise ValueError("this is no file of rollouts")
        check_schema(*_SCHEMA.unpack(start[len(_FILE_MAGIC) :]))
    except ValueError as error:
        file.close()
        raise RecordError(f"{path} at byte 0: {error}") from error
    return file


def walk(path: str | os.PathLike[str]) -> Iterator[tuple[int, Rollout | Damage]]:
    """Each rollout of a file with its record's offset, or what is wrong with a record.

    RecordError if the file as a whole cannot be read: another format, or a schema newer than this
    code.
    """
    path = pathlib.Path(path)
    size = path.stat().st_size
    with _open(path) as file:
        while (offset := file.tell()) < size:
            try:
                length = _frame(file, size - offset)
            except ValueError as error:
                yield offset, Damage(path, offset, size - offset, str(error))
                return
            data = file.read(length)
            try:
                found = _decode(data)
            except (ValueError, KeyError, TypeError) as error:
                yield offset, Damage(path, offset, _FRAME.size + length, str(error))
                continue
            for rollout in found:
                yield offset, rollout


def read(path: str | os.PathLike[str]) -> Iterator[Rollout]:
    """The rollouts of a file in the order of writing. RecordError, naming file and offset, at the
    first that is damaged."""
    for _, found in walk(path):
        if isinstance(found, Damage):
            raise RecordError(str(found))
        yield found


def read_at(entry: Entry) -> Rollout:
    """The rollout of one entry. RecordError if it changed since it was indexed."""
    try:
        rollout = _record(entry.path, entry.offset, entry.path.stat().st_mtime_ns)[entry.row]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RecordError(f"{entry.path} at byte {entry.offset}: {error}") from error
    if rollout.digest != entry.digest:
        raise RecordError(
            f"{entry.path} at byte {entry.offset}: the record was replaced after it was indexed"
        )
    return rollout


@functools.lru_cache(RECORDS)
def _record(path: pathlib.Path, offset: int, changed: int) -> list[Rollout]:
    """The rollouts of one record of a file that was ``changed`` then."""
    with _open(path) as file:
        file.seek(offset)
        return _decode(file.read(_frame(file, path.stat().st_size - offset)))


def index(
    path: str | os.PathLike[str], *, quarantine: str | os.PathLike[str] | None = None
) -> tuple[list[Entry], list[Damage]]:
    """Every readable record of a file, or of the files of a directory in the order of their names.

    Each record is read and checked once. Damage is a RecordError naming file and offset, unless
    ``quarantine`` names a directory: then the damaged bytes are copied there and reported.
    FileNotFoundError if there is no file.
    """
    path = pathlib.Path(path)
    files = sorted(path.glob("**/*" + SUFFIX)) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise FileNotFoundError(f"{path}: no file of rollouts (*{SUFFIX}) there")
    entries: list[Entry] = []
    damages: list[Damage] = []
    for file in files:
        before, row = -1, 0
        for offset, found in walk(file):
            row = row + 1 if offset == before else 0
            before = offset
            if isinstance(found, Rollout):
                identity = (found.run_id, found.group_id, found.sample, found.idempotency_key)
                entries.append(Entry(file, offset, *identity, found.digest, row))
                continue
            if quarantine is None:
                raise RecordError(str(found))
            damages.append(found)
            set_aside(found, pathlib.Path(quarantine))
    return entries, damages


def set_aside(damage: Damage, folder: pathlib.Path) -> None:
    """Copy the damaged bytes, if there are any, and say beside them what they are. A second reading
    writes the same files again."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{damage.path.stem}-{damage.offset}"
    with contextlib.suppress(FileNotFoundError), damage.path.open("rb") as file:
        file.seek(damage.offset)
        (folder / f"{name}.bytes").write_bytes(file.read(damage.length))
    (folder / f"{name}.txt").write_text(f"{damage}\n")
