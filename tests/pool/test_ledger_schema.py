"""A ledger that another version of the code made."""

import contextlib
import sqlite3

import pytest

from jaxrl.pool.ledger_schema import BROUGHT, SCHEMA_VERSION
from jaxrl.pool.ledger_sqlite import SqliteLedger
from tests.pool.ledgers import fill, group, lease_of, refused, sealed


def meta(path, version=None):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        if version is not None:
            db.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (version,))
        return db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()[0]


def made_older(ledger, version: int) -> None:
    """Take away all that came after a version: what is left is what that one had made."""

    def work(db):
        for later in range(version + 1, SCHEMA_VERSION + 1):
            for statement in reversed(BROUGHT.get(later, ())):
                kind, *_ = words = statement.split()
                if kind == "CREATE":
                    db.run(f"DROP INDEX {words[5]}")
                else:
                    db.run(f"ALTER TABLE {words[2]} DROP COLUMN {words[5]}")
        db.run("UPDATE meta SET value = ? WHERE name = 'schema_version'", str(version))

    ledger._write(work)


@pytest.mark.parametrize("version", [1, 3, 4])
def test_an_older_ledger_goes_on_where_it_was(place, ledger, version):
    """Sealed, leased and pending samples of before are what they were, and what is new is there."""
    ledger.open_groups([group(0), group(1)])
    fill(ledger)
    under_way = lease_of(ledger)
    made_older(ledger, version)
    again = place.open()
    first, second = again.live()
    assert (first.slots["sealed"], second.slots["leased"], second.slots["pending"]) == (2, 1, 1)
    assert (first.worked, first.source) == (0.0, "sums")  # nobody had looked at the clock
    again.seal(under_way.token, sealed())
    given = lease_of(again)
    assert again.cancel([given.token], "pressure") == [None]
    refused("cancelled", lambda: again.find(given.token))
    place.now += 7
    again.seal(lease_of(again).token, sealed())
    assert [live.state for live in again.live()] == ["ready", "ready"]
    place.open()  # nothing is brought twice


def test_a_newer_ledger_is_refused_and_left_alone(tmp_path):
    path = str(tmp_path / "ledger.sqlite")
    SqliteLedger(path, "run").close()
    assert meta(path) == str(SCHEMA_VERSION)
    meta(path, "99")
    with pytest.raises(ValueError, match=f"schema_version=99; allowed: up to {SCHEMA_VERSION}"):
        SqliteLedger(path, "run")
    assert meta(path) == "99"
