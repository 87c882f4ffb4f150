"""The trainer's side of a remote pool, with real ledgers and spools and scripted workers."""

import json
import time
from collections.abc import Sequence

import numpy as np
import pytest

from jaxrl.pool.contract import PoolEnd, PoolError, RolloutPool
from jaxrl.pool.rollout import ACTION, INJECTED, PROMPT, Failure, Version
from jaxrl.tasks.contract import Task, Verdict
from tests.pool.hands import Hands, remote_pool, rollout_of
from tests.pool.scripted import Scripted, Sums, answer_of, local_pool

V0 = Version(0, 0, "w0")


def at(step: int, epoch: int = 0) -> Version:
    return Version(epoch, step, f"w{step}")


def ids(groups) -> list[int]:
    return [group.id for group in groups]


def run(pool: RolloutPool, steps: range, n: int = 3, epoch: int = 0, commit: bool = True):
    """Take, publish and commit so many steps."""
    manifests = []
    for step in steps:
        groups, manifest = pool.take(n, step)
        manifests.append(manifest)
        pool.publish(at(step + 1, epoch), "w")
        if commit:
            pool.commit(step)
    return manifests


def wanted(rewards, facts) -> bool:
    return 0 < rewards.mean() < 1


def sometimes(request) -> str:
    """Right for some samples of some groups."""
    right = (request.group * 7 + request.sample * 3) % 5 < 2
    return answer_of(request) if right else "x"


@pytest.mark.parametrize("keep", [None, wanted], ids=["all", "filtered"])
@pytest.mark.parametrize("refills", [0, 1, 4])
def test_a_synchronous_pool_hands_out_what_the_local_one_does(tmp_path, keep, refills):
    """K = 0: the same draws, rollouts, refills and counts, step by step."""
    source = Sums(8)
    settings = dict(keep=keep, max_refills=refills)
    near = local_pool(Scripted(sometimes), source, **settings)
    far = remote_pool(tmp_path, source, **settings)
    near.publish(V0, "w")
    far.publish(V0, "w")
    with Hands(tmp_path, source, sometimes, threads=2):
        for step in range(3):
            (ours, told), (theirs, expected) = far.take(3, step), near.take(3, step)
            assert [(g.id, g.content_hash) for g in ours] == [
                (g.id, g.content_hash) for g in theirs
            ]
            for name, count in expected.counts.items():
                assert told.counts[name] == count, name
            assert told.readings["staleness_max"] == 0
            near.publish(at(step + 1), "w")
            far.publish(at(step + 1), "w")
    far.close()


def test_nothing_is_served_before_a_version_is_published(tmp_path):
    pool = remote_pool(tmp_path)
    with pytest.raises(PoolError, match="no weights were published"):
        pool.take(1, 0)
    pool.publish(at(3), "weights")
    told = json.loads((tmp_path / "current.json").read_text())
    assert told == {"epoch": 0, "step": 3, "digest": "w3", "path": told["path"]}
    assert told["path"].endswith("/weights") and told["path"].startswith("/")
    with pytest.raises(PoolError, match="is older than"):
        pool.publish(at(2), "weights")


def test_a_step_is_begun_again_with_the_same_groups(tmp_path):
    pool = remote_pool(tmp_path)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        first, again = pool.take(2, 0)[1], pool.take(2, 0)[1]
        assert first.groups == again.groups
        pool.commit(0)
        with pytest.raises(PoolError, match="step 0 was committed"):
            pool.take(2, 0)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_rollback_replays_the_same_groups_at_the_same_steps(tmp_path, staleness):
    pool = remote_pool(tmp_path, staleness=staleness)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        before = run(pool, range(2))
        state = json.loads(json.dumps(pool.state()))
        lost = run(pool, range(2, 5), commit=False)
        pool.close()  # killed: steps 2 to 4 are in no checkpoint
        pool = remote_pool(tmp_path, staleness=staleness)
        pool.restore(state)
        pool.commit(1)
        pool.publish(at(2, epoch=1), "w")
        replayed = run(pool, range(2, 6), epoch=1)
    assert [m.groups for m in replayed[:3]] == [m.groups for m in lost]
    all_ids = [group for manifest in before + replayed for group, _ in manifest.groups]
    assert len(set(all_ids)) == len(all_ids) == 18
    assert max(m.readings["staleness_max"] for m in replayed) <= staleness
    pool.close()


def test_a_lost_ledger_is_made_anew_from_the_checkpoint(tmp_path):
    pool = remote_pool(tmp_path, staleness=1)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        before = run(pool, range(2))
    state = pool.state()
    pool.close()
    other = tmp_path / "other"
    pool = remote_pool(other, staleness=1)
    pool.restore(json.loads(json.dumps(state)))
    pool.publish(at(2, epoch=1), "w")
    with Hands(other, Sums(8)):
        after = run(pool, range(2, 4), epoch=1)
    numbers = [group for manifest in before + after for group, _ in manifest.groups]
    assert sorted(numbers) == list(range(12))
    pool.close()


def test_a_state_of_another_pool_is_refused(tmp_path):
    state = remote_pool(tmp_path).state()
    with pytest.raises(ValueError, match="pool state has seed=0; allowed: 1"):
        remote_pool(tmp_path / "other", seed=1).restore(state)
    with pytest.raises(ValueError, match="pool state has pool='local'"):
        remote_pool(tmp_path / "other").restore(local_pool(Scripted(), Sums(8)).state())


def test_infrastructure_failures_leave_the_rewards_as_they_are(tmp_path):
    """Half of the attempts fail; no failure becomes a reward of 0."""
    failing = lambda lease: Failure.INFRA if lease.attempt < lease.sample else None  # noqa: E731
    pool = remote_pool(tmp_path, rollouts_per_group=3)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8), trouble=failing):
        groups, manifest = pool.take(4, 0)
    assert ids(groups) == [0, 1, 2, 3]
    assert all(r.reward == 1.0 for group in groups for r in group.rollouts)
    assert (manifest.counts["retried"], manifest.counts["voided"]) == (12, 0)


def test_a_group_that_infrastructure_fails_too_often_is_replaced(tmp_path):
    failing = lambda lease: Failure.ENV if lease.group == 1 and lease.sample else None  # noqa: E731
    pool = remote_pool(tmp_path)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8), trouble=failing):
        groups, manifest = pool.take(3, 0)
    assert ids(groups) == [0, 2, 3]
    counts = manifest.counts
    assert (counts["voided"], counts["void_infra"], counts["refilled"]) == (1, 1, 1)


def test_a_partial_group_is_taken_where_the_run_allows_it(tmp_path):
    failing = lambda lease: Failure.INFRA if lease.group == 1 and not lease.sample else None  # noqa: E731
    pool = remote_pool(tmp_path, rollouts_per_group=3, min_group=2)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8), trouble=failing):
        groups, manifest = pool.take(2, 0)
    assert [[r.sample for r in group.rollouts] for group in groups] == [[0, 1, 2], [1, 2]]
    assert (manifest.counts["partial"], manifest.counts["voided"]) == (1, 0)


def test_a_task_that_cannot_be_set_up_is_quarantined_after_two_groups(tmp_path):
    broken = Sums(2).tasks("train")[0].content_hash
    failing = lambda lease: Failure.DATA if lease.content_hash == broken else None  # noqa: E731
    pool = remote_pool(tmp_path, Sums(2), max_refills=9)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(2), trouble=failing):
        groups, manifest = pool.take(6, 0)
    assert len(groups) == 6
    assert all(r.content_hash != broken for group in groups for r in group.rollouts)
    assert manifest.counts["void_data"] >= 2 and manifest.counts["quarantined"] >= 1
    assert list(pool.state()["failures"]) == [broken]


class Moody(Sums):
    """A verifier that fails the first so many times that it is asked."""

    def __init__(self, count: int, fails: int) -> None:
        super().__init__(count)
        self.fails, self.asked = fails, 0

    def verify(self, task: Task, response: str) -> Verdict:
        self.asked += 1
        if self.asked <= self.fails:
            raise TimeoutError("the judge is busy")
        return super().verify(task, response)


def test_a_judge_is_asked_again_and_the_trajectory_stays(tmp_path):
    pool = remote_pool(tmp_path, Moody(8, fails=2))
    pool.publish(V0, "w")
    with Hands(tmp_path, Moody(8, fails=10**6)):
        groups, manifest = pool.take(1, 0)
    assert [r.reward for r in groups[0].rollouts] == [1.0, 1.0]
    assert [r.attempt for r in groups[0].rollouts] == [0, 0]
    assert manifest.counts["voided"] == 0


def test_a_judge_that_never_answers_voids_the_group_without_a_reward(tmp_path):
    pool = remote_pool(tmp_path, Moody(8, fails=10**6), max_refills=0)
    pool.publish(V0, "w")
    with Hands(tmp_path, Moody(8, fails=10**6)):
        groups, manifest = pool.take(2, 0)
    assert groups == []
    counts = manifest.counts
    assert (counts["void_judge"], counts["short"], counts["failed"]) == (2, 2, 4)


class Match(Sums):
    """A source whose samples are judged against each other: the longest wins."""

    grouped = True

    def prompts(self, task: Task, samples: int) -> Sequence[str]:
        return [f"{task.prompt}{sample}" for sample in range(samples)]

    def verify_group(self, task: Task, responses: Sequence[str]) -> Sequence[Verdict]:
        longest = max(map(len, responses))
        return [Verdict(float(len(r) == longest), len(r) == longest, {}) for r in responses]


def test_samples_that_are_judged_together_are_judged_when_all_are_there(tmp_path):
    pool = remote_pool(tmp_path, Match(8), rollouts_per_group=3, max_feedback_tokens=4)
    pool.publish(V0, "w")
    with Hands(tmp_path, Match(8), lambda request: "y" * (1 + request.sample)):
        groups, _ = pool.take(2, 0)
    assert [[r.reward for r in group.rollouts] for group in groups] == [[0, 0, 1]] * 2
    assert all(r.failure is Failure.NONE for group in groups for r in group.rollouts)
    prompts = [int((r.kind == PROMPT).sum()) for r in groups[0].rollouts]
    assert len(set(prompts)) == 1
    ends = [r.tokens[(r.kind == PROMPT)][-1] - 3 for r in groups[0].rollouts]
    assert [chr(end) for end in ends] == ["0", "1", "2"]


def test_a_damaged_segment_is_set_aside_and_sampled_anew(tmp_path):
    """Truncated or with a flipped bit: the sample is made again, the same as before."""
    pool = remote_pool(tmp_path)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        whole, _ = pool.take(2, 0)
    pool.close()
    pool = remote_pool(tmp_path)  # no checkpoint: both groups are due again
    first, second = sorted((tmp_path / "spool" / "0").glob("*.rollouts"))[:2]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(bytes(data))
    second.write_bytes(second.read_bytes()[:-7])
    pool.publish(at(0, epoch=1), "w")
    with Hands(tmp_path, Sums(8)):
        again, manifest = pool.take(2, 0)
    assert [(g.id, g.content_hash) for g in again] == [(g.id, g.content_hash) for g in whole]
    assert manifest.counts["damaged"] == 2
    set_aside = {path.name for path in (tmp_path / "spool" / "quarantine").iterdir()}
    names = {f"{path.stem}-12" for path in (first, second)}  # where their first record begins
    assert set_aside == {f"{name}{end}" for name in names for end in (".bytes", ".txt")}


def test_a_silent_pool_ends_with_a_dump_of_the_ledger(tmp_path):
    """All workers hang: they hold leases, and nothing is sealed."""
    pool = remote_pool(tmp_path, watchdog_s=0.3)
    pool.publish(V0, "w")
    began = time.monotonic()
    with Hands(tmp_path, Sums(8), trouble=lambda lease: "lost"):
        with pytest.raises(PoolError, match="no sample was sealed for 0.3 s at step 0") as error:
            pool.take(2, 0)
    assert time.monotonic() - began < 5
    assert "group 0 open of version 0: sample 0 running attempt 0, hands" in str(error.value)


def test_slow_workers_do_not_stop_the_taking_of_groups_that_are_done(tmp_path):
    slow = lambda lease: "lost" if lease.group == 0 else None  # noqa: E731
    pool = remote_pool(tmp_path, staleness=2, watchdog_s=5.0)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8), trouble=slow):
        manifests = run(pool, range(2), n=2)
    assert [group for m in manifests for group, _ in m.groups] == [1, 2, 3, 4]


def test_a_slow_trainer_bounds_what_is_sampled_ahead(tmp_path):
    pool = remote_pool(tmp_path, staleness=2)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        pool.take(2, 0)
        until = time.monotonic() + 20
        while any(g.state == "open" for g in pool._ledger.live()) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)  # they would go on
        live = pool._ledger.live()
    assert len(live) == 6  # (K + 1) B, whatever the workers could do
    assert len(list((tmp_path / "spool").rglob("*.rollouts"))) == 12


def stale_hands(folder, first: set[int], delay_steps: int):
    """Groups of ``first`` are sealed only when so many steps have passed, with the version that
    they began with."""

    def trouble(lease):
        if lease.group in first and lease.attempt == 0:
            while True:
                told = json.loads((folder / "current.json").read_text())
                if told["step"] >= delay_steps:
                    return {"versions": (lease.version,)}
                time.sleep(0.002)
        return None

    return trouble


def test_what_grew_too_old_is_dropped_and_sampled_anew_once(tmp_path):
    pool = remote_pool(tmp_path, staleness=1, watchdog_s=10.0)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8), trouble=stale_hands(tmp_path, {0}, 3), threads=4):
        manifests = run(pool, range(6), n=2)
    taken = [group for m in manifests for group, _ in m.groups]
    assert len(set(taken)) == len(taken) == 12
    dropped = sum(m.counts["dropped"] for m in manifests)  # a busy machine may drop others too
    assert dropped >= 1
    assert sum(m.counts["voided"] for m in manifests) <= dropped - 1
    assert max(m.readings["staleness_max"] for m in manifests) <= 1
    assert manifests[-1].readings["drop_frac"] == pytest.approx(dropped / (dropped + 12))
    assert manifests[-1].readings["drop_log_seconds_shift"] < 0
    again = {group.id for group in pool._ledger.live() if group.reissued == 1}
    lost = {group.id for group in pool._ledger.voided(0)}  # too old twice: a busy machine again
    assert 0 in {*taken, *again, *lost}


def test_the_gateway_is_told_of_weights_and_of_groups(tmp_path):
    class Told:
        heard = 0

        def tell(self):
            self.heard += 1

        def counts(self):
            return {"own_s": 0.5 * self.heard}

        ensure = close = lambda self: None

    pool = remote_pool(tmp_path, helpers=(gateway := Told()), staleness=0)
    pool.publish(V0, "w")
    assert gateway.heard == 1
    with Hands(tmp_path, Sums(8)):
        _, manifest = pool.take(2, 0)
    assert gateway.heard == 2  # its two groups were opened at once
    assert manifest.readings["gateway_s"] == 1.0


def test_waiting_drops_nothing(tmp_path):
    pool = remote_pool(tmp_path, staleness=1, over_age="wait", watchdog_s=10.0)
    pool.publish(V0, "w")

    def slow(lease):
        time.sleep(0.1 if lease.group in (0, 3) else 0)

    with Hands(tmp_path, Sums(8), trouble=slow, threads=3):
        manifests = run(pool, range(6), n=2)
    assert sum(m.counts["dropped"] + m.counts["voided"] for m in manifests) == 0
    assert sorted(group for m in manifests for group, _ in m.groups) == list(range(12))
    assert max(m.readings["staleness_max"] for m in manifests) <= 1


def test_continuing_trains_on_young_tokens_alone(tmp_path):
    """A sample over three versions: tokens more than K steps old are not trained on."""
    pool = remote_pool(tmp_path, staleness=1, over_age="continue", rollouts_per_group=1)
    for step in range(4):
        pool.publish(at(step), "w")
    pool._step = 3

    def three(lease):
        old = rollout_of(lease, answer_of, Sums(8), at(1))
        index = old.version_index.copy()
        acted = np.flatnonzero(old.kind == ACTION)
        index[acted] = [0, 2][: len(acted)]
        return {"versions": (at(1), at(2), at(3)), "version_index": index}

    with Hands(tmp_path, Sums(8), trouble=three):
        groups, manifest = pool.take(1, 3)
    rollout = groups[0].rollouts[0]
    assert rollout.kind[-2:].tolist() == [INJECTED, ACTION]
    assert manifest.counts["overage_tokens"] == 1
    assert manifest.readings["staleness_max"] == 0


def test_tokens_that_are_all_too_old_are_dropped_even_then(tmp_path):
    pool = remote_pool(tmp_path, staleness=1, over_age="continue", watchdog_s=10.0)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8), trouble=stale_hands(tmp_path, {0}, 3), threads=4):
        manifests = run(pool, range(5), n=2)
    assert sum(m.counts["dropped"] for m in manifests) >= 1


def test_an_end_is_told_and_the_last_batch_is_short(tmp_path):
    pool = remote_pool(tmp_path, Sums(5), epochs=1)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(5)):
        sizes = []
        for step in range(2):
            groups, manifest = pool.take(3, step)
            sizes.append((len(groups), manifest.counts["short"]))
            pool.publish(at(step + 1), "w")
        assert sizes == [(3, 0), (2, 1)]
        with pytest.raises(PoolEnd, match="all prompts were drawn"):
            pool.take(3, 2)


def test_segments_go_when_no_checkpoint_needs_them(tmp_path):
    pool = remote_pool(tmp_path, record=False, keep_checkpoints=2)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        run(pool, range(5), n=2)
    left = {int(p.name.split("-")[0]) for p in (tmp_path / "spool" / "0").glob("*.rollouts")}
    assert left == {6, 7, 8, 9} or left == {8, 9}
    kept = remote_pool(tmp_path / "kept", record=True)
    kept.publish(V0, "w")
    with Hands(tmp_path / "kept", Sums(8)):
        run(kept, range(5), n=2)
    assert len(list((tmp_path / "kept" / "spool" / "0").glob("*.rollouts"))) == 20


def test_an_older_trainer_that_still_runs_cannot_reserve(tmp_path):
    old, new = remote_pool(tmp_path), remote_pool(tmp_path)
    old.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        old.take(2, 0)
        old.publish(at(1), "w")
        new.publish(at(0, epoch=1), "w")
        with pytest.raises(PoolError, match="this is epoch 0, epoch 1 has begun"):
            old.take(2, 1)
        assert ids(new.take(2, 0)[0]) == [0, 1]


def test_a_late_seal_of_an_older_epoch_changes_nothing(tmp_path):
    """The zombie began before the trainer was killed and ends after it was started again."""
    pool = remote_pool(tmp_path, watchdog_s=0.2)
    pool.publish(V0, "w")
    gate = {"closed": True}

    def zombie(lease):
        while gate["closed"] and lease.epoch == 0:
            time.sleep(0.002)

    with Hands(tmp_path, Sums(8), trouble=zombie, threads=2) as hands:
        with pytest.raises(PoolError, match="no sample was sealed"):
            pool.take(1, 0)
        again = remote_pool(tmp_path)
        again.publish(at(0, epoch=1), "w")
        gate["closed"] = False
        groups, manifest = again.take(1, 0)
    assert {r.attempt for r in groups[0].rollouts} == {1}
    assert hands.refused == ["fenced", "fenced"]
    seal_counts = again._ledger.counts()
    assert seal_counts["refused_fenced"] == 2


def test_a_seal_must_be_of_its_own_group(tmp_path):
    """A segment that was swapped for another sample's is damage."""
    pool = remote_pool(tmp_path, rollouts_per_group=1, max_attempts=2)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8), trouble=lambda lease: {} if lease.attempt else {"sample": 7}):
        groups, manifest = pool.take(1, 0)
    assert manifest.counts["damaged"] == 1 and groups[0].rollouts[0].attempt == 1


def test_a_run_over_postgresql_survives_its_trainer(tmp_path, postgres_address):
    """The same pool on the other ledger: a trainer that is killed, and one that goes on."""
    from jaxrl.pool.ledger import open_ledger

    ledgers = [open_ledger(postgres_address, "a run") for _ in range(3)]
    first = remote_pool(tmp_path, ledger=ledgers[0], staleness=1)
    first.publish(V0, "w")
    with Hands(tmp_path, Sums(8), threads=2, ledger=ledgers[1]):
        before = run(first, range(2))
        state = json.loads(json.dumps(first.state()))
        lost = run(first, range(2, 3), commit=False)
        second = remote_pool(tmp_path, ledger=ledgers[2], staleness=1)
        second.restore(state)
        second.commit(1)
        second.publish(at(2, epoch=1), "w")
        after = run(second, range(2, 4), epoch=1)
    assert after[0].groups == lost[0].groups
    numbers = [group for m in before + after for group, _ in m.groups]
    assert len(set(numbers)) == len(numbers) == 12
    for ledger in ledgers:
        ledger.close()
