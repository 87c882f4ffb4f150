"""One suite for every ledger: each transition, its condition, and what is refused."""

import sqlite3
import threading
import time

import pytest

from jaxrl.pool.ledger import GroupState, open_ledger
from jaxrl.pool.ledger_sqlite import SqliteLedger
from jaxrl.pool.rollout import Failure, Version
from tests.pool.ledgers import fill, group, lease_of, refused, sealed


def test_a_slot_goes_from_pending_to_sealed_and_its_group_to_committed(ledger):
    ledger.open_groups([group(0)])
    lease = lease_of(ledger, "worker 1")
    assert (lease.group, lease.sample, lease.attempt, lease.epoch) == (0, 0, 0, 0)
    assert (lease.prompt, lease.task_key, lease.facts) == ((5, 6), "sum/0", group(0).facts)
    assert (lease.version, lease.expires) == (Version(0, 3, "w"), 1060.0)
    assert ledger.find(lease.token) == lease
    ledger.start(lease.token)
    ledger.start(lease.token)
    assert ledger.counts()["slots_running"] == 1
    ledger.seal(lease.token, sealed())
    assert ledger.live()[0].state is GroupState.OPEN
    other = lease_of(ledger, "worker 2")
    assert (other.sample, other.prompt) == (1, (5, 7))
    ledger.seal(other.token, sealed(4))
    live = ledger.live()[0]
    assert (live.state, live.oldest, live.youngest) == (GroupState.READY, 3, 3)
    assert [member.sample for member in ledger.members(0)] == [0, 1]
    assert ledger.members(0)[1].sealed == sealed(4)
    ledger.reserve(3, [0], oldest=3)
    assert ledger.live()[0].step == 3
    ledger.commit(3)
    assert ledger.live() == [] and ledger.counts()["groups_committed"] == 1
    assert ledger.lease("worker 1", 60) is None


def test_tokens_cannot_be_guessed(ledger):
    ledger.open_groups([group(n) for n in range(8)])
    tokens = {lease_of(ledger).token for _ in range(16)}
    assert len(tokens) == 16 and min(map(len, tokens)) >= 43  # 256 bits
    refused("unknown", lambda: ledger.find("guess"))
    assert ledger.counts()["refused_unknown"] == 1


def test_the_first_seal_wins(ledger):
    ledger.open_groups([group(0)])
    lease = lease_of(ledger)
    ledger.seal(lease.token, sealed(segment="first"))
    refused("sealed", lambda: ledger.seal(lease.token, sealed(segment="second")))
    refused("sealed", lambda: ledger.find(lease.token))
    assert ledger.members(0)[0].sealed.segment == "first"
    assert ledger.counts()["refused_sealed"] == 2


def test_what_is_refused_in_a_batch_does_not_hinder_the_others(place, ledger):
    """Leases, starts and seals of many in one transaction: each as if it were asked alone."""
    ledger.open_groups([group(0), group(1), group(2)])
    leases = ledger.lease_many("w", 60, 5)
    assert [(lease.group, lease.sample) for lease in leases] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
    ]
    assert [lease.prompt for lease in leases] == [(5, 6), (5, 7)] * 2 + [(5, 6)]
    assert [ledger.find(lease.token) for lease in leases] == leases
    assert len(ledger.lease_many("w", 60, 5)) == 1 and ledger.lease_many("w", 60, 5) == []
    tokens = [lease.token for lease in leases]
    ledger.seal(tokens[1], sealed(segment="first"))
    ledger.fail(tokens[4], Failure.DATA, "cannot be reset")
    wanted = [None, "sealed", None, None, "void", "unknown"]
    for act in (ledger.check, ledger.start_many):
        assert [told and told.reason for told in act([*tokens, "nobody"])] == wanted
    assert ledger.counts()["slots_running"] == 3
    place.now += 61  # late, but nobody has taken them back
    assert {told and told.reason for told in ledger.check(tokens[2:4])} == {"expired"}
    assert ledger.check(tokens[2:4], late=True) == [None, None]
    told = ledger.seal_many([(token, sealed()) for token in [*tokens, "nobody"]])
    assert [one and one.reason for one in told] == wanted
    assert [live.state for live in ledger.live()] == [GroupState.READY] * 2
    assert ledger.members(0)[1].sealed.segment == "first"
    assert ledger.counts()["refused_sealed"] == ledger.counts()["refused_void"] == 3
    with pytest.raises(ValueError, match="sealed twice at once"):
        ledger.seal_many([("nobody", sealed())] * 2)


def test_a_lease_runs_out_and_its_late_seal_is_refused(place, ledger):
    ledger.open_groups([group(0, samples=1)])
    slow = lease_of(ledger, "slow")
    place.now += 40
    assert ledger.heartbeat(slow.token, 60) == 1100.0
    place.now += 40
    assert ledger.lease("other", 60) is None
    place.now += 21
    refused("expired", lambda: ledger.find(slow.token))
    refused("expired", lambda: ledger.heartbeat(slow.token, 60))
    quick = lease_of(ledger, "quick")
    assert (quick.sample, quick.attempt) == (0, 1)
    refused("expired", lambda: ledger.seal(slow.token, sealed(segment="late")))
    ledger.seal(quick.token, sealed(segment="in time"))
    refused("sealed", lambda: ledger.seal(slow.token, sealed(segment="late")))
    assert ledger.members(0)[0].sealed.segment == "in time"
    assert ledger.counts()["expired"] == 1


def test_work_that_is_whole_may_be_sealed_until_its_slot_is_taken_back(place, ledger):
    ledger.open_groups([group(0, samples=1)])
    lease = lease_of(ledger)
    place.now += 61
    ledger.seal(lease.token, sealed())
    assert ledger.expire() == 0 and ledger.live()[0].state is GroupState.READY


@pytest.mark.parametrize("jump", [-3600.0, 3600.0], ids=["back", "forward"])
def test_a_clock_that_jumps_frees_the_slots_and_doubles_nothing(place, ledger, jump):
    ledger.open_groups([group(0, samples=1)])
    before = lease_of(ledger)
    place.now += jump
    after = lease_of(ledger)
    assert after.attempt == 1
    refused("expired", lambda: ledger.seal(before.token, sealed()))
    ledger.seal(after.token, sealed())
    assert ledger.live()[0].slots["sealed"] == 1


def test_a_new_epoch_fences_all_leases_of_the_old_one(place, ledger):
    """The zombie's attempt number is right and its lease is in time; its epoch is old."""
    ledger.open_groups([group(0, samples=1, max_attempts=1)])
    zombie = lease_of(ledger, "zombie")
    later = place.open()
    assert later.begin_epoch() == 1
    for act in (ledger.find, ledger.start, lambda token: ledger.heartbeat(token, 60)):
        refused("fenced", lambda act=act: act(zombie.token))
    refused("fenced", lambda: ledger.seal(zombie.token, sealed()))
    refused("fenced", lambda: ledger.fail(zombie.token, Failure.INFRA, "x"))
    lease = lease_of(later)  # the budget of one attempt is not spent by a restart
    assert (lease.attempt, lease.epoch) == (1, 1)
    refused("fenced", lambda: ledger.seal(zombie.token, sealed()))
    later.seal(lease.token, sealed())
    assert later.begin_epoch(least=7) == 7


@pytest.mark.parametrize("failure", [Failure.INFRA, Failure.ENV])
def test_infrastructure_may_fail_a_sample_so_many_times(ledger, failure):
    ledger.open_groups([group(0)])
    for attempt in range(3):
        lease = lease_of(ledger)
        assert (lease.sample, lease.attempt) == (0, attempt)
        ledger.fail(lease.token, failure, "the sandbox is gone")
    assert ledger.live() == [] and ledger.lease("w", 60) is None
    (void,) = ledger.voided(0)
    assert (void.id, void.content_hash, void.reason) == (0, "hash 0", "infra")
    assert ledger.voided(1) == []


def test_a_partial_group_is_ready_if_infrastructure_failed_the_others(ledger):
    ledger.open_groups([group(0, samples=3, max_attempts=1, min_group=2)])
    ledger.fail(lease_of(ledger).token, Failure.INFRA, "x")
    ledger.seal(lease_of(ledger).token, sealed())
    assert ledger.live()[0].state is GroupState.OPEN
    ledger.seal(lease_of(ledger).token, sealed())
    assert ledger.live()[0].state is GroupState.READY
    assert [member.sample for member in ledger.members(0)] == [1, 2]
    assert ledger.counts()["partial_groups"] == 1
    ledger.open_groups([group(1, samples=3, max_attempts=1, min_group=2)])
    for _ in range(2):
        ledger.fail(lease_of(ledger).token, Failure.INFRA, "x")
    assert [void.id for void in ledger.voided(0)] == [1]


def test_a_fault_of_the_data_voids_the_group_at_once(ledger):
    ledger.open_groups([group(0), group(1)])
    broken, sibling = lease_of(ledger), lease_of(ledger)
    ledger.fail(broken.token, Failure.DATA, "cannot be reset")
    refused("void", lambda: ledger.seal(sibling.token, sealed()))
    assert ledger.voided(0)[0].reason == "data"
    assert lease_of(ledger).group == 1


@pytest.mark.parametrize("failure", [Failure.NONE, Failure.JUDGE, Failure.POLICY_TIMEOUT])
def test_what_the_policy_caused_is_no_failure_to_retry(ledger, failure):
    ledger.open_groups([group(0)])
    token = lease_of(ledger).token
    with pytest.raises(ValueError, match="allowed: infra, env, data"):
        ledger.fail(token, failure, "x")


def test_a_failure_never_carries_a_reward(ledger):
    ledger.open_groups([group(0)])
    token = lease_of(ledger).token
    for failure, reward in [(Failure.INFRA, None), (Failure.JUDGE, 0.0), (Failure.NONE, None)]:
        with pytest.raises(ValueError, match=failure.value):
            ledger.seal(token, sealed(failure=failure, reward=reward))
    ledger.seal(token, sealed(failure=Failure.JUDGE, reward=None))


def test_reserving_checks_states_and_versions_in_the_same_transaction(ledger):
    ledger.open_groups([group(0), group(1), group(2)])
    fill(ledger, 1, step=3)
    fill(ledger, 1, step=5)
    refused("state", lambda: ledger.reserve(5, [0, 2], oldest=3))
    refused("state", lambda: ledger.reserve(5, [0, 9], oldest=3))
    refused("stale", lambda: ledger.reserve(5, [0, 1], oldest=4))
    assert [live.state for live in ledger.live()] == ["ready", "ready", "open"]
    ledger.reserve(5, [1], oldest=4)
    refused("state", lambda: ledger.reserve(6, [1], oldest=4))
    assert ledger.counts()["refused_stale"] == 1


def test_an_age_may_be_that_of_the_newest_token(ledger):
    ledger.open_groups([group(0, samples=1)])
    ledger.seal(lease_of(ledger).token, sealed(1, newest=4))
    refused("stale", lambda: ledger.reserve(5, [0], oldest=2))
    refused("stale", lambda: ledger.reserve(5, [0], oldest=5, by="max"))
    ledger.reserve(5, [0], oldest=4, by="max")


def test_voiding_and_sampling_anew(ledger):
    ledger.open_groups([group(0), group(1)])
    fill(ledger, 2)
    ledger.void(0, "filtered")
    refused("state", lambda: ledger.void(0, "filtered"))
    assert ledger.counts()["void_filtered"] == 1
    ledger.reissue(1, Version(0, 9, "x"))
    live = ledger.live()[0]
    assert (live.state, live.dispatched, live.oldest, live.reissued) == ("open", 9, None, 1)
    lease = lease_of(ledger)
    assert (lease.attempt, lease.version) == (1, Version(0, 9, "x"))
    ledger.seal(lease.token, sealed(9))
    ledger.seal(lease_of(ledger).token, sealed(9))
    ledger.reserve(9, [1], oldest=9)
    refused("state", lambda: ledger.reissue(1, Version(0, 9, "x")))


def test_a_damaged_sample_is_sampled_anew_until_its_budget_is_spent(ledger):
    ledger.open_groups([group(0, max_attempts=2)])
    fill(ledger)
    ledger.reopen(0, 1, "damaged")
    live = ledger.live()[0]
    assert (live.state, live.slots["sealed"], live.slots["pending"]) == ("open", 1, 1)
    ledger.seal(lease_of(ledger).token, sealed())
    ledger.reopen(0, 1, "damaged")
    assert ledger.voided(0)[0].reason == "infra"


def test_reconciling_follows_the_checkpoint(ledger):
    ledger.open_groups([group(n) for n in range(6)])
    fill(ledger, 5)
    ledger.reserve(0, [0, 1], oldest=0)
    ledger.commit(0)
    ledger.reserve(1, [2, 3], oldest=0)
    assert ledger.reconcile(1, [(0, 1)]) == 2
    states = {live.id: (live.state, live.step) for live in ledger.live()}
    due = {2: ("ready", 1), 3: ("ready", 1)}
    assert states == {**due, 4: ("ready", None), 5: ("open", None)}
    assert ledger.counts()["groups_committed"] == 2
    # back to before everything: the same groups are due at the same steps
    assert ledger.reconcile(0, []) == 2
    assert {live.id: live.step for live in ledger.live()} == {
        0: 0,
        1: 0,
        2: 1,
        3: 1,
        4: None,
        5: None,
    }
    # a checkpoint that is ahead of this ledger (one that was put back from a copy)
    assert ledger.reconcile(2, [(0, 3)]) == 0
    assert ledger.counts()["groups_committed"] == 4
    assert [live.id for live in ledger.live()] == [4, 5]


def test_a_consumed_group_that_is_void_is_refused(ledger):
    ledger.open_groups([group(0), group(1)])
    ledger.void(1, "filtered")
    refused("void", lambda: ledger.reconcile(1, [(0, 1)]))
    assert ledger.live()[0].state is GroupState.OPEN


def test_opening_waits_for_another_process_that_opens_the_file(tmp_path):
    """SQLite does not: whoever makes the log is told at once that the file is locked."""
    path = str(tmp_path / "ledger.sqlite")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE IF NOT EXISTS another (one INTEGER)")
    asked = sqlite3.connect(path, 30)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        asked.execute("PRAGMA journal_mode = WAL")
    asked.close()
    ready = threading.Timer(0.3, other.execute, ["COMMIT"])
    ready.start()
    assert SqliteLedger(path, "run").begin_epoch() == 0
    ready.join()
    other.close()


def test_slots_are_forgotten_once_nobody_can_ask_for_them(ledger):
    ledger.open_groups([group(n) for n in range(3)])
    for number in range(3):
        for _ in range(2):
            ledger.seal(lease_of(ledger).token, sealed(segment=f"segment {number}"))
    ledger.reserve(0, [0], oldest=0)
    ledger.commit(0)
    ledger.reserve(1, [1], oldest=0)
    ledger.commit(1)
    ledger.void(2, "filtered")
    assert set(ledger.prune(before_step=1)) == {"segment 0", "segment 2"}
    assert ledger.members(0) == [] and len(ledger.members(1)) == 2
    assert ledger.prune(before_step=1) == []
    assert ledger.members(1)[0].sealed.segment == "segment 1"
    assert ledger.counts()["groups_committed"] == 2
    # a checkpoint from before all that: what was pruned may be opened anew
    assert ledger.reconcile(0, []) == 1
    assert [live.id for live in ledger.live()] == [1]
    ledger.open_groups([group(0)])
    assert [live.state for live in ledger.live()] == ["open", "ready"]
    assert ledger.counts()["groups_committed"] == 0


def test_a_segment_goes_with_the_last_slot_that_has_a_part_of_it(ledger):
    ledger.open_groups([group(0), group(1)])
    for number in range(2):
        for lease in ledger.lease_many("w", 60, 2):
            ledger.seal(lease.token, sealed(segment="of both", offset=12 + number))
        ledger.reserve(number, [number], oldest=0)
        ledger.commit(number)
    assert ledger.prune(before_step=1) == []
    assert ledger.members(1)[0].sealed.offset == 13
    assert ledger.prune(before_step=2) == ["of both"]


def test_opening_twice_changes_nothing(ledger):
    ledger.open_groups([group(0)])
    fill(ledger)
    ledger.open_groups([group(0), group(7)])
    assert [live.state for live in ledger.live()] == ["ready", "open"]
    assert ledger.next_id() == 8


def test_a_ledger_is_found_again_and_is_of_one_run(place, ledger):
    ledger.open_groups([group(0)])
    fill(ledger)
    again = open_ledger(place.address, place.run)
    place.opened.append(again)
    assert again.epoch() == 0
    assert again.live()[0].state is GroupState.READY


def test_machines_need_not_agree_about_the_time(postgres_address):
    """Leases go by the server's clock."""
    from jaxrl.pool.ledger_postgres import PostgresLedger

    ledger = PostgresLedger(postgres_address, "by its own clock")
    ledger.begin_epoch()
    ledger.open_groups([group(0)])
    lease = lease_of(ledger)
    assert abs(lease.expires - time.time() - 60) < 10  # the server is on this machine
    assert ledger.expire() == 0
    ledger.close()


def test_another_runs_file_is_refused(tmp_path):
    path = str(tmp_path / "ledger.sqlite")
    open_ledger(path, "mine").close()
    with pytest.raises(ValueError, match="is of the run 'mine'; allowed: 'yours'"):
        open_ledger(path, "yours")


def test_the_dump_names_what_is_live(place, ledger):
    ledger.open_groups([group(0, samples=2)])
    ledger.start(lease_of(ledger, "worker 4").token)
    place.now += 10
    text = ledger.dump()
    assert "group 0 open of version 3: sample 0 running attempt 0, worker 4, 50.0 s left" in text
    assert "sample 1 pending" in text and "epoch 0" in text


@pytest.mark.parametrize("kind", ["one object", "an object each"])
def test_many_workers_at_once_seal_every_slot_once(place, ledger, kind):
    """Two seals of a group at the same time: one of them is the last."""
    ledger.open_groups([group(n, samples=4) for n in range(12)])
    done, faults = [], []

    def work(name: int) -> None:
        mine = ledger if kind == "one object" else place.open()
        try:
            while lease := mine.lease(f"worker {name}", 60):
                mine.start(lease.token)
                mine.seal(lease.token, sealed())
                done.append((lease.group, lease.sample))
        except Exception as error:  # shown by the assertion below
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert sorted(done) == [(g, s) for g in range(12) for s in range(4)]
    assert {live.state for live in ledger.live()} == {GroupState.READY}


def test_changes_tell_of_what_may_be_leased_and_who_may_have_lost_a_lease(tmp_path):
    """Who waits for samples asks again after what another process did, or what frees samples here;
    not after leases and seals of its own. Until then a lease holds, in its time."""
    path = str(tmp_path / "ledger.sqlite")
    mine, others = SqliteLedger(path, "run"), SqliteLedger(path, "run")
    others.begin_epoch()
    others.open_groups([group(0)])
    seen = mine.changes()
    assert seen is not None
    first, second = mine.lease_many("w", 60, 2)
    assert mine.heartbeat(first.token, 60) > 0
    assert mine.seal_many([(first.token, sealed())]) == [None]
    assert mine.changes() == seen and mine.still(seen, {second.expires}, 60)
    assert not mine.still(seen, {second.expires - 60}, 60)  # its time is over
    assert not mine.still(seen, {second.expires + 120}, 60)  # by a clock that was set back since
    mine.fail(second.token, Failure.INFRA, "gone")
    assert (freed := mine.changes()) is not None and freed > seen
    assert not mine.still(seen, {second.expires}, 60)
    others.open_groups([group(1)])
    assert (opened := mine.changes()) is not None and opened > freed
    assert mine._write(lambda db: mine.changes()) is None  # not known while something is written
    assert not mine.still(None, set(), 60)
    mine.close()
    others.close()


@pytest.mark.parametrize("told", ["a\0b", "a\ud800b"])
def test_why_an_attempt_failed_is_kept_whatever_its_text(ledger, told):
    """What programs print has zeros, and bytes that are no text; no database holds either."""
    ledger.open_groups([group(0, samples=1, max_attempts=1)])
    ledger.fail(lease_of(ledger, told).token, Failure.INFRA, told)
    assert [void.reason for void in ledger.voided(0)] == ["infra"]
