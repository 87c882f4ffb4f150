"""One suite for every ledger, continued: leases that need permits, and a trainer that waits."""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from jaxrl.pool.ledger import SlotState
from jaxrl.pool.ledger_schema import Rows
from jaxrl.pool.ledger_weights import weights
from jaxrl.pool.permits import BELIEVED_S, Permits, Used
from jaxrl.pool.rollout import Failure, Version
from tests.pool.ledgers import group, lease_of, refused, sealed
from tests.pool.serving import until

LEASE_S = 60.0


def leased(ledger, most: int, permits: Permits) -> list[tuple[int, int]]:
    granted = ledger.lease_within("w", LEASE_S, most, permits)
    return [(lease.group, lease.sample) for lease in granted.leases]


def tokens(ledger, most: int, permits: Permits) -> list[str]:
    return [lease.token for lease in ledger.lease_within("w", LEASE_S, most, permits).leases]


def weighed(ledger, token: str, size: int, segment: str) -> None:
    assert ledger.seal_many([(token, sealed(bytes=size, segment=segment))], weigh=True) == [None]


# -- one for a whole attempt


@pytest.mark.parametrize("unit", ["judge_calls", "sandboxes"])
def test_no_more_are_under_way_than_there_are_permits_and_the_order_is_that_of_leases(ledger, unit):
    one, two = (Permits(**{unit: n}) for n in (1, 2))
    ledger.open_groups([group(0, version=Version(0, 4, "w")), group(1), group(2)])
    granted = ledger.lease_within("w", LEASE_S, 9, two)
    assert [(lease.group, lease.sample) for lease in granted.leases] == [(1, 0), (1, 1)]
    assert granted.short == (unit,)
    assert ledger.used(two) == Used(2, 0, 0) and two.held(ledger.used(two)) == {unit: 2}
    assert ledger.lease_within("w", LEASE_S, 9, two) == ([], (unit,))
    assert ledger.lease_within("w", LEASE_S, 9, one) == ([], (unit,))  # less than are under way
    first, second = (lease.token for lease in granted.leases)
    ledger.seal(first, sealed())
    assert leased(ledger, 9, two) == [(2, 0)]
    ledger.fail(second, Failure.INFRA, "x")
    assert leased(ledger, 9, two) == [(1, 1)]  # an older version goes first
    assert leased(ledger, 9, Permits()) == [(2, 1), (0, 0), (0, 1)]  # no limit, no counting
    assert ledger.lease_within("w", LEASE_S, 9, two) == ([], ())  # nothing waits


def test_an_attempt_needs_a_permit_of_each_unit(ledger):
    ledger.open_groups([group(0, samples=5)])
    granted = ledger.lease_within("w", LEASE_S, 9, Permits(judge_calls=2, sandboxes=4))
    assert len(granted.leases) == 2 and granted.short == ("judge_calls",)


@pytest.mark.parametrize("end", ["expired", "cancelled", "void", "epoch", "reissued"])
def test_a_permit_ends_with_its_attempt(place, ledger, end):
    ledger.open_groups([group(0, samples=1), group(1, samples=1)])
    one = Permits(sandboxes=1)
    (token,) = tokens(ledger, 9, one)
    assert leased(ledger, 9, one) == []
    match end:
        case "expired":
            place.now += LEASE_S - 1
            assert leased(ledger, 9, one) == []
            place.now += 2
        case "cancelled":
            ledger.cancel([token], "pressure")
        case "void":
            ledger.void(0, "stale")
        case "epoch":
            ledger.begin_epoch()
        case "reissued":
            ledger.reissue(0, Version(0, 9, "later"))
    assert leased(ledger, 9, one) == [(1, 0) if end in ("void", "reissued") else (0, 0)]
    assert leased(ledger, 9, one) == []


def test_what_others_lease_without_a_limit_counts_also_after_a_restart(place, ledger):
    ledger.open_groups([group(0, samples=4)])
    lease_of(ledger)
    two = Permits(sandboxes=2)
    assert leased(place.open(), 9, two) == [(0, 1)]
    assert leased(place.open(), 9, two) == []  # another one knows what is held as well


def test_workers_that_die_at_random_never_hold_more_than_there_are_and_all_is_sealed(place, ledger):
    """Threads with ledgers of their own, one lease in four never ended. The clock goes on when all
    of them found nothing: then only the dead hold any. What is held outside of the ledger is a part
    of what it counts."""
    threads, count, samples, limit = 5, 8, 4, 3
    permits = Permits(judge_calls=limit, sandboxes=limit + 2)
    ledger.open_groups([group(n, samples, max_attempts=10**6) for n in range(count)])
    holding, idle, faults, turn = set[str](), set[int](), [], threading.Condition()
    done: list[tuple[int, int]] = []
    most = [0]

    def ended() -> bool:
        return len(done) == count * samples or bool(faults)

    def wait(name: int) -> None:
        with turn:
            idle.add(name)
            if len(idle) == threads:
                place.now += LEASE_S + 1
                idle.clear()
            turn.notify_all()
            turn.wait_for(lambda: name not in idle or ended(), 60)

    def work(name: int) -> None:
        mine, chance = place.open(), random.Random(name)
        try:
            while not ended():
                granted = mine.lease_within(f"w {name}", LEASE_S, chance.randint(1, 4), permits)
                if not granted.leases:
                    wait(name)
                alive = [lease for lease in granted.leases if chance.random() < 0.75]
                with turn:
                    holding.update(lease.token for lease in alive)
                    most[0] = max(most[0], len(holding))
                for lease in alive:
                    time.sleep(0.002 * chance.random())
                    with turn:
                        holding.remove(lease.token)
                    mine.seal(lease.token, sealed())
                    with turn:
                        done.append((lease.group, lease.sample))
                        idle.clear()
                        turn.notify_all()
        except Exception as error:  # shown by the assertion below
            faults.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not faults, faults
    assert sorted(done) == [(g, s) for g in range(count) for s in range(samples)]
    assert 1 <= most[0] <= limit  # one that is not kept to grants four at once
    assert ledger.used(permits) == Used(0, 0, 0) and ledger.counts()["expired"] > 0


def test_of_two_gateways_one_counts_after_the_other(postgres_address):
    """The second asks while the first has counted, and leased the only one that may be under
    way."""
    from jaxrl.pool.ledger_postgres import PostgresLedger

    one = Permits(sandboxes=1)
    ledger, other = (PostgresLedger(postgres_address, "counting", lambda: 1000.0) for _ in "ab")
    ledger.begin_epoch()
    ledger.open_groups([group(0)])
    taken: list[list[tuple[int, int]]] = []
    taking = threading.Thread(target=lambda: taken.append(leased(other, 9, one)))
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"

    def first(db: Rows) -> None:
        ledger._one_at_a_time(db)
        assert ledger._granted(db, "w", LEASE_S, 1, 1000.0)
        taking.start()
        until(lambda: taken or ledger._read(lambda db: db.all(waiting)))

    ledger._write(first)
    taking.join(60)
    assert taken == [[]] and ledger.used(one) == Used(1, 0, 0)
    for each in (ledger, other):
        each.close()


# -- bytes


def test_rows_of_a_record_share_its_bytes():
    """By hand: a record of 10 bytes with three rows, and one of 7 with a row of its own."""
    rows = [sealed(segment="a", offset=0, bytes=10, row=row) for row in range(3)]
    told = weights([rows[0], sealed(segment="a", offset=10, bytes=7), *rows[1:]])
    assert told == [4, 7, 3, 3] and weights([]) == []


def test_over_the_bytes_nothing_begins_and_what_is_under_way_is_sealed(place, ledger):
    limit = Permits(spool_bytes=100)
    ledger.open_groups([group(n) for n in range(4)])
    first, second, third = tokens(ledger, 3, limit)
    weighed(ledger, first, 99, "a")
    (fourth,) = tokens(ledger, 1, limit)  # not over it yet
    weighed(ledger, second, 1, "b")
    granted = ledger.lease_within("w", LEASE_S, 9, limit)
    assert granted == ([], ("spool_bytes",)) and ledger.used(limit) == Used(0, 0, 100)
    weighed(ledger, third, 50, "c")
    weighed(ledger, fourth, 50, "d")
    assert ledger.used(limit).spool_bytes == 200 and leased(place.open(), 9, limit) == []
    ledger.reserve(0, [0], 3)
    assert leased(ledger, 9, limit) == []  # no checkpoint covers it
    ledger.commit(0)
    assert ledger.used(limit).spool_bytes == 100
    ledger.void(1, "filtered")
    assert leased(ledger, 9, limit) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    ledger.reconcile(0, [])  # an older checkpoint: it is to be consumed again
    assert ledger.used(limit).spool_bytes == 100


def test_what_a_group_takes_is_what_its_sealed_samples_take(ledger):
    limit = Permits(spool_bytes=1)
    ledger.open_groups([group(0), group(1)])
    for place, token in enumerate(tokens(ledger, 4, limit)):
        weighed(ledger, token, 10**place, f"{place}")
    assert ledger.used(limit).spool_bytes == 1111
    ledger.reopen(0, 1, "damaged")
    assert ledger.used(limit).spool_bytes == 1101
    ledger.reissue(1, Version(0, 9, "later"))
    assert ledger.used(limit).spool_bytes == 1


def test_what_was_sealed_without_a_limit_is_weighed_later(ledger):
    limit = Permits(spool_bytes=10)
    ledger.open_groups([group(0), group(1)])
    leases = ledger.lease_many("w", LEASE_S, 4)
    rows = [sealed(bytes=9, segment="a", row=row) for row in range(3)]
    seals = [(lease.token, row) for lease, row in zip(leases, rows, strict=False)]
    assert ledger.seal_many(seals) == [None] * 3
    assert ledger.used(limit).spool_bytes == 0
    ledger.weigh()
    assert ledger.used(limit).spool_bytes == 9
    weighed(ledger, leases[3].token, 5, "b")
    ledger.weigh()  # nothing twice
    assert ledger.used(limit).spool_bytes == 14


def test_a_seal_that_comes_while_a_trainer_weighs_is_not_lost(postgres_address, monkeypatch):
    """Both add up one group's bytes: whoever is second must see what the first has written."""
    from jaxrl.pool.ledger_postgres import PostgresLedger

    limit = Permits(spool_bytes=10)
    ledger, other = (PostgresLedger(postgres_address, "weighing", lambda: 1000.0) for _ in "ab")
    ledger.begin_epoch()
    ledger.open_groups([group(0, samples=3)])
    first, second, _ = ledger.lease_many("w", LEASE_S, 3)
    ledger.seal(first.token, sealed(bytes=9, segment="a"))
    weighing = threading.Thread(target=ledger.weigh)
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    move = other._move

    def slowly(*told: Any) -> Any:
        groups = move(*told)
        weighing.start()
        until(lambda: not weighing.is_alive() or ledger._read(lambda db: db.all(waiting)))
        return groups

    monkeypatch.setattr(other, "_move", slowly)
    weighed(other, second.token, 5, "b")
    weighing.join(60)
    assert ledger.used(limit).spool_bytes == 14
    for each in (ledger, other):
        each.close()


def on_disk(ledger, live: Sequence) -> int:
    """The records that live groups have a sample in, each once."""
    found = [member.sealed for one in live for member in ledger.members(one.id)]
    return sum({(one.segment, one.offset): one.bytes for one in found}.values())


@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_are_those_of_the_records_whatever_became_of_groups(place, ledger, seed):
    """Against a sum over all records, after each of many transitions drawn at random. A record is
    of one group, so that it is in flight as a whole."""
    chance, limit, made = random.Random(seed), Permits(spool_bytes=10**9), 0
    for turn in range(60):
        live = ledger.live()
        states = {name: [one.id for one in live if one.state == name] for name in ("open", "ready")}
        match chance.choice(("open", "seal", "seal", "reserve", "void", "reissue", "back")):
            case "open":
                ledger.open_groups([group(made, samples=3, max_attempts=99)])
                made += 1
            case "seal":
                granted = ledger.lease_within("w", LEASE_S, 3, limit).leases
                for number in {lease.group for lease in granted}:
                    mine = [lease.token for lease in granted if lease.group == number]
                    size = chance.randint(1, 99)
                    record = [
                        sealed(bytes=size, segment=f"{turn}", offset=number, row=row)
                        for row in range(len(mine))
                    ]
                    ledger.seal_many(list(zip(mine, record, strict=True)), weigh=True)
            case "reserve" if states["ready"]:
                ledger.reserve(turn, [states["ready"][0]], 0)
                if chance.random() < 0.5:
                    ledger.commit(turn)
            case "void" if states["ready"]:
                ledger.void(states["ready"][-1], "filtered")
            case "reissue" if states["ready"]:
                ledger.reissue(states["ready"][-1], Version(0, turn, "w"))
            case "back":
                ledger.reconcile(0, [])
            case _:
                continue
        ledger = place.open() if chance.random() < 0.2 else ledger
        assert ledger.used(limit).spool_bytes == on_disk(ledger, ledger.live())


# -- a trainer that waits


def test_groups_that_a_trainer_lacks_may_begin_whatever_lies_there(place, ledger):
    limit = Permits(spool_bytes=10)
    ledger.open_groups([group(n, version=Version(0, 5 - n, "w")) for n in range(4)])
    weighed(ledger, tokens(ledger, 1, limit)[0], 10, "a")  # of group 3, the oldest version
    assert leased(ledger, 9, limit) == []
    ledger.lack(1, BELIEVED_S)
    assert leased(ledger, 9, limit) == [(3, 1)]
    assert leased(ledger, 9, limit) == []  # it needs no other
    ledger.lack(2, BELIEVED_S)
    granted = ledger.lease_within("w", LEASE_S, 9, limit)
    assert [(lease.group, lease.sample) for lease in granted.leases] == [(2, 0), (2, 1)]
    assert granted.short == ("spool_bytes",)
    ledger.lack(0, 0.0)
    ledger.cancel([lease.token for lease in granted.leases], "x")
    assert leased(ledger, 9, limit) == []
    ledger.lack(9, BELIEVED_S)
    place.now += BELIEVED_S + 1
    assert leased(ledger, 9, limit) == []  # it has not said so again
    ledger.lack(9, BELIEVED_S)
    assert len(leased(ledger, 9, limit)) == 6


def test_what_a_step_must_have_again_comes_before_other_groups_that_are_lacked(ledger):
    limit = Permits(spool_bytes=5)
    ledger.open_groups([group(0, version=Version(0, 2, "w")), group(1), group(2)])
    first = ledger.lease_many("w", LEASE_S, 6)
    for place, lease in enumerate(first[2:]):
        weighed(ledger, lease.token, 9, f"{place}")
    ledger.cancel([lease.token for lease in first[:2]], "x")
    ledger.reserve(7, [2], 0)
    ledger.reconcile(7, [])  # due at step 7 again
    ledger.reopen(2, 0, "damaged")
    ledger.lack(1, BELIEVED_S)
    assert leased(ledger, 9, limit) == [(2, 0)]


def test_a_trainers_judge_comes_before_what_is_not_leased_yet(place, ledger):
    one = Permits(judge_calls=1)
    ledger.open_groups([group(0)])
    (token,) = tokens(ledger, 9, one)
    assert not ledger.ask_judge(300.0, one)
    ledger.seal(token, sealed())
    assert ledger.lease_within("w", LEASE_S, 9, one) == ([], ("judge_calls",))
    assert ledger.ask_judge(300.0, one) and ledger.used(one) == Used(0, 1, 0)
    place.now += 299
    assert leased(ledger, 9, one) == []
    ledger.end_judging()
    assert leased(ledger, 9, one) == [(0, 1)]


@pytest.mark.parametrize(("may", "seconds"), [(True, 300.0), (False, BELIEVED_S)])
def test_a_trainer_that_is_gone_keeps_no_permit(place, ledger, may, seconds):
    one = Permits(sandboxes=1)
    ledger.open_groups([group(0)])
    held = [] if may else tokens(ledger, 1, one)
    assert ledger.ask_judge(300.0, one) is may
    ledger.cancel(held, "x")
    assert leased(ledger, 1, one) == []
    place.now += seconds + 1
    assert leased(ledger, 1, one) == [(0, 0)]


def test_a_new_epoch_forgets_what_the_trainer_before_it_said_and_fences_it(place, ledger):
    both = Permits(spool_bytes=1, judge_calls=1)
    ledger.open_groups([group(0), group(1)])
    weighed(ledger, lease_of(ledger).token, 1, "a")
    ledger.lack(2, BELIEVED_S)
    assert ledger.ask_judge(300.0, both)
    later = place.open()
    later.begin_epoch()
    assert later.used(both) == Used(0, 0, 1) and leased(later, 9, both) == []
    for act in (
        lambda: ledger.lack(2, BELIEVED_S),
        lambda: ledger.ask_judge(300.0, both),
        ledger.end_judging,
        ledger.weigh,
    ):
        refused("fenced", act)
    assert {one.slots[SlotState.LEASED] for one in later.live()} == {0}
