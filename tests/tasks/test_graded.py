"""Scripted graders and judges over Reasoning Gym: facts beside a verdict that stays the same."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.pool.spool import read
from jaxrl.tasks import graded, judged, reasoning
from jaxrl.tasks.contract import TaskSource
from jaxrl.train.collate import collate
from tests.pool.scripted import Letters, Scripted, local_pool

GRADER = {
    "noise": 0.0,
    "least": 0.05,
    "exploit_below": 0.5,
    "missed": 0.0,
    "false_flags": 0.0,
    "failure_rate": 0.0,
}
ARENA = {
    "topology": "round_robin",
    "swiss_rounds": 2,
    "replays": 1,
    "accuracy": 1.0,
    "failure_rate": 0.0,
}
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def source_of(kind, **own) -> Any:
    return kind(
        "chain_sum",
        SUMS | own,
        seed=0,
        train_prompts=20,
        held_out_prompts=4,
        held_out_fraction=0.1,
    )


def grades(change=(), responses=None, task=0):
    source: TaskSource = source_of(graded.Source, grader=GRADER | dict(change))
    question = source.tasks("train")[task]
    answer = question.answer
    said = responses or [answer, answer + ".", answer + ".000", "7", ""]
    return source.verify_group(question, said), source, question


def test_grades_follow_the_planted_quality_and_exploits_are_flagged():
    verdicts, source, question = grades()
    digits = len(question.answer)
    assert [v.facts["grade"] for v in verdicts] == pytest.approx(
        [1, digits / (digits + 1), digits / (digits + 4), 1, 1]
    )
    assert [v.facts["exploit"] for v in verdicts] == [0, 0, int(digits / (digits + 4) < 0.5), 0, 0]
    assert all(v.facts["graded"] for v in verdicts)


def test_the_verdict_stays_the_verifiers():
    verdicts, source, question = grades()
    for said, verdict in zip(
        [question.answer, question.answer + ".", question.answer + ".000", "7", ""],
        verdicts,
        strict=True,
    ):
        plain = source.verify(question, said)
        assert (verdict.score, verdict.correct) == (plain.score, plain.correct)
    assert [v.correct for v in verdicts] == [True, True, True, False, False]


def test_a_grader_that_fails_fails_for_the_whole_group():
    verdicts, _, _ = grades({"failure_rate": 1.0})
    assert not any(v.facts["graded"] or v.facts["exploit"] for v in verdicts)


def test_flags_err_as_often_as_they_are_told_to():
    _, source, question = grades({"missed": 1.0, "false_flags": 1.0})
    answer = question.answer
    verdicts = source.verify_group(question, [answer, answer + ".0000", "7"])
    assert [v.facts["exploit"] for v in verdicts] == [1, 0, 0]
    source = source_of(graded.Source, grader=GRADER | {"false_flags": 0.3})
    flags = [
        verdict.facts["exploit"]
        for question in source.tasks("train")
        for verdict in source.verify_group(question, [question.answer] * 16)
    ]
    assert 0.2 < np.mean(flags) < 0.4


def test_the_same_response_in_the_same_place_has_the_same_noisy_grade():
    a, _, _ = grades({"noise": 0.2})
    b, _, _ = grades({"noise": 0.2})
    assert [v.facts for v in a] == [v.facts for v in b]
    assert a[1].facts["grade"] != grades()[0][1].facts["grade"]
    assert all(0.05 <= v.facts["grade"] <= 1 for v in a)


def tournament(**change):
    source: TaskSource = source_of(judged.Source, arena=ARENA | change)
    question = source.tasks("train")[0]
    answer = question.answer
    wrong = ("1" if answer[0] != "1" else "2") + answer[1:]  # one digit is off
    return source.verify_group(question, [answer, "z", wrong, ""]), source


@pytest.mark.parametrize("topology", ["anchor", "round_robin", "single_elimination"])
def test_points_order_a_group_as_a_perfect_judge_does(topology):
    verdicts, _ = tournament(topology=topology)
    assert [v.facts["points"] for v in verdicts] == [0, -2, -1, -3]
    assert [v.correct for v in verdicts] == [True, False, False, False]


def test_named_steps_are_those_of_won_matches_by_round():
    verdicts, _ = tournament()
    assert [v.facts["named"] for v in verdicts] == [[[2]], [[0]], [[1]], [[0]]]
    verdicts, _ = tournament(topology="single_elimination")
    shapes = {np.shape(v.facts["named"]) for v in verdicts}
    assert shapes == {(2, 1)}  # the same for every group of four
    assert np.sum(verdicts[0].facts["named"]) >= 1
    assert len(verdicts[1].facts["comparisons"]) >= 2


def test_groups_of_like_responses_are_level():
    source = source_of(judged.Source, arena=ARENA)
    question = source.tasks("train")[0]
    verdicts = source.verify_group(question, [question.answer] * 4)
    assert {v.facts["points"] for v in verdicts} == {-1.5}


def test_a_judge_that_errs_and_fails_still_gives_every_place_once():
    verdicts, _ = tournament(accuracy=0.6, failure_rate=0.5)
    assert sum(v.facts["points"] for v in verdicts) == -6
    assert verdicts[3].facts["points"] == -3  # an empty response is no trajectory


def test_questions_are_those_of_the_plain_source():
    plain = source_of(reasoning.Source).tasks("train")
    assert source_of(judged.Source, arena=ARENA).tasks("train") == plain
    assert source_of(graded.Source, grader=GRADER).tasks("train") == plain


@pytest.mark.parametrize(
    ("kind", "own", "algorithm"),
    [(graded.Source, {"grader": GRADER}, "mimo"), (judged.Source, {"arena": ARENA}, "arena_flow")],
)
def test_a_real_pool_hands_the_facts_to_the_trainer(kind, own, algorithm, tmp_path):
    source = source_of(kind, **own)
    answers = {task.prompt: task.answer for task in source.tasks("train")}

    def respond(request):
        answer = answers[Letters().decode(request.prompt)]
        return [answer, answer + ".", answer + ".0000", "7"][request.sample]

    build = importlib.import_module(f"configs.{algorithm}").get_config("tiny").algorithm.to_dict()
    method = load(**build)
    pool = local_pool(
        Scripted(respond),
        source,
        rollouts_per_group=4,
        max_prompt_tokens=200,
        max_new_tokens=16,
        keep=method.keep,
        record_dir=tmp_path,
    )
    groups, manifest = pool.take(3, 0)
    assert len(groups) == 3 and manifest.counts["failed"] == manifest.counts["filtered"] == 0
    (record,) = tmp_path.iterdir()
    assert [r.facts for r in read(record)] == [r.facts for group in groups for r in group.rollouts]
    batch, _ = collate(
        groups,
        token_buckets=(256,),
        groups_per_step=3,
        rollouts_per_group=4,
        minibatches=1,
        needs=method.needs,
        algorithm=algorithm,
    )
    assert set(batch.facts) == set(method.needs)
    advantage = method.credit(jax.tree.map(jnp.asarray, batch), {}).advantage.sum(-1)
    each = np.asarray(advantage).reshape(3, 4)
    # graded, the last pass is an exploit and the second worth less; judged, the three are level
    assert (each[:, 3] < 0).all() and (each[:, 0] > 0).all()
    if algorithm == "mimo":
        assert (each[:, 0] > each[:, 1]).all() and (each[:, 1] > 0).all()
        np.testing.assert_array_equal(batch.facts["exploit"].reshape(3, 4), [[0, 0, 1, 0]] * 3)
    np.testing.assert_array_equal(batch.reward.reshape(3, 4), [[1, 1, 1, 0]] * 3)


@pytest.mark.parametrize(
    ("kind", "section", "good", "field", "value"),
    [
        (graded.Source, "grader", GRADER, "noise", -1.0),
        (graded.Source, "grader", GRADER, "least", 0.0),
        (graded.Source, "grader", GRADER, "missed", 1.5),
        (judged.Source, "arena", ARENA, "accuracy", 1.5),
        (judged.Source, "arena", ARENA, "swiss_rounds", 0),
        (judged.Source, "arena", ARENA, "replays", -1),
        (judged.Source, "arena", ARENA, "topology", "ladder"),
    ],
)
def test_a_bad_field_is_named(kind, section, good, field, value):
    with pytest.raises(ValueError, match=f"task.parameters.{section}.{field}="):
        source_of(kind, **{section: good | {field: value}})
