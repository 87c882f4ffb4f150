"""Code as a source: roles in a group, truth by running, tests by others."""

import itertools
import json
import os
import random
import sys
from typing import Any

import pytest

from jaxrl.tasks.code import Source, as_program, expression, value
from jaxrl.tasks.contract import TaskSource, content_hash, split_of
from jaxrl.tasks.sandbox_guest import CALLS
from tests.pool.scripted import Scripted, local_pool

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in CALLS,
    reason="the sandbox is Linux's seccomp on x86_64 or aarch64",
)

PARAMETERS: dict[str, Any] = {
    "testers": 5,
    "kept": 3,
    "truth_tests": 8,
    "operators": 2,
    "path": "",
    "repeats": 2,
    "cpu_s": 0.2,
    "wall_s": 2.0,
    "memory_mb": 256,
    "timeouts": 2,
}
SIZES: dict[str, Any] = {
    "seed": 0,
    "train_prompts": 60,
    "held_out_prompts": 20,
    "held_out_fraction": 0.2,
}


def source_of(family="expressions", sizes=SIZES, **change) -> Source:
    return Source(family, PARAMETERS | change, **sizes)


@pytest.fixture(scope="module")
def source():
    return source_of()


def task_of(source, statement):
    """The task of a statement of one's own."""
    problem = source._expression(statement.split())
    return source._task(problem, content_hash(statement), "held_out", 0)


def words_of(statement):
    return iter(statement.split())


def test_expressions_are_written_with_the_brackets_that_they_need():
    for statement, code in {
        "add a b": "a+b",
        "mul add a b 3": "(a+b)*3",
        "sub a sub b 2": "a-(b-2)",
        "max mul b 8 add a 1": "max(b*8,a+1)",
        "mul max a 3 b": "max(a,3)*b",
    }.items():
        assert expression(words_of(statement), outermost=True) == code


def test_pythons_reading_of_an_expression_is_ours():
    source, draw = source_of(operators=3), random.Random(1)
    for problem in itertools.islice(source._problems(), 100):
        names = {"a": draw.randrange(10), "b": draw.randrange(10)}
        expected = value(words_of(problem.statement), names)
        assert eval(problem.solution, {**names, "max": max, "min": min}) == expected


def test_splits_are_distinct_by_statement(source):
    checked: TaskSource = source
    train, held_out = checked.tasks("train"), checked.tasks("held_out")
    assert (len(train), len(held_out)) == (60, 20)
    statements = [task.metadata["problem"].statement for task in (*train, *held_out)]
    assert len(set(statements)) == 80
    for task, statement in zip((*train, *held_out), statements, strict=True):
        assert task.content_hash == content_hash(statement)
        assert task.split == split_of(task.content_hash, 0.2)
        assert {"a", "b"} & {*statement.split()}
    assert [task.prompt for task in source_of().tasks("train")] == [task.prompt for task in train]


def test_demonstrations_show_both_roles_and_are_right(source):
    roles = [task.prompt.split()[0] for task in source.tasks("train")]
    assert roles == ["code", "case"] * 30
    assert {task.prompt.split()[0] for task in source.tasks("held_out")} == {"code"}
    assert {t.prompt.split()[0] for t in source_of(testers=0, kept=0).tasks("train")} == {"code"}
    for task in source.tasks("train")[:10]:
        if task.prompt.startswith("code"):
            assert source.verify(task, task.answer).correct
        else:
            verdicts = source.verify_group(task, ["a", "b", *[task.answer] * 5])
            assert verdicts[2].components["test_right"] == 1


def test_the_truth_is_the_part_of_the_hidden_tests_that_is_passed(source):
    task = task_of(source, "max a b")
    assert source.verify(task, "max(a,b)").score == 1
    assert source.verify(task, " b if b>a else a\n").correct
    truth = task.metadata["problem"].truth
    share = sum(eval(test.call)[0] >= eval(test.call)[1] for test in truth) / 8
    verdict = source.verify(task, "a")
    assert (verdict.score, verdict.correct) == (share, share == 1)
    for nothing in ("", "a+", "1/0", "while 1: pass", "\ufffd", "exit(0)"):
        assert source.verify(task, nothing).score == 0


def test_a_program_that_answers_otherwise_each_time_earns_nothing(source):
    task = task_of(source, "max a b")
    assert source.verify(task, "[max(a,b), __import__('time').perf_counter_ns()][0]").score == 1
    assert source.verify(task, "__import__('time').perf_counter_ns()").score == 0


def test_prompts_name_the_role(source):
    task = task_of(source, "max a b")
    assert source.prompts(task, 7) == ["code max a b ="] * 2 + ["case max a b ="] * 5
    with pytest.raises(ValueError, match="rollouts_per_group=5; allowed: more than .*testers=5"):
        source.prompts(task, 5)


def test_a_group_is_judged_together(source):
    task = task_of(source, "max a b")
    programs = ["max(a,b)", "a", "b"]
    # right and telling, a copy of its input, not a test, wrong and telling, a copy of its column
    tests = ["1,2:2", "1, 2 : 3", "1;2", "2,1:1", "0,3:3"]
    verdicts = source.verify_group(task, programs + tests)
    coders, testers = verdicts[:3], verdicts[3:]
    facts = {
        name: [verdict.facts[name] for verdict in verdicts]
        for name in coders[0].facts
        if name in testers[0].facts
    }
    assert facts["role"] == [0] * 3 + [1] * 5
    assert facts["test_index"] == [-1] * 3 + [0, 1, 2, 3, 4]
    assert facts["cells"][0] == [[1, 0, 0, 0, 1], [1, 1, 0, 1, 1]]
    assert facts["cells"][1] == [[0, 0, 0, 0, 0], [1, 1, 0, 1, 1]]
    assert facts["cells"][2] == [[1, 0, 0, 1, 1], [1, 1, 0, 1, 1]]
    assert facts["cells"][3:] == [[[0] * 5] * 2] * 5
    assert facts["truth"][0] == coders[0].score == 1 > facts["truth"][1]
    assert [verdict.facts["reason"] for verdict in testers] == [
        "",
        "input",
        "invalid",
        "",
        "column",
    ]
    assert facts["selected"] == [1] * 3 + [1, 0, 0, 1, 1]
    assert facts["rewarded"] == [1] * 3 + [1, 0, 0, 1, 0]
    assert [verdict.score for verdict in testers] == [1, 0, 0, 0, 1]  # for curves
    assert testers[0].components["test_pass_rate"] == pytest.approx(2 / 3)
    assert testers[1].facts["sha"] != testers[0].facts["sha"]
    assert len({len(json.dumps(verdict.facts["cells"])) for verdict in verdicts}) == 1


def test_the_expected_values_of_a_test_do_not_change_what_is_run(source):
    task = task_of(source, "min a b")
    source.verify_group(task, ["a", "b", *["7,8:7"] * 5])
    before = source._sandbox.executed
    source.verify_group(task, ["a", "b", *["7,8:8"] * 5])
    assert source._sandbox.executed == before


def test_groups_go_through_a_pool(source):
    """What the pool hands over holds a tester's and a coder's prompt and the facts of both."""

    def respond(request):
        return "max(a,b)" if request.sample < 2 else f"{request.sample},1:5"

    pool = local_pool(
        Scripted(respond), source, rollouts_per_group=7, max_new_tokens=16, max_prompt_tokens=64
    )
    (group,), _ = pool.take(1, 0)
    assert [rollout.facts["role"] for rollout in group.rollouts] == [0, 0] + [1] * 5
    assert {len(rollout.tokens) > 0 for rollout in group.rollouts} == {True}
    assert group.rollouts[2].facts["test_index"] == 0
    assert "cells" in group.rollouts[0].facts


PROBLEMS = [
    {
        "statement": "Return the second largest distinct number of a list, None if there is none.",
        "entry": "second",
        "reference": "def second(x):\n    x = sorted({*x})\n    return x[-2] if x[1:] else None\n",
        "inputs": ["[1, 2, 3]", "[3, 3]", "[5, 1, 5, 4]", "[]", "[-1, -1, -2]"],
    },
    {
        "statement": "Repeat a text n times.",
        "entry": "again",
        "reference": "def again(text, n):\n    return text * n\n",
        "inputs": ["'ab', 2", "'', 5", "'x', 0"],
    },
]


def functions_of(tmp_path, problems, **change) -> Source:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    sizes = SIZES | {
        "train_prompts": len(problems),
        "held_out_prompts": 0,
        "held_out_fraction": 1e-6,
    }
    changed = {"operators": 0, "path": str(path), "truth_tests": 5} | change
    return source_of("functions", sizes, **changed)


def test_functions_come_from_a_file(tmp_path):
    source = functions_of(tmp_path, PROBLEMS)
    tasks = {task.metadata["problem"].entry: task for task in source.tasks("train")}
    task = tasks["second"]
    assert len(task.metadata["problem"].truth) == 5
    program = "Here you are:\n```python\ndef second(x):\n    return sorted(x)[-2]\n```\nDone."
    assert as_program(program, "functions") == "def second(x):\n    return sorted(x)[-2]\n"
    # right for [1, 2, 3]; [3, 3], [5, 1, 5, 4], [] and [-1, -1, -2] need what it lacks
    assert source.verify(task, program).score == pytest.approx(1 / 5)
    assert source.verify(task, PROBLEMS[0]["reference"]).correct
    assert source.prompts(task, 6)[0].endswith("Answer with Python code only.\n")
    verdicts = source.verify_group(task, [program, "", *["[7, 7, 6] => 6"] * 4, "[1] => None"])
    assert [verdict.components["test_right"] for verdict in verdicts[2:]] == [1] * 5
    assert verdicts[0].facts["cells"][0] == [0, 0, 0, 0, 0]


def test_a_reference_that_does_not_answer_is_named(tmp_path):
    broken = [PROBLEMS[0] | {"inputs": ["[1]", "3"]}]
    with pytest.raises(ValueError, match="allowed: literals that the reference answers"):
        functions_of(tmp_path, broken).tasks("train")
    with pytest.raises(ValueError, match="allowed: literals"):
        functions_of(tmp_path, [PROBLEMS[0] | {"inputs": ["[1]", "x"]}]).tasks("train")


@pytest.mark.parametrize(
    "change",
    [
        {"testers": -1},
        {"kept": 6},
        {"kept": 0},
        {"truth_tests": 0},
        {"operators": 4},
        {"path": "x"},
    ],
)
def test_bad_parameters_are_named(change):
    with pytest.raises(ValueError, match=f"task.parameters.{next(iter(change))}="):
        source_of(**change)


def test_what_cannot_be_had_is_said(tmp_path):
    with pytest.raises(ValueError, match="task.family='python'; allowed: expressions, functions"):
        source_of("python")
    with pytest.raises(ValueError, match="unexpected keyword argument 'tester'"):
        source_of(tester=1)
    with pytest.raises(ValueError, match=r"gave \d+ distinct train tasks of task.train_prompts"):
        source_of(operators=1, sizes=SIZES | {"train_prompts": 500}).tasks("train")
