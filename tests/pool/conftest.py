"""A real PostgreSQL server for the tests that ask for one."""

from collections.abc import Iterator

import pytest

from tests.pool import postgres


@pytest.fixture(scope="module")
def postgres_address() -> Iterator[str]:
    """The address of an empty server; skips, with the reason, where none can be had."""
    pytest.importorskip("psycopg")
    try:
        with postgres.server() as address:
            yield address
    except postgres.NoServer as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
