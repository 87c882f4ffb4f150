"""A ledger in SQL that SQLite and PostgreSQL both read: the trainer's half, and the whole.

What differs (connections, how a transaction is begun, row locks) is in ``ledger_sqlite.py`` and
``ledger_postgres.py``; leases are in ``ledger_leases.py``, their permits in
``ledger_permits.py``.
"""

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

from jaxrl.pool.ledger import (
    GroupState,
    LedgerRefusal,
    Live,
    Member,
    OpenGroup,
    SlotState,
    Voided,
)
from jaxrl.pool.ledger_leases import AGAIN, void
from jaxrl.pool.ledger_permits import JUDGING, LACKING, PermittedLeases
from jaxrl.pool.ledger_schema import (
    BROUGHT,
    LENT,
    LIVE,
    SCHEMA_VERSION,
    TABLES,
    Rows,
    epoch_of,
    insert_group,
    line_of,
    live_of,
    sealed_of,
    tally,
)
from jaxrl.pool.ledger_weights import weigh_groups
from jaxrl.pool.rollout import Version
from jaxrl.pool.tokens import Tokens


class SqlLedger(PermittedLeases):
    """A Ledger over a database; see ``jaxrl.pool.ledger.Ledger`` for what each method promises."""

    MADE = ""  # a query that finds the table ``meta``, if there is one

    def __init__(self, run: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._write(lambda db: self._create(db, run))

    def close(self) -> None:
        """Free the connection."""
        raise TypeError(f"{type(self).__name__} has no database")

    def _create(self, db: Rows, run: str) -> None:
        for statement in () if db.all(self.MADE) else TABLES:
            db.run(statement)
        mine = {"schema_version": str(SCHEMA_VERSION), "run": run, "epoch": "-1"}
        mine["secret"] = secrets.token_hex()
        for name, value in mine.items():
            db.run("INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO NOTHING", name, value)
        held = {row["name"]: row["value"] for row in db.all("SELECT name, value FROM meta")}
        if int(held["schema_version"]) > SCHEMA_VERSION:
            raise ValueError(
                f"the ledger has schema_version={held['schema_version']}; allowed: up to "
                f"{SCHEMA_VERSION}. Update jaxrl"
            )
        if held["run"] != run:
            raise ValueError(f"the ledger is of the run {held['run']!r}; allowed: {run!r}")
        # Rows of older ones are read; those that this one writes would be misread by older code.
        for version in range(int(held["schema_version"]) + 1, SCHEMA_VERSION + 1):
            for statement in BROUGHT.get(version, ()):
                db.run(statement)
        db.run("UPDATE meta SET value = ? WHERE name = 'schema_version'", mine["schema_version"])
        self._tokens = Tokens(bytes.fromhex(held["secret"]))

    # -- both sides

    def epoch(self) -> int:
        """The current lineage."""
        return self._read(epoch_of)

    def counts(self) -> dict[str, int]:
        """States and tallies by name."""

        def work(db: Rows) -> dict[str, int]:
            tallies = {r["name"]: int(r["value"]) for r in db.all("SELECT * FROM tallies")}
            states = db.all(
                f"SELECT state, COUNT(*) AS n FROM rollout_groups WHERE state IN {LIVE} "
                "GROUP BY state"
            )
            groups = {GroupState(row["state"]): int(row["n"]) for row in states}
            void = tallies.pop("void", 0)
            opened = tallies.pop("opened", 0)
            groups[GroupState.VOID] = void
            groups[GroupState.COMMITTED] = opened - sum(groups.values())
            slots = db.all(
                "SELECT state, COUNT(*) AS n FROM slots WHERE grp IN "
                f"(SELECT id FROM rollout_groups WHERE state IN {LIVE}) GROUP BY state"
            )
            told = {f"groups_{state}": groups.get(state, 0) for state in GroupState}
            found = {row["state"]: int(row["n"]) for row in slots}
            told |= {f"slots_{state}": found.get(state, 0) for state in SlotState}
            return {**told, **tallies}

        return self._read(work)

    def dump(self) -> str:
        """All that is live, as text."""
        now = self._clock()

        def work(db: Rows) -> list[str]:
            rows = db.all(
                "SELECT g.id, g.state AS group_state, g.step, g.dispatched, s.sample, s.state, "
                "s.attempt, s.spent, s.owner, s.expires, s.reason FROM rollout_groups g "
                f"LEFT JOIN slots s ON g.id = s.grp WHERE g.state IN {LIVE} "
                "ORDER BY g.id, s.sample"
            )
            return [line_of(row, now) for row in rows]

        counts = ", ".join(f"{name} {count}" for name, count in self.counts().items() if count)
        return "\n".join([f"epoch {self.epoch()}; {counts or 'empty'}", *self._read(work)])

    # -- the trainer

    def begin_epoch(self, least: int = 0) -> int:
        """The next epoch; older leases are fenced."""

        def work(db: Rows) -> int:
            query = "SELECT value FROM meta WHERE name = 'epoch'" + self.FOR_UPDATE
            epoch = max(int(db.all(query)[0]["value"]) + 1, least)
            lock = f"SELECT id FROM rollout_groups WHERE state IN {LIVE} ORDER BY id"
            db.all(lock + self.FOR_UPDATE)
            db.run("UPDATE meta SET value = ? WHERE name = 'epoch'", str(epoch))
            db.run("DELETE FROM meta WHERE name IN (?, ?)", LACKING, JUDGING)
            db.run(
                "UPDATE slots SET state = 'pending', attempt = attempt + 1, token = NULL "
                f"WHERE state IN {LENT}"
            )
            return epoch

        self._began = self._write(work)
        return self._began

    def open_groups(self, groups: Sequence[OpenGroup]) -> None:
        """New groups, their slots pending."""
        now = self._clock()

        def work(db: Rows) -> None:
            self._check_mine(db)
            opened = [group for group in groups if insert_group(db, group, now)]
            if opened:
                tally(db, "opened", len(opened))

        self._write(work)

    def live(self) -> list[Live]:
        """Groups that are OPEN, READY or RESERVED."""

        def work(db: Rows) -> list[Live]:
            columns = ", ".join(
                f"SUM(CASE WHEN s.state = '{state}' THEN 1 ELSE 0 END) AS slots_{state}"
                for state in SlotState
            )
            # One statement: one view of the world, whatever the database.
            rows = db.all(
                "SELECT g.id, g.state, g.step, g.content_hash, g.source, g.dispatched, "
                "g.generation, g.reissued, g.opened, g.sealed, MIN(s.min_step) AS oldest, "
                f"MIN(s.max_step) AS youngest, MAX(s.worked) AS worked, {columns} "
                "FROM rollout_groups g LEFT JOIN slots s ON s.grp = g.id "
                f"WHERE g.state IN {LIVE} GROUP BY g.id ORDER BY g.id"
            )
            return [live_of(row) for row in rows]

        return self._read(work)

    def members(self, group: int) -> list[Member]:
        """The sealed samples of a group."""
        query = (
            "SELECT sample, attempt, sealed FROM slots WHERE grp = ? AND state = 'sealed' "
            "ORDER BY sample"
        )
        rows = self._read(lambda db: db.all(query, group))
        return [Member(r["sample"], r["attempt"], sealed_of(r["sealed"])) for r in rows]

    def voided(self, after: int) -> list[Voided]:
        """The void groups after the first ``after``."""
        query = (
            "SELECT id, content_hash, reason, generation FROM rollout_groups "
            "WHERE state = 'void' AND voided > ? ORDER BY voided"
        )
        return [Voided(**row) for row in self._read(lambda db: db.all(query, after))]

    def next_id(self) -> int:
        """One more than the largest group id."""
        query = "SELECT COALESCE(MAX(id) + 1, 0) AS n FROM rollout_groups"
        return int(self._read(lambda db: db.all(query))[0]["n"])

    def reserve(
        self, step: int, groups: Sequence[int], oldest: int, by: Literal["min", "max"] = "min"
    ) -> None:
        """READY -> RESERVED(step), all or none."""
        if not groups:
            return
        among = f"({', '.join('?' * len(groups))})"
        column = {"min": "min_step", "max": "max_step"}[by]

        def work(db: Rows) -> None:
            self._check_mine(db)
            rows = db.all(
                f"SELECT id, state FROM rollout_groups WHERE id IN {among} ORDER BY id"
                + self.FOR_UPDATE,
                *groups,
            )
            wrong = [f"{r['id']} is {r['state']}" for r in rows if r["state"] != GroupState.READY]
            if wrong or len(rows) != len(set(groups)):
                missing = sorted(set(groups) - {row["id"] for row in rows})
                raise LedgerRefusal("state", f"{', '.join(wrong)}; missing: {missing}")
            old = db.all(
                f"SELECT DISTINCT grp FROM slots WHERE grp IN {among} AND {column} < ?",
                *groups,
                oldest,
            )
            if old:
                stale = sorted(row["grp"] for row in old)
                raise LedgerRefusal("stale", f"groups {stale} have versions before step {oldest}")
            db.run(
                f"UPDATE rollout_groups SET state = 'reserved', step = ? WHERE id IN {among}",
                step,
                *groups,
            )

        self._write(work)

    def commit(self, step: int) -> None:
        """RESERVED -> COMMITTED up to this step."""
        change = (
            f"UPDATE rollout_groups SET state = 'committed' WHERE state IN {LIVE} "
            "AND state = 'reserved' AND step <= ?"
        )

        def work(db: Rows) -> None:
            self._check_mine(db)
            db.run(change, step)

        self._write(work)

    def void(self, group: int, reason: str) -> None:
        """OPEN or READY -> VOID."""

        def work(db: Rows) -> None:
            self._check_mine(db)
            self._lock(db, group, GroupState.OPEN, GroupState.READY)
            void(db, group, reason)

        self._write(work)

    def reissue(self, group: int, version: Version) -> None:
        """Sample a group anew."""
        now = self._clock()

        def work(db: Rows) -> None:
            self._check_mine(db)
            self._lock(db, group, GroupState.OPEN, GroupState.READY)
            db.run(
                "UPDATE rollout_groups SET state = 'open', version = ?, dispatched = ?, "
                "reissued = reissued + 1, opened = ?, sealed = NULL WHERE id = ?",
                json.dumps(dataclasses.astuple(version)),
                version.step,
                now,
                group,
            )
            db.run(AGAIN + " WHERE grp = ?", group)
            weigh_groups(db, [group])
            tally(db, "reissued")

        self._write(work)

    def reopen(self, group: int, sample: int, reason: str) -> None:
        """Sample a sealed slot anew."""

        def work(db: Rows) -> None:
            self._check_mine(db)
            self._lock(db, group, GroupState.OPEN, GroupState.READY)
            db.run("UPDATE rollout_groups SET state = 'open' WHERE id = ?", group)
            tally(db, "reopened")
            self._again(db, group, sample, reason)
            weigh_groups(db, [group])

        self._write(work)

    def reconcile(self, step: int, consumed: Sequence[tuple[int, int]]) -> int:
        """Follow a checkpoint."""

        def work(db: Rows) -> int:
            returned, after = 0, -1
            for first, last in [*sorted(consumed), (2**62, 2**62)]:
                void = db.all(
                    "SELECT id FROM rollout_groups WHERE id BETWEEN ? AND ? AND state = 'void'",
                    first,
                    last,
                )
                if void:
                    raise LedgerRefusal("void", f"consumed groups {[r['id'] for r in void]}")
                db.run(
                    "UPDATE rollout_groups SET state = 'committed' WHERE id BETWEEN ? AND ?",
                    first,
                    last,
                )
                returned += db.run(
                    "UPDATE rollout_groups SET state = 'ready' WHERE id > ? AND id < ? "
                    "AND state IN ('reserved', 'committed')",
                    after,
                    first,
                )
                after = last
            db.run(
                "UPDATE rollout_groups SET step = NULL WHERE state IN ('open', 'ready') "
                "AND step < ?",
                step,
            )
            # A checkpoint from long ago: what it wants again was pruned, and is to be opened anew.
            lost = db.run(
                "DELETE FROM rollout_groups WHERE state = 'ready' "
                "AND NOT EXISTS (SELECT 1 FROM slots WHERE grp = id)"
            )
            if lost:
                tally(db, "opened", -lost)
            return returned - lost

        return self._write(work)

    def prune(self, before_step: int) -> list[str]:
        """Forget the slots of groups that nobody can ask for."""
        gone = (
            "IN (SELECT id FROM rollout_groups WHERE state = 'void' "
            "OR (state = 'committed' AND step < ?))"
        )

        def work(db: Rows) -> list[str]:
            query = (
                f"SELECT segment FROM slots WHERE segment IS NOT NULL AND grp {gone} EXCEPT "
                f"SELECT segment FROM slots WHERE segment IS NOT NULL AND grp NOT {gone}"
            )
            segments = [row["segment"] for row in db.all(query, before_step, before_step)]
            db.run(f"DELETE FROM slots WHERE grp {gone}", before_step)
            return segments

        return self._write(work)

    # -- steps of transactions

    def _lock(self, db: Rows, group: int, *states: GroupState) -> None:
        """Lock a group that is in one of the states; refused otherwise."""
        rows = db.all("SELECT state FROM rollout_groups WHERE id = ?" + self.FOR_UPDATE, group)
        state = rows[0]["state"] if rows else "missing"
        if state not in states:
            raise LedgerRefusal("state", f"group {group} is {state}; allowed: {', '.join(states)}")
