"""Several families as universes of one source."""

from collections import Counter
from typing import Any

import pytest

from jaxrl.tasks.contract import TaskSource, split_of
from jaxrl.tasks.graphs import Source, families

SMALL = {
    "largest_island:3x3": {"min_rows": 3, "max_rows": 3, "min_cols": 3, "max_cols": 3},
    "largest_island:4x4": {"min_rows": 4, "max_rows": 4, "min_cols": 4, "max_cols": 4},
    "course_schedule": {"min_num_courses": 3, "max_num_courses": 4},
}


def source_of(parameters: Any = SMALL, family="graphs", **changes) -> Source:
    settings: dict[str, Any] = dict(
        seed=0, train_prompts=20, held_out_prompts=7, held_out_fraction=0.1
    )
    return Source(family, parameters, **(settings | changes))


def test_universes_share_the_questions_out():
    source = source_of()
    typed: TaskSource = source
    train, held_out = typed.tasks("train"), typed.tasks("held_out")
    assert source.universes == [f"reasoning_gym/{name}" for name in SMALL]
    assert [task.source for task in train[:3]] == source.universes  # in turn
    assert list(Counter(task.source for task in train).values()) == [7, 7, 6]
    assert list(Counter(task.source for task in held_out).values()) == [3, 2, 2]
    assert len({task.key for task in (*train, *held_out)}) == 27
    for task in (*train, *held_out):
        assert task.split == split_of(task.content_hash, 0.1)
    assert train == source_of().tasks("train")


def test_the_universes_own_verifier_decides():
    source = source_of()
    for task in source.tasks("train")[:6]:
        assert source.verify(task, task.answer).correct
        assert not source.verify(task, "no answer").correct


def test_a_question_of_two_universes_is_asked_once():
    twins = {f"course_schedule:{name}": SMALL["course_schedule"] for name in ("a", "b")}
    tasks = source_of(twins).tasks("train")
    assert {task.source for task in tasks} == {"reasoning_gym/course_schedule:a"}
    assert len({task.content_hash for task in tasks}) == len(tasks) == 10


def test_what_does_not_exist_is_named():
    assert "shortest_path" in families()
    with pytest.raises(ValueError, match="task.family='trees' is unknown; allowed: graphs"):
        source_of(family="trees")
    with pytest.raises(ValueError, match="task.parameters={}"):
        source_of({})
    with pytest.raises(ValueError, match=r"task.parameters.shortest_paths: .*did you mean short"):
        source_of({"shortest_paths": {}})
    with pytest.raises(ValueError, match=r"task.parameters.maze: .*size.* is unknown to 'maze'"):
        source_of({"maze": {"size": 3}})
