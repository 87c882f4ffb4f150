"""Known faults of others that a remote pool must not have."""

import json

import pytest

from jaxrl.pool.contract import PoolEnd
from tests.pool.hands import Hands, remote_pool
from tests.pool.scripted import Sums
from tests.pool.test_remote import V0, at, ids, run


def test_prompts_in_flight_are_issued_again(tmp_path):
    """Case 35: 8 prompts, the pool pulls 4 at a time, a step takes 2; a checkpoint after the first
    step, then a crash with prompts sampled, taken and under way."""
    pool = remote_pool(tmp_path, Sums(8), epochs=1, staleness=1)
    pool.publish(V0, "w")
    with Hands(tmp_path, Sums(8)):
        first = run(pool, range(1), n=2)
        state = json.loads(json.dumps(pool.state()))
        run(pool, range(1, 2), n=2, commit=False)
        pool.close()
        pool = remote_pool(tmp_path, Sums(8), epochs=1, staleness=1)
        pool.restore(state)
        pool.commit(0)
        pool.publish(at(1, epoch=1), "w")
        rest = run(pool, range(1, 4), n=2, epoch=1)
        assert sorted(g for m in first + rest for g, _ in m.groups) == list(range(8))
        with pytest.raises(PoolEnd):
            pool.take(2, 4)
    pool.close()


def test_versions_beyond_the_bound_are_dropped_and_counted(tmp_path):
    """Case 37: samples of versions 3, 5 and 9 at step 9, at most 4 steps old: 5 and 9 are kept."""
    pool = remote_pool(tmp_path, staleness=4, rollouts_per_group=1, max_refills=0)
    for step in range(3, 10):
        pool.publish(at(step), "w")
    sampled_by = {0: at(3), 1: at(5), 2: at(9)}

    def trouble(lease):
        known = lease.group in sampled_by and not lease.attempt
        return {"versions": (sampled_by[lease.group],)} if known else "lost"

    with Hands(tmp_path, Sums(8), trouble=trouble):
        groups, manifest = pool.take(2, 9)
    kept = [group.rollouts[0].versions[0].step for group in groups]
    assert kept == [5, 9] and ids(groups) == [1, 2]
    assert manifest.readings["staleness_max"] == 4
    assert manifest.counts["dropped"] == 1
