"""A real PostgreSQL server, and ledgers on both databases, for the tests that ask for one."""

import itertools
from collections.abc import Iterator

import pytest

from jaxrl.pool.ledger import Ledger
from tests.pool import postgres
from tests.pool.ledgers import Place

RUNS = itertools.count()


@pytest.fixture(scope="module")
def postgres_address() -> Iterator[str]:
    """The address of an empty server; skips, with the reason, where none can be had."""
    pytest.importorskip("psycopg")
    try:
        with postgres.server() as address:
            yield address
    except postgres.NoServer as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path) -> Iterator[Place]:
    address = str(tmp_path / "ledger.sqlite")
    if request.param == "postgres":
        address = request.getfixturevalue("postgres_address")
    where = Place(address, f"run {next(RUNS)}")
    yield where
    for ledger in where.opened:
        ledger.close()


@pytest.fixture
def ledger(place) -> Ledger:
    opened = place.open()
    opened.begin_epoch()
    return opened
