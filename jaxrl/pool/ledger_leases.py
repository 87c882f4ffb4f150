"""A gateway's half of a ledger: leases, seals and failures, in SQL that every database reads.

A transaction that changes a group or its slots locks the group's row first, so that two seals of
one group cannot both miss that they were the last.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxrl.pool.ledger import GroupState, Lease, LedgerRefusal, Reason, Sealed, SlotState
from jaxrl.pool.ledger_schema import (
    LENT,
    Row,
    Rows,
    epoch_of,
    leases_of,
    places_of,
    rows_of,
    shared_of,
    storable,
    tally,
    tally_refusals,
)
from jaxrl.pool.ledger_weights import weigh_groups, weights
from jaxrl.pool.rollout import Failure
from jaxrl.pool.tokens import Claim, Tokens, fresh

T = TypeVar("T")

# A lease that was granted this far in the future was granted by a clock that has been set back.
CLOCK_SLACK_S = 1.0

# Slots that one question names; a database has a limit.
AT_ONCE = 4096

# A slot to be leased again.
AGAIN = (
    "UPDATE slots SET state = 'pending', attempt = attempt + 1, token = NULL, min_step = NULL, "
    "max_step = NULL, sealed = NULL, worked = NULL, bytes = NULL"
)

# Which pending slots are leased first: of the oldest version, then what takes longest.
FIRST_COME = "g.dispatched, g.expected DESC, s.grp, s.sample"

# Whether there is anything to lease.
PENDING = (
    "SELECT s.grp, s.sample FROM slots s JOIN rollout_groups g ON g.id = s.grp "
    "WHERE s.state = 'pending' AND g.state = 'open'"
)

# Lease the first pending slots, in one statement.
FIRST = f" ORDER BY {FIRST_COME} LIMIT ?"
LEASED = (
    ") UPDATE slots SET state = 'leased', token = ?, owner = ?, expires = ?, lease_s = ?, "
    "leased = ? WHERE (grp, sample) IN (SELECT grp, sample FROM first) "
    "RETURNING grp, sample, attempt, prompt"
)


class _NotAll(Exception):
    """Some tokens may not act: nothing is changed."""


class Leases:
    """What a gateway does; see ``jaxrl.pool.ledger.Ledger`` for what each method promises."""

    FOR_UPDATE = ""  # what locks the rows of a query until the transaction ends
    _tokens: Tokens
    SKIP_LOCKED = ""  # the same for slots (``s``), passing over those that others have locked

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    # -- what a database brings along

    def _write(self, work: Callable[[Rows], T], *, durable: bool = True, frees: bool = True) -> T:
        """Run ``work`` in a transaction of its own. A refusal changes nothing and is counted.

        On return it survives the end of any process; with ``durable`` also a power cut. Leases need
        not: one that is lost is an attempt that is made again. Unless it ``frees``, there is
        nothing to lease after it that was not there before, and all who might act still may: it is
        none of the ``changes``.
        """
        raise TypeError(f"{type(self).__name__} has no database")

    def _read(self, work: Callable[[Rows], T]) -> T:
        """Run queries that change nothing."""
        raise TypeError(f"{type(self).__name__} has no database")

    def count(self, name: str, more: int = 1) -> None:
        """Add to a tally."""
        self._write(lambda db: tally(db, name, more), durable=False, frees=False)

    def changes(self) -> int | None:
        """Not known without asking."""
        return None

    # -- leases

    def still(self, seen: int | None, ends: Collection[float], lease_s: float) -> bool:
        """Whether leases may act for certain."""
        if seen is None or self.changes() != seen:
            return False
        now = self._clock()
        return all(0 < end - now <= lease_s + CLOCK_SLACK_S for end in ends)

    def lease(self, owner: str, lease_s: float) -> Lease | None:
        """The first pending slot."""
        return next(iter(self.lease_many(owner, lease_s, 1)), None)

    def lease_many(self, owner: str, lease_s: float, most: int) -> list[Lease]:
        """The first pending slots."""
        now = self._clock()

        def work(db: Rows) -> list[Lease]:
            self._take_back(db, now)
            return self._granted(db, owner, lease_s, most, now)

        late, pending = self._read(lambda db: (overdue(db, now), db.all(PENDING + " LIMIT 1")))
        if not (late or pending):
            return []  # who looks for work in vain holds up nobody
        return self._write(work, durable=False, frees=bool(late))

    def find(self, token: str) -> Lease:
        """The lease of a token that may still act."""
        _raised(self.check([token]))
        query = (
            "SELECT grp, sample, attempt, expires, prompt FROM slots "
            "WHERE grp = ? AND sample = ? AND token = ?"
        )
        claim = self._tokens.read(token)
        assert claim is not None  # it may act

        def work(db: Rows) -> list[Lease]:
            found = db.all(query, claim.group, claim.sample, claim.once)
            shared = shared_of(db, found)
            slots = [([(slot, token)], slot["expires"]) for slot in found]
            return [x for slot, ends in slots for x in leases_of(slot, shared, claim.epoch, ends)]

        found = self._read(work)
        return found[0] if found else self.find(token)  # it was taken back meanwhile

    def check(self, tokens: Sequence[str], late: bool = False) -> list[LedgerRefusal | None]:
        """Which tokens may act."""
        if not tokens:
            return []
        now = None if late else self._clock()
        claims = [self._tokens.read(token) for token in tokens]
        if self._read(lambda db: _all_act(db, claims, now)):
            return [None] * len(tokens)
        told = [held.refusal for held in self._read(lambda db: self._acting(db, tokens, now))]
        if any(told):
            self._write(lambda db: tally_refusals(db, told), durable=False, frees=False)
        return told

    def heartbeat(self, token: str, lease_s: float) -> float:
        """Extend a lease."""
        now = self._clock()

        def work(db: Rows) -> float:
            (held,) = self._locked(db, [token], now)
            if held.refusal:
                raise held.refusal
            db.run(
                "UPDATE slots SET expires = ?, lease_s = ? WHERE grp = ? AND sample = ?",
                *(now + lease_s, lease_s, held.group, held.sample),
            )
            return now + lease_s

        return self._write(work, durable=False, frees=False)

    def start(self, token: str) -> None:
        """LEASED -> RUNNING."""
        _raised(self.start_many([token]))

    def start_many(self, tokens: Sequence[str]) -> list[LedgerRefusal | None]:
        """LEASED -> RUNNING."""
        if not tokens:
            return []
        now = self._clock()
        return self._changed("UPDATE slots SET state = 'running'", (), tokens, now)

    def cancel(self, tokens: Sequence[str], cause: str) -> list[LedgerRefusal | None]:
        """LEASED or RUNNING -> PENDING."""
        if not tokens:
            return []
        change = (
            "UPDATE slots SET state = 'pending', cancelled = attempt, attempt = attempt + 1, "
            "token = NULL, reason = ?"
        )
        told = self._changed(change, (f"cancelled: {cause}",), tokens, None)
        if gone := told.count(None):
            self.count(f"cancelled_{cause}", gone)
        return told

    def _changed(
        self, change: str, values: Sequence[Any], tokens: Sequence[str], now: float | None
    ) -> list[LedgerRefusal | None]:
        """The same change to the slot of each token that may act; why others may not. It need not
        survive a power cut."""

        def together(db: Rows) -> list[LedgerRefusal | None]:
            self._move(db, change, tokens, [values] * len(tokens), now)
            return [None] * len(tokens)

        def apart(db: Rows) -> list[LedgerRefusal | None]:
            found = self._locked(db, tokens, now)
            db.many(
                change + " WHERE grp = ? AND sample = ?",
                [(*values, held.group, held.sample) for held in found if not held.refusal],
            )
            return tally_refusals(db, [held.refusal for held in found])

        try:
            return self._write(together, durable=False)
        except _NotAll:
            return self._write(apart, durable=False)

    def seal(self, token: str, sealed: Sealed) -> None:
        """LEASED or RUNNING -> SEALED."""
        _raised(self.seal_many([(token, sealed)]))

    def seal_many(
        self, seals: Sequence[tuple[str, Sealed]], weigh: bool = False
    ) -> list[LedgerRefusal | None]:
        """LEASED or RUNNING -> SEALED."""
        tokens = [token for token, _ in seals]
        if len(set(tokens)) < len(tokens):
            raise ValueError("a token is sealed twice at once; allowed: once")
        for failure, unjudged in {(one.failure, one.reward is None) for _, one in seals}:
            _check_sealed(failure, unjudged)
        now = self._clock()
        rows = [(now, *row) for row in rows_of([sealed for _, sealed in seals])]
        change = (
            "UPDATE slots SET state = 'sealed', worked = ? - leased, segment = ?, min_step = ?, "
            "max_step = ?, sealed = ?"
        )
        if weigh:
            change += ", bytes = ?"
            each = weights([one for _, one in seals])
            rows = [(*row, weight) for row, weight in zip(rows, each, strict=True)]

        def end(db: Rows, groups: Sequence[int]) -> None:
            stamp = "UPDATE rollout_groups SET sealed = ? WHERE id = ?"
            db.many(stamp, [(now, group) for group in groups])
            if weigh:
                weigh_groups(db, groups)
            _settle(db, groups)

        def together(db: Rows) -> list[LedgerRefusal | None]:
            end(db, self._move(db, change, tokens, rows, None))
            return [None] * len(tokens)

        def apart(db: Rows) -> list[LedgerRefusal | None]:
            found = self._locked(db, tokens, None)
            good = [(held, row) for held, row in zip(found, rows, strict=True) if not held.refusal]
            db.many(
                change + " WHERE grp = ? AND sample = ?",
                [(*row, held.group, held.sample) for held, row in good],
            )
            end(db, sorted({held.group for held, _ in good}))
            return tally_refusals(db, [held.refusal for held in found])

        try:
            return self._write(together, frees=False)
        except _NotAll:
            return self._write(apart, frees=False)

    def fail(self, token: str, failure: Failure, reason: str) -> None:
        """The attempt ended without a result."""
        if failure not in (Failure.INFRA, Failure.ENV, Failure.DATA):
            raise ValueError(
                f"failure={failure.value!r}; allowed: infra, env, data (others are sealed)"
            )
        now, reason = self._clock(), storable(reason)

        def work(db: Rows) -> None:
            (held,) = self._locked(db, [token], now)
            if held.refusal:
                raise held.refusal
            if failure is Failure.DATA:
                db.run(
                    "UPDATE slots SET state = 'failed', reason = ? WHERE grp = ? AND sample = ?",
                    *(reason, held.group, held.sample),
                )
                void(db, held.group, "data")
            else:
                self._again(db, held.group, held.sample, reason)

        self._write(work)

    def expire(self) -> int:
        """Take back leases past their time."""
        now = self._clock()
        late = self._read(lambda db: overdue(db, now))
        if not late:
            return 0
        return self._write(lambda db: self._take_back(db, now), durable=False)

    # -- steps of transactions

    def _granted(
        self, db: Rows, owner: str, lease_s: float, most: int, now: float, where: str = "", *at: int
    ) -> list[Lease]:
        """The first pending slots, leased; ``where`` is a further condition, ``at`` its values."""
        epoch, once, expires = epoch_of(db), fresh(), now + lease_s
        first = f"WITH first AS ({PENDING}{where}{FIRST}{self.SKIP_LOCKED}{LEASED}"
        found = db.all(first, *at, most, once, storable(owner), expires, lease_s, now)
        if not found:
            return []
        shared = shared_of(db, found)
        ages = sorted([(row["dispatched"], -row["expected"], row["id"]) for row in shared])
        turn = {group: place for place, (_, _, group) in enumerate(ages)}
        found = sorted(found, key=lambda row: (turn[row["grp"]], row["sample"]))
        slots = [(row["grp"], row["sample"], row["attempt"]) for row in found]
        granted = zip(found, self._tokens.grant(slots, epoch, once), strict=True)
        return leases_of(list(granted), shared, epoch, expires)

    def _move(
        self,
        db: Rows,
        change: str,
        tokens: Sequence[str],
        rows: Sequence[Sequence[Any]],
        now: float | None,
    ) -> list[int]:
        """Change the slots of different tokens, each with its row of values, if all of them may
        act (before their time is over, if ``now`` is given); their groups, locked. _NotAll
        otherwise: then the caller's transaction must end, and each be asked why."""
        claims = [self._tokens.read(token) for token in tokens]
        groups = _groups(db, claims, self.FOR_UPDATE)
        if None in claims or any(group["state"] == GroupState.VOID for group in groups):
            raise _NotAll
        # A slot knows the grant of its attempt alone, and none of an older epoch.
        in_time, times = _in_time(now)
        mine = f" WHERE grp = ? AND sample = ? AND token = ? AND state IN {LENT}{in_time}"
        moved = db.many(
            change + mine,
            [
                (*row, claim.group, claim.sample, claim.once, *times)
                for row, claim in zip(rows, claims, strict=True)
                if claim
            ],
        )
        if moved != len(tokens):
            raise _NotAll
        return [group["id"] for group in groups]

    def _locked(self, db: Rows, tokens: Sequence[str], now: float | None) -> list["_Held"]:
        """What the tokens hold, their groups locked: always in the order of their ids."""
        if self.FOR_UPDATE:
            _groups(db, [self._tokens.read(token) for token in tokens], self.FOR_UPDATE)
        return self._acting(db, tokens, now)

    def _acting(self, db: Rows, tokens: Sequence[str], now: float | None) -> list["_Held"]:
        """What each token holds, before its time is over (if ``now`` is given)."""
        claims = [self._tokens.read(token) for token in tokens]
        groups = {claim.group for claim in claims if claim}
        query = (
            "SELECT s.grp, s.sample, s.state, s.token, s.expires, s.lease_s, s.cancelled, "
            "g.state AS group_state FROM slots s JOIN rollout_groups g ON g.id = s.grp "
            f"WHERE s.grp IN {places_of(groups)}"
        )
        rows = db.all(query, *groups) if groups else []
        slots = {(row["grp"], row["sample"]): row for row in rows}
        epoch, found = epoch_of(db), list[_Held]()
        for claim in claims:
            row = slots.get(claim[:2]) if claim else None
            if claim is None or row is None:
                found.append(_Held(-1, -1, LedgerRefusal("unknown", "no attempt has this token")))
                continue
            reason, refusal = _why_not(row, claim, epoch, now), None
            if reason:
                what = f"group {claim.group} sample {claim.sample} attempt {claim.attempt}"
                refusal = LedgerRefusal(reason, what)
            found.append(_Held(claim.group, claim.sample, refusal))
        return found

    def _take_back(self, db: Rows, now: float) -> int:
        taken, late = 0, overdue(db, now)
        if late and self.FOR_UPDATE:  # all before the first tally: others take them in this order
            groups = {row["grp"] for row in late}
            query = f"SELECT id FROM rollout_groups WHERE id IN {places_of(groups)} ORDER BY id"
            db.all(query + self.FOR_UPDATE, *groups)
        for row in late:
            mine = "SELECT grp FROM slots WHERE grp = ? AND sample = ? AND token = ?"
            slot = (row["grp"], row["sample"], row["token"])
            still = db.all(f"{mine} AND state IN {LENT}", *slot)
            if still:
                tally(db, "expired")
                self._again(db, row["grp"], row["sample"], f"the lease of {row['owner']} ran out")
                taken += 1
        return taken

    @staticmethod
    def _again(db: Rows, group: int, sample: int, reason: str) -> None:
        """A new attempt at a slot, if its budget holds another one. The group's row is locked."""
        tally(db, "retried")
        spent = (
            " reason = ?, spent = spent + 1 WHERE grp = ? AND sample = ?"  # whatever comes of it
        )
        limit = "SELECT max_attempts AS n FROM rollout_groups WHERE id = ?"
        db.run("UPDATE slots SET" + spent, reason, group, sample)
        left = db.all("SELECT spent FROM slots WHERE grp = ? AND sample = ?", group, sample)
        if left[0]["spent"] < db.all(limit, group)[0]["n"]:
            db.run(AGAIN + " WHERE grp = ? AND sample = ?", group, sample)
            return
        db.run(
            "UPDATE slots SET state = 'failed', min_step = NULL, max_step = NULL, bytes = NULL "
            "WHERE grp = ? AND sample = ?",
            group,
            sample,
        )
        _settle(db, [group])


def void(db: Rows, group: int, reason: str) -> None:
    """Make a group void. Its row is locked."""
    tally(db, "void")
    tally(db, f"void_{reason}")
    db.run(
        "UPDATE rollout_groups SET state = 'void', reason = ?, "
        "voided = (SELECT value FROM tallies WHERE name = 'void') WHERE id = ?",
        reason,
        group,
    )


def _settle(db: Rows, groups: Sequence[int]) -> None:
    """READY, void or neither, after slots of the groups became final."""
    if not groups:
        return
    rows = db.all(
        "SELECT g.id, g.min_group, COUNT(*) AS samples, "
        "SUM(CASE WHEN s.state = 'sealed' THEN 1 ELSE 0 END) AS sealed, "
        "SUM(CASE WHEN s.state = 'failed' THEN 1 ELSE 0 END) AS failed "
        "FROM rollout_groups g JOIN slots s ON s.grp = g.id "
        f"WHERE g.id IN {places_of(groups)} GROUP BY g.id, g.min_group ORDER BY g.id",
        *groups,
    )
    ready: list[Row] = []
    for row in rows:
        if row["samples"] - row["failed"] < row["min_group"]:
            void(db, row["id"], Failure.INFRA.value)
        elif row["sealed"] + row["failed"] == row["samples"]:
            ready.append(row)
    db.many("UPDATE rollout_groups SET state = 'ready' WHERE id = ?", [(r["id"],) for r in ready])
    if partial := sum(row["failed"] > 0 for row in ready):
        tally(db, "partial_groups", partial)


def overdue(db: Rows, now: float) -> Sequence[Row]:
    """Slots whose lease ran out, or was granted by a clock that was set back."""
    found = db.all(
        f"SELECT grp, sample, token, owner FROM slots WHERE state IN {LENT} "
        "AND (expires <= ? OR expires - lease_s > ?)",
        now,
        now + CLOCK_SLACK_S,
    )
    # In SQL, SQLite would go through all slots rather than put these few in order.
    return sorted(found, key=lambda row: (row["grp"], row["sample"]))


class _Held(NamedTuple):
    """The slot of a token, or why the token may not act."""

    group: int
    sample: int
    refusal: LedgerRefusal | None


def _in_time(now: float | None) -> tuple[str, tuple[float, ...]]:
    """The condition that a lease's time is not over, and its values."""
    if now is None:
        return "", ()
    return " AND expires > ? AND expires - lease_s <= ?", (now, now + CLOCK_SLACK_S)


def _all_act(db: Rows, claims: Sequence[Claim | None], now: float | None) -> bool:
    """Whether all claims of one grant may act; why one may not is not said here."""
    slots = {(claim.group, claim.sample) for claim in claims if claim}
    grants = {claim.once for claim in claims if claim}
    if None in claims or len(grants) > 1 or len(slots) > AT_ONCE:
        return False
    groups = {group for group, _ in slots}
    in_time, times = _in_time(now)
    query = (
        "SELECT COUNT(*) AS n FROM slots s JOIN rollout_groups g ON g.id = s.grp "
        f"WHERE s.grp IN {places_of(groups)} "
        f"AND (s.grp, s.sample) IN (VALUES {', '.join(['(?, ?)'] * len(slots))}) "
        f"AND s.token = ? AND s.state IN {LENT} AND g.state <> 'void'{in_time}"
    )
    values = itertools.chain(groups, *slots, grants, times)
    return db.all(query, *values)[0]["n"] == len(slots)


def _groups(db: Rows, claims: Sequence[Claim | None], lock: str) -> Sequence[Row]:
    """The groups of claims, in the order of their ids."""
    groups = {claim.group for claim in claims if claim}
    query = f"SELECT id, state FROM rollout_groups WHERE id IN {places_of(groups)} ORDER BY id"
    return db.all(query + lock, *groups) if groups else []


def _why_not(row: Row, claim: Claim, epoch: int, now: float | None) -> Reason | None:
    """Why an attempt at a slot may not act, if so."""
    if claim.epoch < epoch:
        return "fenced"
    if row["group_state"] == GroupState.VOID:
        return "void"
    if row["state"] == SlotState.SEALED:
        return "sealed"
    if row["token"] != claim.once or row["state"] not in (SlotState.LEASED, SlotState.RUNNING):
        return "cancelled" if row["cancelled"] == claim.attempt else "expired"
    if now is not None and not 0 < row["expires"] - now <= row["lease_s"] + CLOCK_SLACK_S:
        return "expired"
    return None


def _raised(told: Sequence[LedgerRefusal | None]) -> None:
    for refusal in told:
        if refusal:
            raise refusal


def _check_sealed(failure: Failure, unjudged: bool) -> None:
    if failure not in (Failure.NONE, Failure.POLICY_TIMEOUT, Failure.JUDGE):
        raise ValueError(
            f"failure={failure.value!r}; allowed in a seal: none, "
            "policy-timeout, judge (others are failed)"
        )
    if unjudged != (failure is Failure.JUDGE):
        told = "no reward" if unjudged else "a reward"
        raise ValueError(
            f"{told} with failure={failure.value!r}; allowed: none beside 'judge', else a number"
        )
