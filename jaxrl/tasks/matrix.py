"""Programs x tests: which program passes which test, and which tests are worth keeping. No jax.

A test is arguments and the value that they should give: data, never code, so that a test can forge
nothing. Rules of CoVer, arXiv 2609.21208, where duplicates are concerned; where its text and its
released code part ways ``rank`` says so.
"""

import ast
import dataclasses
import warnings
from collections.abc import Sequence

from jaxrl.tasks.sandbox import Cell, Status
from jaxrl.tasks.sandbox_guest import literal

# What a cell counts as: passed, or not passed, or not at all (it could not be measured).
NOT_COUNTED = (Status.UNSTABLE, Status.SKIPPED)

# Why the reference program makes a test invalid: it uses up what a program may use, so that a
# program is not to blame if it does too.
TOO_MUCH = (Status.TIMEOUT, Status.OOM, Status.SKIPPED, Status.UNSTABLE)


@dataclasses.dataclass(frozen=True)
class Test:
    """Both as canonical text (sandbox_guest.literal): spelling does not make two tests of one."""

    call: str  # a tuple of arguments
    expected: str


def parse_test(text: str, separator: str, most: int) -> Test | None:
    """A test written as ``arguments separator value``, all Python literals; None if it is none.

    Refused: texts over ``most`` characters, no argument, no value, anything that computes.
    """
    left, found, right = text.strip().partition(separator)
    if not found or not left.strip() or not right.strip() or len(text) > most:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd spellings, which are no concern of ours
            call = literal(ast.literal_eval(f"({left.strip().rstrip(',')},)"))
            ast.literal_eval(call)  # an overflowing number would not come back as one
            return Test(call, literal(ast.literal_eval(right.strip())))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """What every program did on every test. Cells of an unparsable test are errors."""

    statuses: Sequence[Sequence[Status]]  # [program][test]
    reasons: Sequence[str]  # of each test: why it is a bad one, "" where it is not
    right: Sequence[bool]  # of each test: the reference agrees; for curves, never for a reward

    def passed(self, program: int) -> list[int]:
        """1 for each test that the program passes."""
        return [int(status is Status.PASS) for status in self.statuses[program]]

    def counted(self, program: int) -> list[int]:
        """1 for each test whose cell was measured and whose test is valid."""
        return [
            int(status not in NOT_COUNTED and reason != "invalid")
            for status, reason in zip(self.statuses[program], self.reasons, strict=True)
        ]


def rank(valid: Sequence[bool], calls: Sequence[str], columns: Sequence[object]) -> list[str]:
    """Why each test is a bad one, in this order of badness: "" for the first of its input and of
    its column of outcomes, "column", "input", "invalid".

    Departs from the released code, which adds up a penalty for every copy that there is: there all
    members of a cluster of duplicates lose, the first one too, and constant columns may win.
    """
    reasons, seen_calls, seen_columns = [], set(), set()
    for good, call, column in zip(valid, calls, columns, strict=True):
        if not good:
            reasons.append("invalid")
            continue
        reasons.append(
            "input" if call in seen_calls else "column" if column in seen_columns else ""
        )
        seen_calls.add(call)
        seen_columns.add(column)
    return reasons


def select(reasons: Sequence[str], kept: int) -> list[int]:
    """Indices of the ``kept`` best tests, or of all there are: by reason, then in order."""
    worse = ("", "column", "input", "invalid")
    return sorted(range(len(reasons)), key=lambda j: (worse.index(reasons[j]), j))[:kept]


def outcome_matrix(
    rows: Sequence[Sequence[Cell]], known: Sequence[Cell], tests: Sequence[Test | None]
) -> Matrix:
    """What came of every program (``rows``) and of the reference (``known``), a cell for each test
    that could be parsed.

    A test is invalid if it could not be parsed, if every program fails with an error on it, or if
    the reference does not end within the limits: only then is running out of time no failure of
    the program. Whether the test's value is right plays no part.
    """

    def spread(row: Sequence[Cell]) -> list[Cell]:
        """The cells at their tests; an error where there is none to run."""
        cells = iter(row)
        return [Cell(Status.ERROR, "") if test is None else next(cells) for test in tests]

    expected = ["" if test is None else test.expected for test in tests]
    statuses = [
        [cell.verdict(value) for cell, value in zip(spread(row), expected, strict=True)]
        for row in rows
    ]
    columns = [tuple(row[j] for row in statuses) for j in range(len(tests))]
    references = spread(known)
    valid = [
        test is not None and cell.status not in TOO_MUCH and set(column) != {Status.ERROR}
        for test, cell, column in zip(tests, references, columns, strict=True)
    ]
    # Failing is failing, in whatever way: a column says who passes and who does not.
    told = [
        tuple(None if cell in NOT_COUNTED else cell is Status.PASS for cell in column)
        for column in columns
    ]
    reasons = rank(valid, ["" if test is None else test.call for test in tests], told)
    right = [
        cell.verdict(value) is Status.PASS for cell, value in zip(references, expected, strict=True)
    ]
    return Matrix(statuses, reasons, right)
