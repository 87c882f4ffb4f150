"""Parts of a task split: disjoint, complete, the same for any data set; and a pool of one part."""

import pytest

from jaxrl.pool.contract import PoolEnd
from jaxrl.pool.shards import of_shard
from tests.pool.scripted import Scripted, Sums, answer_of, local_pool


def keys(tasks) -> list[str]:
    return [task.key for task in tasks]


def test_parts_are_disjoint_complete_and_about_equal():
    tasks = Sums(90).tasks("train")
    parts = [of_shard(tasks, (part, 3)) for part in range(3)]
    assert sorted(key for part in parts for key in keys(part)) == sorted(keys(tasks))
    assert all(15 <= len(part) <= 45 for part in parts)
    assert keys(of_shard(tasks, (0, 1))) == keys(tasks)


def test_a_tasks_part_does_not_depend_on_the_others():
    few, many = Sums(20).tasks("train"), Sums(90).tasks("train")
    for part in range(3):
        assert set(keys(of_shard(few, (part, 3)))) <= set(keys(of_shard(many, (part, 3))))


@pytest.mark.parametrize("shard", [(1, 1), (-1, 2), (2, 2), (0, 0)])
def test_a_part_that_is_none_is_refused(shard):
    with pytest.raises(ValueError, match="shard="):
        of_shard(Sums(3).tasks("train"), shard)


def test_a_pool_draws_its_part_only():
    source = Sums(12)
    drawn = []
    for part in range(2):
        expected = of_shard(source.tasks("train"), (part, 2))
        pool = local_pool(Scripted(answer_of), source, shard=(part, 2), epochs=1)
        groups, _ = pool.take(len(expected), 0)
        assert sorted(g.rollouts[0].task_key for g in groups) == sorted(keys(expected))
        drawn += [group.rollouts[0].task_key for group in groups]
        with pytest.raises(PoolEnd, match=f"{len(expected)} tasks"):
            pool.take(1, 1)
    assert sorted(drawn) == sorted(keys(source.tasks("train")))


def test_a_part_without_a_task_is_refused():
    with pytest.raises(ValueError, match=r"no 'train' task .*shard \(\d+, 999\)"):
        local_pool(Scripted(answer_of), Sums(1), shard=(0, 999))
