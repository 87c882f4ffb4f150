"""What a run did, in its order: an append-only file whose every line names the one before.

A run is a program whose costly or accidental steps go through ``once``. The first time a step
happens and its line is written; when the same program runs again on the same journal, the line
answers in its place. So a killed run is started again from its first line, pays for nothing twice
and ends where it would have ended; and a finished journal replays without a model or a world.
"""

import dataclasses
import fcntl
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Json = Any  # None, bool, int, float, str, and lists and string-keyed mappings of these

GENESIS = "0" * 64  # what the first line names


class JournalError(RuntimeError):
    """The journal is damaged, or tells of another run than this one."""


def canonical(value: Json) -> str:
    """The one way to write a JSON value: sorted keys, no spaces. ValueError for NaN and infinity,
    TypeError for what is no JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Json) -> str:
    """SHA-256 of the canonical text, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def draws(*parts: object) -> np.random.Generator:
    """Random numbers that belong to a name: the same wherever and whenever they are asked for."""
    name = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(name, "big")))


def write_whole(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    half.unlink(missing_ok=True)  # a link would be followed
    with half.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)


def pack(arrays: dict[str, np.ndarray]) -> bytes:
    """The bytes of an .npz: equal arrays give equal bytes."""
    file = io.BytesIO()
    named: dict[str, Any] = {name: arrays[name] for name in sorted(arrays)}
    np.savez(file, **named)
    return file.getvalue()


@dataclasses.dataclass(frozen=True)
class Line:
    """One step: what was asked under a key, and what came of it."""

    seq: int
    time: float  # seconds since the epoch, when the result was there
    kind: str
    key: str
    asked: Json
    result: Json
    prev: str  # digest of the line before

    @property
    def digest(self) -> str:
        """What the next line names."""
        return digest(vars(self))


def read(path: Path) -> list[Line]:
    """The lines of a journal, checked one against the other; a last line without its end is left
    out. JournalError naming the first line that does not fit."""
    whole = path.read_bytes() if path.exists() else b""
    lines: list[Line] = []
    prev = GENESIS
    for seq, text in enumerate(whole[: whole.rfind(b"\n") + 1].splitlines()):
        try:
            line = Line(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise JournalError(f"{path}: line {seq} is no line of a journal: {error}") from error
        if (line.seq, line.prev) != (seq, prev):
            raise JournalError(f"{path}: line {seq} does not follow the one before it")
        lines.append(line)
        prev = line.digest
    return lines


class Journal:
    """The lines of one run, and the content-addressed objects that they name, under ``root``.

    ``root`` None keeps both in memory. ``closed``: nothing new may happen, as in a replay.
    JournalError if another process has the journal open, if it is damaged, or if a step is asked
    for under a key that the journal holds for something else.
    """

    def __init__(
        self, root: Path | None, *, closed: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.root, self.closed, self._clock = root, closed, clock
        self._objects: dict[str, bytes] = {}
        self._file: io.BufferedWriter | None = None
        self.lines: list[Line] = []
        if root is not None:
            path = root / "journal.jsonl"
            if closed and not path.exists():
                raise JournalError(f"{path} does not exist")
            self._open(path)
        self._tip = self.lines[-1].digest if self.lines else GENESIS
        self._known = {(line.kind, line.key): line for line in self.lines}
        self._passed: set[tuple[str, str]] = set()  # steps of the program that now runs
        self._at = -1  # the last line that it came to; what happened inside a step is behind it

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(f"another process writes {path}") from error
        self.lines = read(path)
        whole = path.read_bytes()
        self._file.truncate(whole.rfind(b"\n") + 1)  # a torn line tells of nothing

    @property
    def live(self) -> bool:
        """Has the program come to where the journal ends?"""
        return self._at == len(self.lines) - 1

    def once(
        self, kind: str, key: str, asked: Json, produce: Callable[[], Json] = lambda: None
    ) -> Json:
        """The result of a step: the journal's if it has one, else ``produce``'s, written down
        before it is returned."""
        return self.line(kind, key, asked, produce).result

    def line(
        self, kind: str, key: str, asked: Json, produce: Callable[[], Json] = lambda: None
    ) -> Line:
        """As ``once``, with the whole line."""
        name = (kind, key)
        if name in self._passed:
            raise JournalError(f"{kind} {key!r} happens twice in one run")
        known = self._known.get(name)
        if known is None:
            if self.closed:
                raise JournalError(f"{kind} {key!r} is not in the journal")
            result = produce()
            known = self._append(kind, key, asked, result)
        elif canonical(known.asked) != canonical(asked):
            raise JournalError(
                f"{kind} {key!r}: line {known.seq} of the journal tells of something else; it was "
                "written with another config, seed or code"
            )
        self._passed.add(name)
        self._at = max(self._at, known.seq)
        return known

    def _append(self, kind: str, key: str, asked: Json, result: Json) -> Line:
        line = Line(len(self.lines), self._clock(), kind, key, asked, result, self._tip)
        text = canonical(vars(line)).encode()
        self._tip = hashlib.sha256(text).hexdigest()
        if self._file is not None:
            self._file.write(text + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.lines.append(line)
        self._known[kind, key] = line
        return line

    def put(self, value: Json) -> str:
        """Keep a JSON value; its name is the digest of its text."""
        data = canonical(value).encode()
        name = hashlib.sha256(data).hexdigest()
        if self.root is None:
            self._objects[name] = data
        elif not self._place(name).exists():
            write_whole(self._place(name), data)
        return name

    def get(self, name: str) -> Json:
        """The value of that name. JournalError if it is missing or not what its name says."""
        try:
            data = self._objects[name] if self.root is None else self._place(name).read_bytes()
        except (KeyError, FileNotFoundError) as error:
            raise JournalError(f"object {name} is missing") from error
        if hashlib.sha256(data).hexdigest() != name:
            raise JournalError(f"object {name} is damaged")
        return json.loads(data)

    def _place(self, name: str) -> Path:
        assert self.root is not None
        return self.root / "objects" / name[:2] / name

    def of(self, kind: str) -> Iterator[Line]:
        """The lines of one kind, in order."""
        return (line for line in self.lines if line.kind == kind)

    def close(self) -> None:
        """Let others open it."""
        if self._file is not None:
            self._file.close()
