"""Where a pool's tokens lie: a journal of what is under way, and a file for each batch of seals.

    <root>/open/<epoch>-<name>.calls   journal of one process: a line for each call, or for the
                                       first ones of many attempts: their keys, a space, and a JSON
                                       value
    <root>/<group / 1000>/<group>-<sample>-<attempt>-<name>.rollouts   sealed together: of an
                                       attempt its branches, or one record of many attempts; named
                                       after the first one
    <root>/quarantine/                 damaged records, with what is wrong with them

Sealed files are those of ``jaxrl.pool.spool``: every block has its crc32c. They get their name when
they are whole and durable. The root must be on a local disk.
"""

import functools
import hashlib
import os
import pathlib
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxrl.pool import spool
from jaxrl.pool.ledger import Sealed
from jaxrl.pool.rollout import Rollout

OPEN = "open"
QUARANTINE = "quarantine"

# Bytes of a journal that is written anew without what was discarded.
LONG = 2**26

# The attempts of a line of a journal.
KEYS = re.compile(r"[\w-]+(,[\w-]+)*", re.ASCII)


class Placed(NamedTuple):
    """Where the records of an attempt lie, as ``Sealed`` has it."""

    segment: str  # relative to the root
    offset: int
    bytes: int
    digest: str  # sha256


class Spool:
    """The segments under one root. Several processes may use one root, each attempt has one
    writer."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = pathlib.Path(root)
        self._name = secrets.token_hex(8)
        self._live: dict[pathlib.Path, set[str]] = {}  # attempts that our journals hold
        self._journal = threading.Lock()
        self._many = functools.lru_cache(spool.RECORDS)(self._fetched)

    # -- what is under way

    def append(self, epoch: int, calls: Sequence[tuple[Sequence[str], bytes]]) -> None:
        """Add calls to attempts of an epoch, each under their keys (letters, digits, - and _); on
        return the operating system has them, so that they outlive this process. OSError, with
        nothing added, if the disk refuses."""
        lines: list[bytes] = []
        for keys, call in calls:
            if b"\n" in call:
                raise ValueError("a call holds a line end; allowed: one line of JSON")
            named = ",".join(keys)
            if not KEYS.fullmatch(named):
                raise ValueError(f"attempt keys {named!r}; allowed: letters, digits, - and _")
            lines.append(b"%s %s\n" % (named.encode(), call))
        path = self.root / OPEN / f"{epoch}-{self._name}.calls"
        with self._journal:
            held = self._live.setdefault(path, set())
            if _write(path, b"".join(lines)):
                held.update(*[keys for keys, _ in calls])
                if path.stat().st_size > LONG:
                    _shorten(path, held)

    def calls(self, key: str) -> list[bytes]:
        """The calls of an attempt so far, those of one process in their order; one that was cut off
        is left out."""
        found: list[bytes] = []
        for path in (self.root / OPEN).glob("*.calls"):
            told = [line.partition(b" ") for line in _lines(path)]
            found += [call for keys, _, call in told if key.encode() in keys.split(b",")]
        return found

    def discard(self, keys: Iterable[str]) -> None:
        """Forget the calls of attempts; a journal goes with the last one in it."""
        gone = set(keys)
        with self._journal:
            for path, held in list(self._live.items()):
                held -= gone
                if not held:
                    path.unlink(missing_ok=True)
                    del self._live[path]

    def forget(self, epoch: int) -> int:
        """Forget all calls of attempts of earlier epochs; how many journals those were."""
        journals = list((self.root / OPEN).glob("*.calls"))
        old = [path for path in journals if int(path.name.split("-")[0]) < epoch]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    # -- what is sealed

    def seal(self, first: tuple[int, int, int], attempts: Sequence[bytes]) -> list[Placed]:
        """Write records (of an attempt its branches, encoded, the trained one first; or a record of
        many) into one file, named after the ``first`` attempt's group, sample and number. It is
        durable on return. OSError, with nothing left behind, if the disk refuses. The attempts'
        calls are kept until ``discard``: a seal may be refused by the ledger.
        """
        group, sample, attempt = first
        # A name of its own: no file is ever replaced, even if an attempt is written twice.
        name = f"{group}-{sample}-{attempt}-{secrets.token_hex(6)}{spool.SUFFIX}"
        path = self.root / str(group // 1000) / name
        segment, placed = str(path.relative_to(self.root)), []
        with spool.Writer(path) as writer:
            for data in attempts:
                digest = hashlib.sha256(data).hexdigest()
                placed.append(Placed(segment, writer.write(data), len(data), digest))
        return placed

    def fetch(self, sealed: Sealed | Placed) -> list[Rollout]:
        """The branches of a sealed attempt; of one in a record of many, its row. RecordError if
        they are missing, damaged or not what was sealed: they, and whatever else is in their
        record, are then in the quarantine directory, and never handed out again."""
        place = Placed(sealed.segment, sealed.offset, sealed.bytes, sealed.digest)
        row = sealed.row if isinstance(sealed, Sealed) else -1
        return self._fetched(place) if row < 0 else [self._many(place)[row]]

    def _fetched(self, sealed: Placed) -> list[Rollout]:
        path = self.root / sealed.segment
        try:
            with path.open("rb") as file:
                file.seek(sealed.offset)
                data = file.read(sealed.bytes)
            found = hashlib.sha256(data).hexdigest()
            if found != sealed.digest:
                raise ValueError(f"sha256 is {found}, sealed was {sealed.digest}")
            return spool.decode(data)
        except (FileNotFoundError, ValueError) as error:
            damage = spool.Damage(path, sealed.offset, sealed.bytes, str(error))
            spool.set_aside(damage, self.root / QUARANTINE)
            raise spool.RecordError(str(damage)) from error

    def gc(self, segments: Iterable[str]) -> int:
        """Delete sealed segments that no checkpoint can ask for any more; how many bytes."""
        freed = 0
        for segment in segments:
            path = self.root / segment
            if path.exists():
                freed += path.stat().st_size
                path.unlink()
        return freed

    def bytes(self) -> int:
        """Of all files under the root."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


def _write(path: pathlib.Path, data: bytes) -> int:
    """Append all or nothing; how many bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        before, written = file.tell(), 0
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            file.truncate(before)
            raise
    return written


def _lines(path: pathlib.Path) -> list[bytes]:
    """Whole lines of a journal; none if it is gone."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _shorten(path: pathlib.Path, held: set[str]) -> None:
    """Write a journal anew with the attempts that it is still needed for."""
    needed = {key.encode() for key in held}
    kept = [ln for ln in _lines(path) if needed.intersection(ln.partition(b" ")[0].split(b","))]
    half = path.with_suffix(".tmp")
    half.write_bytes(b"".join(line + b"\n" for line in kept))
    half.replace(path)
