"""Recorded rollouts: each group once an epoch, an exact position, an explicit end;
demonstrations."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from jaxrl.pool.contract import PoolEnd, PoolError, RolloutPool
from jaxrl.pool.recorded import RecordedPool, Writer, demonstrate, read
from jaxrl.pool.rollout import ACTION, NOT_SAMPLED, PROMPT, Failure, StopReason, Version
from tests.pool.samples import sample
from tests.pool.scripted import EOS, Letters, Scripted, Sums, answer_of, local_pool


@pytest.fixture
def records(tmp_path):
    """Ten groups of two rollouts in two files; group n is recorded under run "r" and id n."""
    for file in range(2):
        with Writer(tmp_path / f"{file}.rollouts") as writer:
            for group in range(5 * file, 5 * file + 5):
                for n in range(2):
                    writer.append(sample(group_id=group, sample=n, reward=float(group > 6)))
    return tmp_path


def pool_of(path, **changes) -> RecordedPool:
    settings: dict[str, Any] = dict(seed=0, rollouts_per_group=2, epochs=2)
    return RecordedPool(path, **(settings | changes))


def recorded(groups) -> list[int]:
    """Ids under which groups were recorded."""
    return [group.rollouts[0].facts["recorded"][1] for group in groups]


def test_each_group_once_an_epoch_then_an_end(records):
    pool: RolloutPool = pool_of(records)
    epochs = []
    for epoch in range(2):
        groups = [g for step in range(2) for g in pool.take(5, 2 * epoch + step)[0]]
        assert [group.id for group in groups] == list(range(10 * epoch, 10 * epoch + 10))
        for group in groups:
            assert [r.sample for r in group.rollouts] == [0, 1]
            assert all(r.group_id == group.id for r in group.rollouts)
        epochs.append(recorded(groups))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1] and epochs[0] != list(range(10))
    with pytest.raises(PoolEnd, match="10 recorded groups .*pool.epochs=2"):
        pool.take(5, step=4)


def test_the_order_follows_the_seed_alone(records):
    orders = [recorded(pool_of(records, seed=seed).take(10, 0)[0]) for seed in (0, 0, 1, 2**40)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[3]) == list(range(10))


def test_without_a_number_of_epochs_there_is_no_end(records):
    pool = pool_of(records, epochs=0)
    seen = Counter(i for step in range(8) for i in recorded(pool.take(10, step)[0]))
    assert seen == Counter({group: 8 for group in range(10)})


def test_the_last_take_is_short(records):
    pool = pool_of(records, epochs=1)
    assert len(pool.take(7, 0)[0]) == 7
    groups, manifest = pool.take(7, 1)
    assert len(groups) == 3 and manifest.counts["short"] == 4
    with pytest.raises(PoolEnd):
        pool.take(7, 2)


@pytest.mark.parametrize("stop_after", range(1, 7))
def test_a_state_goes_on_exactly(records, stop_after):
    whole = pool_of(records)
    expected = [whole.take(3, step)[1].groups for step in range(7)]
    first = pool_of(records)
    got = [first.take(3, step)[1].groups for step in range(stop_after)]
    first.take(3, stop_after)  # in flight when the run dies
    second = pool_of(records)
    second.restore(json.loads(json.dumps(first.state())))
    got += [second.take(3, step)[1].groups for step in range(stop_after, 7)]
    assert got == expected


def test_a_committed_step_is_not_handed_out_again(records):
    pool = pool_of(records)
    pool.take(3, 0)
    pool.commit(0)
    with pytest.raises(PoolError, match="step 0 was committed"):
        pool.take(3, 0)


def test_a_state_of_other_records_is_refused(records, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with Writer(other / "a.rollouts") as writer:
        writer.append(sample())
    with pytest.raises(ValueError, match="pool state has records="):
        pool_of(other).restore(pool_of(records).state())
    with pytest.raises(ValueError, match="pool state has pool='local'"):
        pool_of(records).restore(local_pool(Scripted(), Sums(2)).state())


def test_keep_refuses_groups_and_takes_the_next(records):
    def right(rewards, facts):
        return bool(rewards.mean() == 1)  # groups 7, 8, 9

    pool = pool_of(records, keep=right, epochs=1)
    groups, manifest = pool.take(3, 0)
    assert sorted(recorded(groups)) == [7, 8, 9]
    assert 0 < manifest.counts["filtered"] <= 7
    with pytest.raises(PoolEnd):
        pool_end = pool_of(records, keep=right, epochs=1)
        for step in range(9):
            pool_end.take(3, step)


def test_a_filter_that_drops_everything_ends(records):
    pool = pool_of(records, keep=lambda rewards, facts: False, epochs=0, max_refills=2)
    groups, manifest = pool.take(3, 0)
    assert groups == []
    assert manifest.counts["filtered"] == 3 + 2 * 3


def test_a_rollout_recorded_twice_counts_once(records):
    with Writer(records / "2.rollouts") as writer:
        writer.append(sample(group_id=3, sample=1, reward=0.0))
    pool = pool_of(records)
    assert pool.counts == {"recorded": 20, "repeated": 1, "quarantined": 0}
    assert all(len(group.rollouts) == 2 for group in pool.take(10, 0)[0])


def test_groups_that_are_too_large_are_named(records):
    with pytest.raises(
        ValueError, match=r"group 0 of run 'r' has 2 rollouts.*rollouts_per_group=1"
    ):
        pool_of(records, rollouts_per_group=1)


def test_damaged_records_are_refused_or_counted(records):
    path = records / "0.rollouts"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"0\.rollouts at byte \d+: the file ends"):
        pool_of(records)
    pool = pool_of(records, quarantine=records / "quarantine")
    assert pool.counts["quarantined"] == 1
    assert pool.delivered_fraction == 19 / 20
    groups, manifest = pool.take(10, 0)
    assert manifest.counts["quarantined"] == 1
    assert sorted(len(group.rollouts) for group in groups) == [1] + [2] * 9


def test_a_live_pools_records_can_be_trained_on_again(tmp_path):
    live = local_pool(Scripted(answer_of), Sums(6), record_dir=tmp_path)
    given = [group for step in range(2) for group in live.take(3, step)[0]]
    pool = RecordedPool(tmp_path, seed=0, rollouts_per_group=2, epochs=1)
    again = pool.take(6, 0)[0]
    assert {g.content_hash for g in again} == {g.content_hash for g in given}
    pool.publish(Version(0, 1, "other"), "nowhere")  # changes nothing
    pool.close()


def test_a_demonstration_acts_on_answer_and_eos(tmp_path):
    counts = demonstrate(Sums(12), Letters(), tmp_path, run_id="warm", max_tokens=6)
    # "9+1=" with "10" and eos is 7 long, as is everything from "10+1=" on; 0..8 are 6
    assert counts == {"written": 9, "rejected_long": 3, "without_answer": 0}
    rollouts = list(read(tmp_path / "demonstrations.rollouts"))
    assert [rollout.task_key for rollout in rollouts] == [f"sum/{n}" for n in range(9)]
    one = rollouts[4]
    assert one.tokens.tolist() == [*Letters().encode("4+1="), *Letters().encode("5"), EOS]
    assert one.kind.tolist() == [PROMPT] * 4 + [ACTION] * 2
    assert one.logp.tolist() == [0] * 6 and one.temperature.tolist() == [1] * 6
    assert one.version_index.tolist() == [NOT_SAMPLED] * 6 and one.versions == ()
    assert (one.reward, one.correct, one.facts["demonstration"]) == (1.0, True, True)
    assert (one.stop_reason, one.failure) == (StopReason.STOP, Failure.NONE)
    groups, _ = RecordedPool(tmp_path, seed=0, rollouts_per_group=1, epochs=1).take(9, 0)
    assert sorted(recorded(groups)) == list(range(9))


def test_demonstrations_need_answers(tmp_path):
    class Silent(Sums):
        def tasks(self, split):
            return [dataclasses.replace(task, answer="") for task in super().tasks(split)]

    with pytest.raises(ValueError, match="no demonstration could be written.*'without_answer': 3"):
        demonstrate(Silent(3), Letters(), tmp_path, run_id="warm")
    assert not list(tmp_path.iterdir())
    assert demonstrate(Sums(9), Letters(), tmp_path, run_id="warm", limit=2)["written"] == 2


IMPORTS = """
import sys
import jaxrl.evaluate, jaxrl.pool.contract, jaxrl.pool.local, jaxrl.pool.rollout, jaxrl.pool.spool
import jaxrl.pool.tokenizer, jaxrl.tasks.reasoning
jaxrl.tasks.reasoning.families()
assert "jax" not in sys.modules, "the host wing imported jax"
from jaxrl.pool.recorded import RecordedPool, demonstrate
from tests.pool.scripted import Letters, Sums
demonstrate(Sums(4), Letters(), sys.argv[1], run_id="warm")
assert len(RecordedPool(sys.argv[1], seed=0, rollouts_per_group=1).take(4, 0)[0]) == 4
assert "jax" in sys.modules, "grain no longer imports jax: say so in recorded.py"
from jax._src import xla_bridge
assert not xla_bridge._backends, "reading records started a backend"
"""


def test_the_host_wing_imports_no_jax_and_starts_no_backend(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
