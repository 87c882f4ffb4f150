"""Programs judged by running them, and tests written for them: coders and testers in one group.

A coder answers with a program, a tester with one test (arguments and a value). Of a group's
``rollouts_per_group`` samples the last ``testers`` are testers, 0 for none. Ground-truth tests,
which no sample sees, give each program its truth: the part of them that it passes. Families:

    expressions  arithmetic of a and b in prefix notation, to be written as a Python expression:
                 "code max add a b 3 =" asks for "max(a+b,3)", and "case max add a b 3 =" for a test
                 like "1,4:5"
    functions    problems of a JSON-lines file: {"statement", "entry", "reference", "inputs"}, with
                 the reference a text of Python, each input the text of its arguments

Everything runs in jaxrl/tasks/sandbox.py. A task's hash is of its statement, whatever the role. No
jax here.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
import pathlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.tasks.contract import Split, Task, Verdict, content_hash, split_of
from jaxrl.tasks.matrix import NOT_COUNTED, Matrix, Test, outcome_matrix, parse_test, select
from jaxrl.tasks.sandbox import Cell, Limits, Sandbox, Status
from jaxrl.tasks.sandbox_guest import literal

FAMILIES = ("expressions", "functions")
OPERATORS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "max": ("max", max),
    "min": ("min", min),
}
LEAVES = ("a", "b", *"123456789")
# Draws without a new task, plus ten for each statement seen, after which a family is exhausted.
PATIENCE = 1000


@dataclasses.dataclass(frozen=True)
class CodeConfig:
    """``task.parameters``. Raises ValueError naming the field."""

    testers: int  # samples of a group that write tests, >= 0
    kept: int  # of a group's tests, trained on, 1 to testers; 0 without testers
    truth_tests: int  # ground-truth tests of a task
    operators: int  # of an expression, 1 to 3; 0 for other families
    path: str  # of the problems of "functions"; "" for other families
    repeats: int  # executions of each cell, 1 or 2: with two, those that differ do not count
    cpu_s: float  # processor time of one cell
    wall_s: float  # of one cell
    memory_mb: int  # of a program
    timeouts: int  # cells of a program that may run out of time; those after are not run

    def check(self, family: str) -> None:
        """Refuse what does not fit the family."""
        small = family == "expressions"
        bad = {
            "testers": (self.testers >= 0, ">= 0"),
            "kept": (
                1 <= self.kept <= self.testers if self.testers else self.kept == 0,
                f"1 to testers={self.testers}, or 0 without testers",
            ),
            "truth_tests": (1 <= self.truth_tests <= 64, "1 to 64"),
            "operators": (
                1 <= self.operators <= 3 if small else self.operators == 0,
                "1 to 3 for 'expressions', else 0",
            ),
            "path": (bool(self.path) != small, "a file for 'functions', else ''"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"task.parameters.{name}={vars(self)[name]!r}; allowed: {allowed}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a family says of a task."""

    statement: str
    reference: str  # a right program
    solution: str  # a right answer of a coder, which ``program`` makes the reference
    entry: str  # the function that is called
    truth: Sequence[Test]  # the ground-truth tests


def expression(words: Iterator[str], *, outermost: bool) -> str:
    """Python for the next whole expression in prefix notation, with brackets where they are
    needed to keep its parts together."""
    word = next(words)
    if word not in OPERATORS:
        return word
    sign, _ = OPERATORS[word]
    called = sign.isalpha()
    first = expression(words, outermost=called)
    second = expression(words, outermost=called)
    if called:
        return f"{sign}({first},{second})"
    return f"{first}{sign}{second}" if outermost else f"({first}{sign}{second})"


def value(words: Iterator[str], names: Mapping[str, int]) -> int:
    """What the next whole expression in prefix notation comes to."""
    word = next(words)
    if word not in OPERATORS:
        return names[word] if word in names else int(word)
    first = value(words, names)
    return OPERATORS[word][1](first, value(words, names))


def _statement(draw: random.Random, operators: int) -> list[str]:
    """A random expression of so many operators in prefix notation."""
    if operators == 0:
        return [draw.choice(LEAVES)]
    first = draw.randrange(operators)
    parts = _statement(draw, first) + _statement(draw, operators - 1 - first)
    return [draw.choice(list(OPERATORS)), *parts]


def as_program(response: str, family: str) -> str:
    """The program that a coder's response means: its fenced block if it has one, or all of it."""
    if family == "expressions":
        return f"def f(a, b): return {response.strip()}"
    fenced = re.search(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
    return fenced.group(1) if fenced else response


def truth_of(cells: Sequence[Cell], truth: Sequence[Test]) -> float:
    """The part of the ground-truth tests that is passed. Cells that could not be measured twice
    alike are left out; those that were skipped are not known and not passed."""
    verdicts = [cell.verdict(test.expected) for cell, test in zip(cells, truth, strict=True)]
    counted = [verdict for verdict in verdicts if verdict is not Status.UNSTABLE]
    return sum(verdict is Status.PASS for verdict in counted) / max(len(counted), 1)


class Source:
    """Tasks of a family, for coders alone or for coders and testers.

    Half of the train split's tasks show the tester's side in ``prompt`` and ``answer``, where
    there are testers: a supervised warm start then learns both roles. Groups have both, whichever a
    task shows; held-out tasks are coders'.

    Facts of a verdict, if there are testers: ``role`` 0 coder, 1 tester; ``truth`` of a coder, 0
    for testers; ``cells`` [2, testers], which tests a coder passes and which of these cells count,
    0 for testers; ``test_index`` of a tester, -1 for coders; ``selected``: 1 if the sample is
    trained; ``rewarded``: 1 unless it is a test that repeats another or is invalid. Beside them,
    for people: ``statuses`` of a coder, ``reason`` of a tester, ``sha`` of either.
    """

    def __init__(
        self,
        family: str,
        parameters: Mapping[str, Any],
        *,
        seed: int,
        train_prompts: int,
        held_out_prompts: int,
        held_out_fraction: float,
    ) -> None:
        if family not in FAMILIES:
            raise ValueError(f"task.family={family!r}; allowed: {', '.join(FAMILIES)}")
        try:
            self.config = CodeConfig(**parameters)
        except TypeError as error:
            raise ValueError(f"task.parameters={dict(parameters)!r}: {error}") from error
        self.config.check(family)
        self.family = family
        self._seed = seed
        self._fraction = held_out_fraction
        self._wanted: dict[Split, int] = {"train": train_prompts, "held_out": held_out_prompts}
        self._separator = ":" if family == "expressions" else "=>"

    needs = ("sandboxes",)

    @property
    def grouped(self) -> bool:
        """Coders alone are judged one by one."""
        return self.config.testers > 0

    @functools.cached_property
    def _sandbox(self) -> Sandbox:
        limits = Limits(
            cpu_s=self.config.cpu_s,
            wall_s=self.config.wall_s,
            memory_bytes=self.config.memory_mb * 2**20,
            output_bytes=4096,
            timeouts=self.config.timeouts,
        )
        return Sandbox(limits, repeats=self.config.repeats, memory=200_000)

    # -- tasks

    def _problems(self) -> Iterator[Problem]:
        """Problems in an order given by the seed, perhaps with repetitions."""
        if self.family == "functions":
            lines = pathlib.Path(self.config.path).read_text().splitlines()
            problems = [self._problem(json.loads(line)) for line in lines if line.strip()]
            random.Random(self._seed).shuffle(problems)
            yield from problems
            return
        draw = random.Random(self._seed)
        while True:
            words = _statement(draw, self.config.operators)
            if {"a", "b"} & {*words}:
                yield self._expression(words)

    def _expression(self, words: Sequence[str]) -> Problem:
        """The statement alone chooses its ground-truth inputs."""
        statement = " ".join(words)
        pairs = [*itertools.product(range(10), repeat=2)]
        chosen = random.Random(content_hash(statement)).sample(pairs, self.config.truth_tests)
        truth = [
            Test(literal(pair), literal(value(iter(words), dict(zip("ab", pair, strict=True)))))
            for pair in chosen
        ]
        code = expression(iter(words), outermost=True)
        return Problem(statement, as_program(code, self.family), code, "f", truth)

    def _problem(self, record: Mapping[str, Any]) -> Problem:
        """ValueError for inputs that are no literals, and a reference that does not answer them."""
        tests = [parse_test(f"{text} => 0", "=>", 10_000) for text in record["inputs"]]
        calls = [test.call for test in tests if test is not None][: self.config.truth_tests]
        reference, entry = record["reference"], record["entry"]
        (cells,) = self._sandbox.run([reference], entry, calls)
        if None in tests or not calls or any(cell.status != "returned" for cell in cells):
            raise ValueError(
                f"{self.config.path}: the inputs {record['inputs']} of {record['statement']!r} "
                f"give {[cell.text for cell in cells]}; allowed: literals that the reference "
                "answers"
            )
        truth = [Test(call, cell.text) for call, cell in zip(calls, cells, strict=True)]
        return Problem(record["statement"], reference, reference, entry, truth)

    @functools.cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        found: dict[Split, list[Task]] = {"train": [], "held_out": []}
        seen: set[str] = set()
        dry = 0
        for problem in self._problems():
            digest = content_hash(problem.statement)
            split = split_of(digest, self._fraction)
            dry += 1
            if digest not in seen and len(found[split]) < self._wanted[split]:
                found[split].append(self._task(problem, digest, split, len(found[split])))
                dry = 0
            seen.add(digest)
            full = all(len(found[split]) == n for split, n in self._wanted.items())
            if full or dry > PATIENCE + 10 * len(seen):
                break
        for split, wanted in self._wanted.items():
            if len(found[split]) < wanted:
                raise ValueError(
                    f"task.family={self.family!r} gave {len(found[split])} distinct {split} tasks "
                    f"of task.{split}_prompts={wanted}; allowed: at most what was found"
                )
        return found

    def _task(self, problem: Problem, digest: str, split: Split, place: int) -> Task:
        shows_test = self.grouped and split == "train" and place % 2 == 1
        prompt = self._asks(problem.statement, tester=shows_test)
        answer = self._right_test(problem, digest) if shows_test else problem.solution
        return Task(
            key=f"{self.family}/{digest}",
            source=f"code/{self.family}",
            split=split,
            prompt=prompt,
            answer=answer,
            content_hash=digest,
            metadata={"problem": problem},
        )

    def _asks(self, statement: str, *, tester: bool) -> str:
        if self.family == "expressions":
            return f"{'case' if tester else 'code'} {statement} ="
        asked = (
            "Write one test for it in one line: arguments => value, as Python literals."
            if tester
            else "Answer with Python code only."
        )
        return f"{statement}\n{asked}\n"

    def _right_test(self, problem: Problem, digest: str) -> str:
        """A ground-truth test of the statement's own choice, as a tester would write it."""
        test = random.Random(digest).choice(problem.truth)
        inside = test.call[1:-1].rstrip(",")
        if self.family == "expressions":
            inside = inside.replace(" ", "")
        return f"{inside}{self._separator}{test.expected}"

    def tasks(self, split: Split) -> list[Task]:
        """Distinct tasks of a split, by the statement's hash. ValueError if the family has too
        few."""
        return self._tasks[split]

    def prompts(self, task: Task, samples: int) -> list[str]:
        """Coders first, then testers. ValueError unless there is at least one of either."""
        if not self.config.testers < samples:
            raise ValueError(
                f"pool.rollouts_per_group={samples}; allowed: more than "
                f"task.parameters.testers={self.config.testers}"
            )
        statement = task.metadata["problem"].statement
        coders = samples - self.config.testers
        return [self._asks(statement, tester=sample >= coders) for sample in range(samples)]

    # -- verdicts

    def verify(self, task: Task, response: str) -> Verdict:
        """A coder's response: the part of the ground-truth tests that it passes, correct if all."""
        problem = task.metadata["problem"]
        calls = [test.call for test in problem.truth]
        (cells,) = self._sandbox.run([as_program(response, self.family)], problem.entry, calls)
        truth = truth_of(cells, problem.truth)
        return Verdict(score=truth, correct=truth >= 1, components={"truth": truth})

    def verify_group(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Coders as ``verify`` has it; a tester's score is whether the reference agrees with its
        test, for curves only: the method that trains testers never looks at it."""
        problem, known = task.metadata["problem"], len(task.metadata["problem"].truth)
        coders = len(responses) - self.config.testers
        programs = [as_program(text, self.family) for text in responses[:coders]]
        tests = [parse_test(text, self._separator, 1000) for text in responses[coders:]]
        # One process a program: what it is judged by, then what others have thought of.
        calls = [test.call for test in (*problem.truth, *tests) if test is not None]
        *rows, right = self._sandbox.run([*programs, problem.reference], problem.entry, calls)
        matrix = outcome_matrix([row[known:] for row in rows], right[known:], tests)
        verdicts = [
            self._coder(i, programs[i], truth_of(row[:known], problem.truth), matrix)
            for i, row in enumerate(rows)
        ]
        kept = select(matrix.reasons, self.config.kept)
        return verdicts + [self._tester(j, tests[j], matrix, j in kept) for j in range(len(tests))]

    def _coder(self, i: int, program: str, truth: float, matrix: Matrix) -> Verdict:
        facts = {
            "role": 0,
            "truth": float(truth),
            "cells": [matrix.passed(i), matrix.counted(i)],
            "test_index": -1,
            "selected": 1,
            "rewarded": 1,
            "statuses": [status.value for status in matrix.statuses[i]],
            "sha": _sha(program),
        }
        return Verdict(truth, truth >= 1, {"truth": truth}, facts=facts)

    def _tester(self, j: int, test: Test | None, matrix: Matrix, kept: bool) -> Verdict:
        reason, right = matrix.reasons[j], float(matrix.right[j])
        counted = [row[j] for row in matrix.statuses if row[j] not in NOT_COUNTED]
        rate = math.fsum(cell is Status.PASS for cell in counted) / max(len(counted), 1)
        zeros = [0] * self.config.testers
        facts = {
            "role": 1,
            "truth": 0.0,
            "cells": [zeros, zeros],
            "test_index": j,
            "selected": int(kept),
            "rewarded": int(reason == ""),
            "reason": reason,
            "sha": _sha("" if test is None else f"{test.call} => {test.expected}"),
        }
        components = {"test_right": right, "test_pass_rate": rate, "test_kept": float(kept)}
        components |= {f"test_{name or 'new'}": float(reason == name) for name in ("", "invalid")}
        return Verdict(right, right >= 1, components, facts=facts)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
