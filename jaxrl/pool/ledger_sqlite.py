"""A ledger in a file of SQLite: the default on one machine.

Write-ahead log; what is durable is committed with synchronous=FULL, the rest with NORMAL, which is
on the disk with the next durable one. Such a commit waits for the disk, so transitions that threads
ask for meanwhile share the next one (group commit); several processes take turns. The file must be
on a local disk.
"""

import contextlib
import dataclasses
import pathlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jaxrl.pool.ledger import LedgerError, LedgerRefusal
from jaxrl.pool.ledger_schema import Row, Rows, tally
from jaxrl.pool.ledger_sql import SqlLedger

T = TypeVar("T")

BUSY_S = 30.0  # longest wait for another process's transaction
PAUSE_S = 0.01
# Of the log, before it is folded into the file: what changed many times is then copied once.
LOG_PAGES = 8000


@dataclasses.dataclass
class _Ticket:
    """A transition that waits for its transaction, then its outcome."""

    work: Callable[[Rows], Any]
    durable: bool
    frees: bool
    done: bool = False
    result: Any = None
    error: Exception | None = None


class _Cursor:
    """``Rows`` over a connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def all(self, sql: str, *values: Any) -> Sequence[Row]:
        return self._connection.execute(sql, values).fetchall()

    def run(self, sql: str, *values: Any) -> int:
        return self._connection.execute(sql, values).rowcount

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        return self._connection.executemany(sql, rows).rowcount


class SqliteLedger(SqlLedger):
    """A Ledger in the file ``path``. Threads may share one object."""

    MADE = "SELECT name FROM sqlite_master WHERE name = 'meta'"

    def __init__(self, path: str, run: str, clock: Callable[[], float] = time.time) -> None:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._writer, self._reader = _connect(path), _connect(path)
        self._waiting: list[_Ticket] = []
        self._freed = 0  # transactions of ours that others may lease something after
        self._queue, self._leading, self._reading = (threading.Lock() for _ in range(3))
        super().__init__(run, clock)

    def close(self) -> None:
        """Fold the log into the file and close it."""
        with self._leading, self._reading:
            self._reader.close()
            self._writer.close()

    def changes(self) -> int | None:
        """Of the file, by others, and here by what frees; None while something is written here."""
        if not self._leading.acquire(blocking=False):
            return None
        try:
            (others,) = self._writer.execute("PRAGMA data_version").fetchone()
            return others + self._freed
        except sqlite3.Error as error:
            raise LedgerError(f"SQLite: {error}") from error
        finally:
            self._leading.release()

    def _read(self, work: Callable[[Rows], T]) -> T:
        with self._reading:
            try:
                return work(_Cursor(self._reader))
            except sqlite3.Error as error:
                raise LedgerError(f"SQLite: {error}") from error

    def _write(self, work: Callable[[Rows], T], *, durable: bool = True, frees: bool = True) -> T:
        ticket = _Ticket(work, durable, frees)
        with self._queue:
            self._waiting.append(ticket)
        with self._leading:  # whoever comes first commits for all that queued up meanwhile
            if not ticket.done:
                with self._queue:
                    tickets, self._waiting = self._waiting, []
                self._commit(tickets)
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def _commit(self, tickets: list[_Ticket]) -> None:
        """Run all in one transaction, each in a savepoint of its own. If the transaction itself
        fails (a full disk), all of them do."""
        try:
            with self._transaction(any(ticket.durable for ticket in tickets)):
                for ticket in tickets:
                    self._attempt(ticket)
        except sqlite3.Error as error:
            for ticket in tickets:
                ticket.error = LedgerError(f"SQLite: {error}")
        self._freed += any(ticket.frees for ticket in tickets)
        for ticket in tickets:
            ticket.done = True

    @contextlib.contextmanager
    def _transaction(self, durable: bool) -> Iterator[None]:
        self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    def _attempt(self, ticket: _Ticket) -> None:
        cursor = _Cursor(self._writer)
        self._writer.execute("SAVEPOINT one")
        try:
            ticket.result = ticket.work(cursor)
        except sqlite3.Error:
            raise
        except Exception as error:  # the caller's: handed over where it asked
            ticket.error = error
            self._writer.execute("ROLLBACK TO one")
            if isinstance(error, LedgerRefusal):
                tally(cursor, f"refused_{error.reason}")
        self._writer.execute("RELEASE one")


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, BUSY_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    _to_log(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
    return connection


def _to_log(connection: sqlite3.Connection) -> None:
    """Have the file keep a write-ahead log. One who makes it so, or opens it, may be told at once
    that the file is locked, where SQLite fears that two wait for each other: then try again."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)
