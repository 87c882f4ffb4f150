"""A ledger in PostgreSQL: for many machines, and beyond some hundreds of transitions a second.

Each run has a schema of its own. A transition is a transaction on a connection from a small stock;
what is durable was flushed by the server on return (``synchronous_commit``).
"""

import contextlib
import hashlib
import queue
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from jaxrl.pool.ledger import LedgerError, LedgerRefusal
from jaxrl.pool.ledger_schema import Row, Rows, tally
from jaxrl.pool.ledger_sql import SqlLedger

T = TypeVar("T")

CONNECT_S = 10
WAIT_MS = 30_000  # longest wait for a statement, or for another transaction's rows


class _Cursor:
    """``Rows`` over a connection."""

    def __init__(self, connection: psycopg.Connection[dict[str, Any]]) -> None:
        self._connection = connection

    def all(self, sql: str, *values: Any) -> Sequence[Row]:
        return self._connection.execute(_placed(sql), values).fetchall()

    def run(self, sql: str, *values: Any) -> int:
        return self._connection.execute(_placed(sql), values).rowcount

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        cursor = self._connection.cursor()
        cursor.executemany(_placed(sql), rows)
        return cursor.rowcount


class PostgresLedger(SqlLedger):
    """A Ledger in the schema of ``run`` at ``address`` (postgresql://...). Threads may share one
    object.

    Leases go by the server's clock, so that the machines' own need not agree; ``clock`` is another
    one.
    """

    MADE = (
        "SELECT table_name FROM information_schema.tables "
        "WHERE table_schema = current_schema() AND table_name = 'meta'"
    )
    FOR_UPDATE = " FOR UPDATE"
    SKIP_LOCKED = " FOR UPDATE OF s SKIP LOCKED"

    def __init__(self, address: str, run: str, clock: Callable[[], float] | None = None) -> None:
        self._address = address
        self._schema = schema_of(run)
        self._stock: queue.LifoQueue[psycopg.Connection[dict[str, Any]]] = queue.LifoQueue()
        super().__init__(run, clock or self._time)

    def _time(self) -> float:
        query = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8 AS now"
        return self._read(lambda db: db.all(query))[0]["now"]

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._stock.get_nowait().close()

    def _create(self, db: Rows, run: str) -> None:
        # Of several processes that come at once, one makes the tables.
        db.all("SELECT pg_advisory_xact_lock(?)", _number(self._schema))
        super()._create(db, run)

    def _read(self, work: Callable[[Rows], T]) -> T:
        with self._connection() as connection, connection.transaction():
            return work(_Cursor(connection))

    def _write(self, work: Callable[[Rows], T], *, durable: bool = True, frees: bool = True) -> T:
        with self._connection() as connection:
            try:
                with connection.transaction():
                    if not durable:
                        connection.execute("SET LOCAL synchronous_commit TO off")
                    return work(_Cursor(connection))
            except LedgerRefusal as refusal:
                with connection.transaction():
                    tally(_Cursor(connection), f"refused_{refusal.reason}")
                raise

    @contextlib.contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        """One from the stock, or a new one; a broken one is not put back."""
        connection = None
        try:
            try:
                connection = self._stock.get_nowait()
            except queue.Empty:
                connection = self._connect()
            yield connection
        except psycopg.Error as error:
            raise LedgerError(f"PostgreSQL: {error}") from error
        finally:
            if connection is not None and not connection.closed:
                self._stock.put(connection)

    def _connect(self) -> psycopg.Connection[dict[str, Any]]:
        connection = psycopg.Connection[dict[str, Any]].connect(
            self._address, autocommit=True, connect_timeout=CONNECT_S, row_factory=dict_row
        )
        name = sql.Identifier(self._schema)
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_number(self._schema),))
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
        connection.execute(sql.SQL("SET search_path TO {}").format(name))
        connection.execute(sql.SQL("SET statement_timeout = {}").format(sql.Literal(WAIT_MS)))
        return connection


def schema_of(run: str) -> str:
    """The name of a run's schema: readable, and of this run alone."""
    digest = hashlib.blake2b(run.encode(), digest_size=6).hexdigest()
    return f"jaxrl_{re.sub('[^a-z0-9]+', '_', run.lower())[:32]}_{digest}"


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True)


def _placed(statement: str) -> Any:
    """Parameters as psycopg writes them; our statements hold no other ? or %."""
    return statement.replace("?", "%s")
