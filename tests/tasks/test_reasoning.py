"""Reasoning Gym as a source: distinct questions, splits by content alone, the family's own
verifier."""

import builtins
import dataclasses
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from jaxrl.tasks.contract import TaskSource, content_hash, split_of
from jaxrl.tasks.reasoning import Source, families

# Families that take seconds to build an item, or cannot be built without parameters.
SLOW = {"knight_swap", "futoshiki", "zebra_puzzles", "puzzle24", "intermediate_integration"}
NEEDS_PARAMETERS = {"composite"}


def source_of(family: str = "chain_sum", parameters=None, **changes) -> Source:
    settings: dict[str, Any] = dict(
        seed=0, train_prompts=200, held_out_prompts=40, held_out_fraction=0.1
    )
    if parameters is None and family == "chain_sum":
        parameters = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    return Source(family, parameters or {}, **(settings | changes))


def hashes(source: Source, split) -> set[str]:
    return {task.content_hash for task in source.tasks(split)}


def test_splits_are_distinct_and_share_no_question():
    source: TaskSource = source_of()
    train, held_out = source.tasks("train"), source.tasks("held_out")
    assert (len(train), len(held_out)) == (200, 40)
    texts = [task.prompt for task in (*train, *held_out)]
    assert len(set(texts)) == 240
    for task in (*train, *held_out):
        assert task.content_hash == content_hash(task.prompt)
        assert task.split == split_of(task.content_hash, 0.1)
        assert task.metadata["question"] == task.prompt
    assert {task.split for task in train} == {"train"}


def test_neighbouring_seeds_never_leak_across_splits():
    """Seeds 0 and 1 share nearly all items: what is held out under one is held out under the
    other."""
    sources = [source_of(seed=seed) for seed in range(3)]
    shared = hashes(sources[0], "train") & hashes(sources[1], "train")
    assert len(shared) >= 198  # the reason why a split by seed would leak
    for one in sources:
        for two in sources:
            assert not hashes(one, "train") & hashes(two, "held_out")


def test_a_source_is_deterministic_and_asking_for_more_only_appends():
    small, large = source_of(), source_of(train_prompts=300, held_out_prompts=50)
    assert small.tasks("train") == source_of().tasks("train")
    assert large.tasks("train")[:200] == small.tasks("train")
    assert large.tasks("held_out")[:40] == small.tasks("held_out")


def test_the_familys_own_verifier_decides():
    source = source_of()
    task = source.tasks("train")[0]
    right = source.verify(task, task.answer)
    assert (right.score, right.correct) == (1.0, True)
    assert source.verify(task, f" {task.answer}\n").correct
    wrong = source.verify(task, str(int(task.answer) + 1))
    assert not wrong.correct and wrong.score < 1
    assert not source.verify(task, "").correct


def test_a_response_that_cannot_be_parsed_is_the_policys_fault():
    """prime_factorization raises on words; its own answer scores, so the words are wrong."""
    source = source_of("prime_factorization", {}, train_prompts=3, held_out_prompts=0)
    task = source.tasks("train")[0]
    verdict = source.verify(task, "two times three")
    assert (verdict.score, verdict.correct, verdict.components["unparsed"]) == (0.0, False, 1.0)
    broken = dataclasses.replace(task, answer="no factors")  # its own answer does not score either
    with pytest.raises(ValueError, match="invalid literal"):
        source.verify(broken, "two times three")


def test_a_verbose_right_answer_earns_something_and_is_not_correct():
    source = source_of("letter_counting", {}, train_prompts=3, held_out_prompts=0)
    task = source.tasks("train")[0]
    verdict = source.verify(task, f"I counted them and found {task.answer} of them")
    assert 0 < verdict.score < 1 and not verdict.correct


def test_a_family_that_is_too_small_says_what_it_has():
    """Two one-digit terms: 200 distinct questions in all."""
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    every = source_of("chain_sum", digits, train_prompts=150, held_out_prompts=10)
    assert len(every.tasks("train")) == 150
    short = source_of("chain_sum", digits, train_prompts=500, held_out_prompts=10)
    with pytest.raises(
        ValueError, match=r"is too small: \d+ draws gave 18\d of task.train_prompts=500"
    ):
        short.tasks("train")


def test_a_family_with_a_limit_on_its_size_says_so():
    """word_ladder refuses sizes over 20000."""
    with pytest.raises(ValueError, match=r"task.parameters=.* refused by 'word_ladder' \(size 30"):
        source_of("word_ladder", {}, train_prompts=23000).tasks("train")


def test_an_unknown_family_names_close_ones():
    with pytest.raises(
        ValueError, match=r"task.family='chain_sums' is unknown; did you mean chain_sum"
    ):
        source_of("chain_sums", {})
    with pytest.raises(ValueError, match=r"task.family='zzzz' is unknown; allowed: .*chain_sum"):
        source_of("zzzz", {})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"min_term": 3},
            r"task.parameters.min_term is unknown to 'chain_sum'; did you mean 'min_terms'",
        ),
        ({"seed": 3}, "task.parameters.seed is unknown"),
        ({"min_terms": 9}, "refused by 'chain_sum' .*max_terms must be >= min_terms"),
        ({"min_terms": "three"}, "refused by 'chain_sum'"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        source_of("chain_sum", parameters)


@pytest.mark.parametrize(
    "change", [{"held_out_fraction": 0.0}, {"held_out_fraction": 1.0}, {"train_prompts": -1}]
)
def test_bad_sizes_are_named(change):
    with pytest.raises(ValueError, match=f"task.{next(iter(change))}="):
        source_of(**change)


def test_a_missing_package_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "reasoning_gym":
            raise ImportError("No module named 'pycosat'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError, match="reasoning-gym.*pycosat.*C compiler and Python's headers"
    ):
        source_of()


def test_the_list_of_families_is_the_packages():
    assert families() == sorted(DATASETS) and "chain_sum" in families()


@pytest.mark.parametrize("family", sorted(set(DATASETS) - SLOW - NEEDS_PARAMETERS))
def test_every_family_builds_and_marks_its_own_answer(family):
    source = source_of(family, {}, train_prompts=2, held_out_prompts=0, held_out_fraction=0.5)
    for task in source.tasks("train"):
        assert task.prompt and task.source == f"reasoning_gym/{family}"
        if task.answer:
            assert source.verify(task, task.answer).correct
        verdict = source.verify(task, "\N{REPLACEMENT CHARACTER} no answer")
        assert 0 <= verdict.score <= 1
