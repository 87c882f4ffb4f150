"""Loading an algorithm by name: nested records, and errors that name the field; who is read."""

import dataclasses
import sys
from typing import Any

import pytest

import jaxrl.algorithms
from configs import grpo
from jaxrl.algorithms import contract, sft
from jaxrl.kernels.trust import Trust

# An algorithm like any other: a file beside the others, its name the file's.
NESTED = """
import dataclasses
from jaxrl.algorithms import sft

@dataclasses.dataclass(frozen=True)
class Inner:
    low: float

@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    name: str

@dataclasses.dataclass(frozen=True)
class Algorithm(sft.Algorithm):
    outer: "Outer"
    table: dict
    plain: float
"""


@pytest.fixture
def nested(tmp_path, monkeypatch):
    (tmp_path / "nested.py").write_text(NESTED)
    monkeypatch.setattr(jaxrl.algorithms, "__path__", [*jaxrl.algorithms.__path__, str(tmp_path)])
    yield
    sys.modules.pop("jaxrl.algorithms.nested", None)


def load(**changes: Any) -> Any:
    fields = {"outer": {"inner": {"low": 0.5}, "name": "x"}, "table": {"a": 1}, "plain": 2.0}
    return contract.load("nested", **(fields | changes))


def test_mappings_become_the_records_that_are_asked_for(nested):
    built = load()
    assert built.outer.inner.low == 0.5 and built.outer.name == "x"
    assert built.table == {"a": 1}  # this one is asked for as a mapping
    assert load(outer=built.outer).outer is built.outer  # a record is one already


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"outer": {"inner": {"low": 0.5, "hi": 1}, "name": "x"}},
            r"'nested'\.outer\.inner takes \['low'\]; unknown: \['hi'\]; missing: \[\]",
        ),
        ({"outer": {"inner": {"low": 0.5}}}, r"'nested'\.outer takes .* missing: \['name'\]"),
        ({"outer": {"inner": 0.5, "name": "x"}}, r"'nested'\.outer\.inner=0.5; allowed: a mapping"),
        ({"outer": None}, r"'nested'\.outer=None; allowed: a mapping"),
        ({"dreams": 1}, r"algorithm 'nested' takes .* unknown: \['dreams'\]"),
    ],
)
def test_what_does_not_fit_is_named_to_the_last_field(nested, changes, words):
    with pytest.raises(TypeError, match=words):
        load(**changes)


def test_an_algorithm_that_is_no_file():
    with pytest.raises(ValueError, match=r"algorithm.name='nested' is unknown; allowed: .*grpo"):
        load()


def test_the_houses_own_record_is_built():
    config: Any = grpo.get_config("")
    fields = config.algorithm.to_dict()
    built: Any = contract.load(**fields)
    assert isinstance(built.trust, Trust) and hash(built) == hash(built)
    del fields["trust"]["dual_clip"]
    with pytest.raises(TypeError, match=r"'grpo'\.trust takes .* missing: \['dual_clip'\]"):
        contract.load(**fields)


@dataclasses.dataclass(frozen=True)
class Reads(sft.Algorithm):
    """What ``everyone`` looks at."""

    scorers: tuple = ()
    observers: tuple = ()
    lessons: tuple = ()


def test_everyone_that_is_read_anywhere_once_and_in_order():
    student, teacher = ("student", "plain"), ("teacher", "hint")
    inner: Any = Reads(scorers=(("novelty", "alone"), student))
    outer: Any = Reads((student, teacher), (teacher, ("self", "plain")), (("novelty", inner),))
    assert contract.everyone(outer) == (
        student,
        teacher,
        ("self", "plain"),
        ("novelty", "plain"),
        ("novelty", "alone"),
    )
