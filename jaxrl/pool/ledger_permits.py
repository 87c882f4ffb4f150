"""Leases that need permits, and what a trainer says while it waits for them, in SQL that every
database reads; see ``jaxrl.pool.permits``.

What limits the leases is counted in the transaction that grants them, one such at a time.
"""

import json

from jaxrl.pool.ledger import Granted, LedgerRefusal
from jaxrl.pool.ledger_leases import PENDING, Leases, overdue
from jaxrl.pool.ledger_schema import LENT, LIVE, Rows, epoch_of, sealed_of
from jaxrl.pool.ledger_weights import weigh_groups, weights
from jaxrl.pool.permits import BELIEVED_S, Permits, Used

# What a trainer says, in ``meta``: a number, and until when it is believed.
LACKING, JUDGING = "lacking", "judging"

# Of the first open groups alone, before all others those that a step must have again.
LACKED = (
    " AND g.id IN (SELECT id FROM rollout_groups WHERE state = 'open' ORDER BY "
    "CASE WHEN step IS NULL THEN 1 ELSE 0 END, dispatched, expected DESC, id LIMIT ?)"
)

ATTEMPTS = (
    "SELECT COUNT(*) AS n FROM slots s JOIN rollout_groups g ON g.id = s.grp "
    f"WHERE s.state IN {LENT} AND g.state <> 'void'"
)
BYTES = f"SELECT COALESCE(SUM(bytes), 0) AS n FROM rollout_groups WHERE state IN {LIVE}"
UNWEIGHED = (
    "SELECT s.grp, s.sample, s.sealed FROM slots s JOIN rollout_groups g ON g.id = s.grp "
    f"WHERE s.state = 'sealed' AND s.bytes IS NULL AND g.state IN {LIVE}"
)


class PermittedLeases(Leases):
    """What permits change; see ``jaxrl.pool.ledger.Ledger`` for what each method promises."""

    _began: int | None = None  # the epoch that this object began, of a trainer

    def lease_within(self, owner: str, lease_s: float, most: int, permits: Permits) -> Granted:
        """The first pending slots that there are permits for."""
        now = self._clock()

        def look(db: Rows) -> Granted | None:
            """Who looks for work in vain holds up nobody."""
            if overdue(db, now):
                return None
            used = _used(db, permits, now)
            room, where, at = _room(db, most, permits, used, now)
            if room > 0 and db.all(f"{PENDING}{where} LIMIT 1", *at):
                return None
            return Granted([], _short(db, permits, used))

        def work(db: Rows) -> Granted:
            self._one_at_a_time(db)
            self._take_back(db, now)
            used = _used(db, permits, now)
            room, where, at = _room(db, most, permits, used, now)
            leases = self._granted(db, owner, lease_s, room, now, where, *at) if room > 0 else []
            if len(leases) == most:
                return Granted(leases, ())
            used = used._replace(attempts=used.attempts + len(leases))
            return Granted(leases, _short(db, permits, used))

        return self._read(look) or self._write(work, durable=False)

    def used(self, permits: Permits) -> Used:
        """What is held now."""
        now = self._clock()
        return self._read(lambda db: _used(db, permits, now))

    def weigh(self) -> None:
        """Weigh live sealed samples that were not."""

        def work(db: Rows) -> None:
            self._check_mine(db)
            # A seal adds up its group as well: who is second must see what the first has written.
            of = f"SELECT grp FROM ({UNWEIGHED}) AS unweighed"
            lock = f"SELECT id FROM rollout_groups WHERE id IN ({of}) ORDER BY id"
            groups = {row["id"] for row in db.all(lock + self.FOR_UPDATE)}
            if not groups:
                return
            rows = [row for row in db.all(UNWEIGHED) if row["grp"] in groups]
            found = weights([sealed_of(row["sealed"]) for row in rows])
            db.many(
                "UPDATE slots SET bytes = ? WHERE grp = ? AND sample = ? AND state = 'sealed' "
                "AND bytes IS NULL",
                [(n, row["grp"], row["sample"]) for n, row in zip(found, rows, strict=True)],
            )
            weigh_groups(db, sorted(groups))

        self._write(work)

    def lack(self, groups: int, seconds: float) -> None:
        """A trainer waits for so many groups."""
        until = self._clock() + seconds

        def work(db: Rows) -> None:
            self._check_mine(db)
            _say(db, LACKING, groups, until)

        self._write(work, durable=False)

    def ask_judge(self, seconds: float, permits: Permits) -> bool:
        """Keep a permit of each unit for the trainer."""
        now = self._clock()

        def work(db: Rows) -> bool:
            self._one_at_a_time(db)
            self._check_mine(db)
            _say(db, JUDGING, 1, now + BELIEVED_S)
            may = all(room >= 0 for room in permits.rooms(_used(db, permits, now)).values())
            if may:
                _say(db, JUDGING, 1, now + seconds)
            return may

        return self._write(work, durable=False)

    def end_judging(self) -> None:
        """The trainer's permits are free."""

        def work(db: Rows) -> None:
            self._check_mine(db)
            _say(db, JUDGING, 0, 0.0)

        self._write(work, durable=False)

    # -- steps of transactions

    def _check_mine(self, db: Rows) -> None:
        epoch = epoch_of(db)
        if self._began is not None and epoch != self._began:
            raise LedgerRefusal("fenced", f"this is epoch {self._began}, epoch {epoch} has begun")

    def _one_at_a_time(self, db: Rows) -> None:
        """Wait until nobody else counts what is held in order to hold more, or begins an epoch."""
        db.all("SELECT value FROM meta WHERE name = 'epoch'" + self.FOR_UPDATE)


def _room(
    db: Rows, most: int, permits: Permits, used: Used, now: float
) -> tuple[int, str, tuple[int, ...]]:
    """How many attempts may begin; and which, as a condition with its values."""
    room = min([most, *permits.rooms(used).values()])
    if not permits.shut(used):
        return room, "", ()
    lacking = _said(db, LACKING, now)
    return (room if lacking else 0), LACKED, (lacking,)


def _short(db: Rows, permits: Permits, used: Used) -> tuple[str, ...]:
    """The units for lack of which what is pending is not leased."""
    if not db.all(PENDING + " LIMIT 1"):
        return ()
    short = [unit for unit, room in permits.rooms(used).items() if room <= 0]
    return (*(["spool_bytes"] if permits.shut(used) else []), *short)


def _used(db: Rows, permits: Permits, now: float) -> Used:
    """Only what has a limit is looked at."""
    attempts, verdicts, spool_bytes = 0, 0, 0
    if permits.judge_calls or permits.sandboxes:
        attempts, verdicts = int(db.all(ATTEMPTS)[0]["n"]), _said(db, JUDGING, now)
    if permits.spool_bytes:
        spool_bytes = int(db.all(BYTES)[0]["n"])
    return Used(attempts, verdicts, spool_bytes)


def _say(db: Rows, name: str, number: int, until: float) -> None:
    db.run(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        name,
        json.dumps([number, until]),
    )


def _said(db: Rows, name: str, now: float) -> int:
    """The number that is believed; 0 where none is."""
    for row in db.all("SELECT value FROM meta WHERE name = ?", name):
        number, until = json.loads(row["value"])
        return number if now < until else 0
    return 0
