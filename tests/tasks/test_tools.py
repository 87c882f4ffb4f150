"""The look-up environment: a real verifier that answers in words, a table that no prompt tells."""

from typing import Any

import pytest

from jaxrl.tasks.contract import TaskSource, content_hash, split_of
from jaxrl.tasks.tools import Source, families

PARAMETERS = {"names": 26, "told_fraction": 0.5, "shown_fraction": 0.3}


def source_of(parameters=PARAMETERS, family="lookup", **changes) -> Source:
    settings: dict[str, Any] = dict(
        seed=0, train_prompts=400, held_out_prompts=40, held_out_fraction=0.1
    )
    return Source(family, parameters, **(settings | changes))


def test_splits_are_distinct_and_share_no_question():
    source: TaskSource = source_of()
    train, held_out = source.tasks("train"), source.tasks("held_out")
    assert (len(train), len(held_out)) == (400, 40)
    assert len({task.prompt for task in (*train, *held_out)}) == 440
    for task in (*train, *held_out):
        assert task.content_hash == content_hash(task.prompt)
        assert task.split == split_of(task.content_hash, 0.1)
    assert {task.split for task in train} == {"train"}
    # One line for the call, one for the tool's words: encoded apart or joined, the same ids.
    assert all(task.prompt.count("\n") == 1 + task.metadata["shown"] for task in train)


def test_seeds_never_leak_across_splits():
    one, two = (source_of(seed=seed) for seed in (0, 1))
    train = {task.content_hash for task in one.tasks("train")}
    assert not train & {task.content_hash for task in two.tasks("held_out")}


def test_a_source_is_deterministic_and_asking_for_more_only_appends():
    small, large = source_of(), source_of(train_prompts=500, held_out_prompts=50)
    assert small.tasks("train") == source_of().tasks("train")
    assert large.tasks("train")[:400] == small.tasks("train")
    assert large.tasks("held_out")[:40] == small.tasks("held_out")


def test_the_tool_answers_in_words():
    source = source_of()
    by_told = {
        told: next(t for t in source.tasks("train") if t.metadata["told"] == told and not t.answer)
        for told in (True, False)
    }
    for told, task in by_told.items():
        code = task.metadata["code"]
        right = source.verify(task, f" {code}\n")
        assert (right.score, right.correct, right.feedback) == (1.0, True, f"OK {code}\n")
        other = code[:2] + str((int(code[2]) + 1) % 10)
        wrong = source.verify(task, other)
        assert (wrong.score, wrong.correct, wrong.components["digits"]) == (0.0, False, 0.5)
        assert wrong.feedback == (f"ERR expected {code}\n" if told else "ERR\n")
        assert wrong.facts == {"told": told}
        for garbage in ("", code[0], f"{code} 1", code.replace(" ", ""), "a b"):
            verdict = source.verify(task, garbage)
            assert not verdict.correct and verdict.components["digits"] in (0.0, 0.5)


def test_half_of_the_tasks_are_told_and_always_the_same_ones():
    hidden = [task for task in source_of().tasks("train") if not task.metadata["shown"]]
    told = {task.prompt for task in hidden if task.metadata["told"]}
    assert 0.4 < len(told) / len(hidden) < 0.6
    again = {t.prompt for t in source_of(seed=5).tasks("train") if t.metadata["told"]}
    both = {task.prompt for task in hidden} & {
        t.prompt for t in source_of(seed=5).tasks("train") if not t.metadata["shown"]
    }
    assert both and told & both == {prompt for prompt in again if prompt in both}


def test_only_shown_tasks_state_an_answer_and_it_is_not_the_tables():
    source = source_of()
    shown = [task for task in source.tasks("train") if task.metadata["shown"]]
    assert 0.2 < len(shown) / 400 < 0.4
    for task in source.tasks("train"):
        assert bool(task.answer) == task.metadata["shown"]
        assert task.answer == "" or (
            task.prompt.endswith(f" {task.answer}\n") and source.verify(task, task.answer).correct
        )
        assert task.answer or not any(sign.isdigit() for sign in task.prompt)
    assert len({task.answer for task in shown}) > 50  # random codes


def test_the_table_holds_for_pairs_never_called():
    tasks = [task for task in source_of().tasks("train") if not task.answer]
    left: dict[str, set[str]] = {}
    for task in tasks:
        left.setdefault(task.prompt.split()[1], set()).add(task.metadata["code"][0])
    assert all(len(digits) == 1 for digits in left.values())
    assert len({task.metadata["code"] for task in source_of(seed=9).tasks("train")}) > 10


def test_what_does_not_exist_is_named():
    assert families() == ["lookup"]
    with pytest.raises(ValueError, match="task.family='search' is unknown; allowed: lookup"):
        source_of(family="search")
    with pytest.raises(ValueError, match="task.parameters=.*allowed: names, told_fraction"):
        source_of({"names": 3})
    for name, value in (("names", 1), ("names", 27), ("told_fraction", 1.5)):
        with pytest.raises(ValueError, match=f"task.parameters.{name}={value}"):
            source_of(PARAMETERS | {name: value})
    with pytest.raises(ValueError, match="task.held_out_fraction=0"):
        source_of(held_out_fraction=0)
    with pytest.raises(ValueError, match=r"too small: it gave \d of task.train_prompts=40"):
        source_of(PARAMETERS | {"names": 3, "shown_fraction": 0.0}).tasks("train")
