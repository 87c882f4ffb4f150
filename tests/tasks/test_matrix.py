"""Tests as data, and which of them are kept. M6: CoVer's own check."""

import random

import pytest

from jaxrl.tasks.matrix import Test as Case
from jaxrl.tasks.matrix import outcome_matrix, parse_test, rank, select
from jaxrl.tasks.sandbox import Cell, Status
from tests.papers import cover as paper


def test_a_test_is_two_literals_however_they_are_spelt():
    assert parse_test("1, 2 : 3", ":", 99) == Case("(1, 2,)", "3")
    assert parse_test("(1,2):3", ":", 99) == Case("((1, 2,),)", "3")
    assert parse_test(" 'b' ,[2]  =>  {2 , 1} ", "=>", 99) == Case("('b', [2],)", "{1, 2}")
    assert parse_test("1,2,:-3", ":", 99) == Case("(1, 2,)", "-3")


@pytest.mark.parametrize(
    "text",
    ["", "1,2", ":3", "1:", "1:2:3", "a:1", "1:f(2)", "1:__import__('os')", "1:[x for x in ()]"]
    + ["1:" + "[" * 80, "1e999:1", "1" * 200 + ":1", "\0:1", "1:\ud800", "9**9:1", "1:'", "{[]}:1"],
)
def test_what_is_no_literal_is_no_test(text):
    assert parse_test(text, ":", 99) is None


def cells(*values) -> list[Cell]:
    """A number is a returned value, a status what went wrong."""
    return [
        Cell(value, "") if isinstance(value, Status) else Cell(Status.RETURNED, str(value))
        for value in values
    ]


def matrix_of(rows, known, expected, calls=None):
    """Tests (call, expected); None where there is no test. Each on an input of its own."""
    calls = calls or [f"({j},)" for j in range(len(expected))]
    tests = [
        None if value is None else Case(call, str(value))
        for call, value in zip(calls, expected, strict=True)
    ]
    return outcome_matrix([cells(*row) for row in rows], cells(*known), tests)


def test_cells_are_compared_with_what_the_test_expects():
    found = matrix_of([[1, 5, 3], [1, 2, Status.OOM]], [1, 2, 3], [1, 2, 4])
    assert [list(row) for row in found.statuses] == [
        ["pass", "fail", "fail"],
        ["pass", "pass", "oom"],
    ]
    assert (found.passed(1), found.counted(1)) == ([1, 1, 0], [1, 1, 1])
    assert found.right == [True, True, False]
    assert found.reasons == ["", "", ""]


def test_a_test_that_could_not_be_parsed_is_invalid_and_counts_nowhere():
    found = matrix_of([[1], [0]], [1], [None, 1, None])
    assert found.reasons == ["invalid", "", "invalid"]
    assert (found.passed(0), found.counted(0)) == ([0, 1, 0], [0, 1, 0])
    assert found.right == [False, True, False]


def test_a_test_on_which_everything_is_an_error_is_invalid():
    error = Status.ERROR
    assert matrix_of([[error, error], [error, 1]], [1, 1], [1, 1]).reasons == ["invalid", ""]


@pytest.mark.parametrize("over", [Status.TIMEOUT, Status.OOM])
def test_a_timeout_is_the_programs_fault_only_if_the_reference_ends(over):
    rows = [[over, over], [1, 2]]
    found = matrix_of(rows, [1, 2], [1, 2])
    assert (found.passed(0), found.counted(0)) == ([0, 0], [1, 1])
    found = matrix_of(rows, [1, over], [1, 2])
    assert found.reasons == ["", "invalid"]
    assert found.counted(0) == found.counted(1) == [1, 0]


def test_unstable_and_skipped_cells_do_not_count():
    found = matrix_of([[1, Status.UNSTABLE, Status.SKIPPED], [1, 1, 0]], [1, 1, 1], [1, 1, 1])
    assert (found.passed(0), found.counted(0)) == ([1, 0, 0], [1, 0, 0])
    assert (found.passed(1), found.counted(1)) == ([1, 1, 0], [1, 1, 1])


def test_of_identical_columns_one_is_new():
    # failing by an error or by a wrong value is the same column
    found = matrix_of([[1, Status.ERROR, 0], [1, 1, 1]], [1, 1, 1], [1, 1, 1])
    assert found.reasons == ["", "", "column"]


def test_one_input_with_two_values_is_one_input():
    found = matrix_of([[1, 1], [2, 2]], [1, 1], [1, 2], calls=["(0,)", "(0,)"])
    assert found.reasons == ["", "input"]


def test_the_first_of_a_cluster_is_kept():
    """Twelve copies of a good test beside twenty constant ones: the released code keeps none."""
    columns = ["good"] * 12 + ["constant"] * 20
    calls = ["the same"] * 12 + [str(j) for j in range(20)]
    chosen = select(rank([True] * 32, calls, columns), 16)
    assert chosen == paper.select([False] * 32, calls, columns, 16) == [0, *range(12, 27)]
    theirs = paper.select_by_badness([False] * 32, calls, columns, 16)
    assert {columns[j] for j in theirs} == {"constant"}


def test_m6_selection():
    draw = random.Random(0)
    for _ in range(200):
        tests, kept = draw.randrange(1, 12), draw.randrange(1, 12)
        invalid = [draw.random() < 0.3 for _ in range(tests)]
        calls = [draw.choice("abcdef") for _ in range(tests)]
        columns = [draw.choice("uvwx") for _ in range(tests)]
        reasons = rank([not bad for bad in invalid], calls, columns)
        chosen = select(reasons, kept)
        assert chosen == paper.select(invalid, calls, columns, kept)
        assert len(set(chosen)) == len(chosen) == min(tests, kept)
        valid = tests - sum(invalid)
        assert sum(invalid[j] for j in chosen) == max(0, min(tests, kept) - valid)
        again = rank(
            [not invalid[j] for j in chosen],
            [calls[j] for j in chosen],
            [columns[j] for j in chosen],
        )
        assert sorted(select(again, kept)) == list(range(len(chosen)))
        fresh = [columns[j] for j in chosen if reasons[j] == ""]
        assert len(set(fresh)) == len(fresh)
