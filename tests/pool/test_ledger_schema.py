"""A ledger that another version of the code made."""

import contextlib
import sqlite3

import pytest

from jaxrl.pool.ledger_schema import SCHEMA_VERSION
from jaxrl.pool.ledger_sqlite import SqliteLedger


def meta(path, version=None):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        if version is not None:
            db.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (version,))
        return db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()[0]


def test_an_older_ledger_is_of_the_present_schema_once_it_was_opened_and_a_newer_is_refused(
    tmp_path,
):
    path = str(tmp_path / "ledger.sqlite")
    SqliteLedger(path, "run").close()
    assert meta(path, "1") == "1"
    SqliteLedger(path, "run").close()
    assert meta(path) == str(SCHEMA_VERSION)
    meta(path, "99")
    with pytest.raises(ValueError, match=f"schema_version=99; allowed: up to {SCHEMA_VERSION}"):
        SqliteLedger(path, "run")
    assert meta(path) == "99"
