"""One suite for every ledger, continued: attempts that are given back, and what is leased first."""

import random
import threading

import pytest

from jaxrl.pool.ledger import GroupState, LedgerRefusal
from jaxrl.pool.ledger_schema import Rows, tally
from jaxrl.pool.rollout import Failure, Version
from tests.pool.ledgers import group, lease_of, refused, sealed
from tests.pool.serving import until


def test_an_attempt_that_is_given_back_costs_nothing_of_the_budget(ledger):
    """More often than infrastructure may fail it; then it fails as often as it might before."""
    ledger.open_groups([group(0, samples=1, max_attempts=2)])
    for attempt in range(5):
        lease = lease_of(ledger)
        assert lease.attempt == attempt
        ledger.start(lease.token)
        assert ledger.cancel([lease.token], "pressure") == [None]
    ledger.fail(lease_of(ledger).token, Failure.INFRA, "x")
    assert ledger.live()[0].state is GroupState.OPEN
    ledger.seal(lease_of(ledger).token, sealed())
    assert ledger.members(0)[0].attempt == 6
    counts = ledger.counts()
    assert counts["cancelled_pressure"] == 5 and counts["retried"] == 1


def test_what_was_given_back_is_refused_with_the_reason(place, ledger):
    ledger.open_groups([group(0, samples=1)])
    before = lease_of(ledger)
    ledger.cancel([before.token], "pressure")
    acts = [
        lambda: ledger.find(before.token),
        lambda: ledger.start(before.token),
        lambda: ledger.heartbeat(before.token, 60),
        lambda: ledger.seal(before.token, sealed()),
        lambda: ledger.fail(before.token, Failure.ENV, "x"),
    ]
    for act in acts:
        refused("cancelled", act)
    assert [why and why.reason for why in ledger.cancel([before.token], "x")] == ["cancelled"]
    after = lease_of(ledger)  # somebody else has it now: it was given back all the same
    for act in acts:
        refused("cancelled", act)
    ledger.seal(after.token, sealed())
    refused("sealed", acts[0])
    assert ledger.counts()["refused_cancelled"] == 11


def test_what_is_sealed_or_gone_is_not_given_back_and_hinders_nobody(place, ledger):
    ledger.open_groups([group(0), group(1), group(2, samples=1)])
    leases = ledger.lease_many("w", 60, 5)
    tokens = [lease.token for lease in leases]
    ledger.seal(tokens[0], sealed(segment="first"))
    ledger.fail(tokens[4], Failure.DATA, "cannot be reset")
    told = ledger.cancel([*tokens, "nobody"], "pressure")
    assert [one and one.reason for one in told] == ["sealed", None, None, None, "void", "unknown"]
    assert ledger.cancel([], "pressure") == []
    assert ledger.counts()["cancelled_pressure"] == 3
    assert ledger.members(0)[0].sealed.segment == "first"
    again = ledger.lease_many("w", 60, 9)
    assert [(lease.group, lease.sample, lease.attempt) for lease in again] == [
        (0, 1, 1),
        (1, 0, 1),
        (1, 1, 1),
    ]


def test_a_new_epoch_fences_also_what_was_given_back(place, ledger):
    ledger.open_groups([group(0, samples=1)])
    lease = lease_of(ledger)
    ledger.cancel([lease.token], "pressure")
    later = place.open()
    later.begin_epoch()
    refused("fenced", lambda: ledger.find(lease.token))
    assert lease_of(later).attempt == 1  # it was nobody's: the new epoch took nothing back


def test_the_oldest_version_is_leased_first_and_of_one_version_what_takes_longest(ledger):
    def of(number: int, step: int, expected: float):
        return group(number, samples=1, version=Version(0, step, "w"), expected=expected)

    ledger.open_groups([of(0, 4, 9.0), of(1, 3, 1.0), of(2, 3, 5.0), of(3, 3, 5.0), of(4, 3, 0.0)])
    first = ledger.lease_many("w", 60, 2)
    rest = [lease_of(ledger).group for _ in range(3)]
    assert [lease.group for lease in first] + rest == [2, 3, 1, 4, 0]


def test_a_group_has_worked_as_long_as_its_longest_sample(place, ledger):
    """From its lease, not from its opening; an attempt that was given back does not count."""
    ledger.open_groups([group(0)])
    place.now += 100
    slow = lease_of(ledger)
    place.now += 50
    ledger.cancel([slow.token], "pressure")
    first, second = ledger.lease_many("w", 60, 2)
    place.now += 3
    ledger.seal(first.token, sealed())
    assert ledger.live()[0].worked == 3.0
    place.now += 4
    ledger.seal(second.token, sealed())
    live = ledger.live()[0]
    assert (live.worked, live.seconds, live.source) == (7.0, 157.0, "sums")
    ledger.reissue(0, Version(0, 9, "x"))
    assert ledger.live()[0].worked == 0.0


def test_workers_that_seal_while_their_attempts_are_given_back_seal_each_sample_once(place, ledger):
    """Budgets of one attempt, in which nothing may be void; threads that lease, start and seal, and
    one that gives back whatever it sees."""
    count, samples = 12, 4
    ledger.open_groups([group(n, samples, max_attempts=1) for n in range(count)])
    done, faults, lent = [], [], []
    taken, ended = threading.Lock(), threading.Event()

    def work(name: int) -> None:
        mine, chance = place.open(), random.Random(name)
        try:
            while len(done) < count * samples and not faults:
                for lease in mine.lease_many(f"worker {name}", 60, chance.randint(1, 3)):
                    with taken:
                        lent.append(lease.token)
                    try:
                        mine.start(lease.token)
                        mine.seal(lease.token, sealed(segment=f"attempt {lease.attempt}"))
                        done.append((lease.group, lease.sample))
                    except LedgerRefusal as refusal:
                        # or a later attempt was given back, too, or has sealed meanwhile
                        assert refusal.reason in ("cancelled", "expired", "sealed"), refusal
        except Exception as error:  # shown by the assertion below
            faults.append(error)

    def overload() -> None:
        chance, mine = random.Random(9), place.open()
        try:
            while not ended.is_set():
                with taken:
                    some = chance.sample(lent, min(len(lent), 3))
                mine.cancel(some, "pressure")
        except Exception as error:
            faults.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    breaker = threading.Thread(target=overload)
    for thread in (*workers, breaker):
        thread.start()
    for thread in workers:
        thread.join(120)
    ended.set()
    breaker.join(60)
    assert not faults, faults
    assert sorted(done) == [(g, s) for g in range(count) for s in range(samples)]
    assert {live.state for live in ledger.live()} == {GroupState.READY}
    assert ledger.voided(0) == [] and "retried" not in ledger.counts()
    for number in range(count):
        for member in ledger.members(number):
            assert member.sealed.segment == f"attempt {member.attempt}"


@pytest.mark.parametrize("reason", ["expired", "cancelled"])
def test_the_reason_is_that_of_the_attempt_itself(place, ledger, reason):
    """One attempt ran out, the next one was given back: each is told what became of it."""
    ledger.open_groups([group(0, samples=1)])
    late = lease_of(ledger)
    place.now += 61
    second = lease_of(ledger)
    ledger.cancel([second.token], "pressure")
    token = {"expired": late, "cancelled": second}[reason].token
    refused(reason, lambda: ledger.find(token))


def test_who_takes_back_leases_is_in_no_deadlock_with_a_failure(postgres_address):
    """A failure has locked its group and then counts; leases of that group and of an older one run
    out meanwhile."""
    from jaxrl.pool.ledger_postgres import PostgresLedger

    now = [1000.0]
    ledger, other = (PostgresLedger(postgres_address, "locks", lambda: now[0]) for _ in range(2))
    ledger.begin_epoch()
    ledger.open_groups([group(0, samples=1), group(1, samples=1)])
    ledger.lease_many("w", 60, 2)
    now[0] += 61
    taken: list[int] = []
    taking = threading.Thread(target=lambda: taken.append(other.expire()))
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"

    def fail(db: Rows) -> None:
        db.all("SELECT id FROM rollout_groups WHERE id = 1 FOR UPDATE")
        taking.start()
        until(lambda: ledger._read(lambda db: db.all(waiting)))
        tally(db, "retried")

    ledger._write(fail)
    taking.join(60)
    assert taken == [2] and ledger.counts()["retried"] == 3
    for one in (ledger, other):
        one.close()
