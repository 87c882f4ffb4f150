"""CodeMidas' gates on planted tasks. D1 ... D4: its own checks (D4: test_grpo.py's)."""

import dataclasses
import itertools
import os
import sys

import numpy as np
import pytest

from jaxrl.tasks.matrix import Test as Case
from jaxrl.tasks.sandbox import Limits, Sandbox, Status
from jaxrl.tasks.sandbox_guest import CALLS
from jaxrl.tasks.screening import (
    GATES,
    Demands,
    Evidence,
    Screening,
    mixed,
    rescreen,
    screen,
    survival,
)

DEMANDS = Demands(stripped_runs=2, restored_runs=4, rollouts=4, gradings=2)
SOUND = Evidence([False] * 2, [True] * 4, [], [], [[True] * 2, [False] * 2] * 2)


def of(**change) -> Evidence:
    return dataclasses.replace(SOUND, **change)


PLANTED = {
    "sound": SOUND,
    "hole that nothing needs": of(stripped=[True, True]),
    "fails now and then": of(restored=[True, False, True, True]),
    "passes now and then": of(stripped=[False, True]),
    "impossible": of(restored=[False] * 4),
    "leak": of(leaks=["core.pyc"]),
    "private name": of(faults=["asserts on a private name"]),
    "errs on submissions": of(attempts=[[True, False], [False, False]] * 2),
    "never solved": of(attempts=[[False] * 2] * 4),
    "always solved": of(attempts=[[True] * 2] * 4),
    "never solved and a leak": of(attempts=[[False] * 2] * 4, leaks=["core.pyc"]),
}


def test_each_planted_task_is_dropped_for_its_reason():
    found = screen(PLANTED, DEMANDS)
    assert found.kept == ["sound"]
    assert found.retried == ["never solved"]
    assert found.dropped == {
        "hole that nothing needs": ("fail_first", "solved from the start"),
        "fails now and then": ("reference", "flaky"),
        "passes now and then": ("fail_first", "flaky"),
        "impossible": ("reference", "impossible"),
        "leak": ("leaks", "leak"),
        "private name": ("audit", "faulty"),
        "errs on submissions": ("stable", "flaky"),
        "always solved": ("spread", "too easy"),
        "never solved and a leak": ("leaks", "leak"),
    }


def test_the_counters_sum():
    found = screen(PLANTED, DEMANDS)
    assert sum(found.counts.values()) == len(PLANTED)
    assert found.counts["reference: flaky"] == 1
    assert {key for key, _, reason in found.log if reason} == set(PLANTED) - {"sound"}
    assert [gate for key, gate, _ in found.log if key == "sound"] == list(GATES)


def test_d3_the_order_of_the_gates_changes_costs_alone():
    first = screen(PLANTED, DEMANDS)
    for order in itertools.permutations(GATES):
        found = screen(PLANTED, DEMANDS, order)
        assert (found.kept, found.retried) == (first.kept, first.retried)
        assert set(found.dropped) == set(first.dropped)


def grade(sandbox: Sandbox, program: str, tests: list[Case]) -> bool:
    (cells,) = sandbox.run([program], "f", [test.call for test in tests])
    pairs = zip(cells, tests, strict=True)
    return all(cell.verdict(test.expected) is Status.PASS for cell, test in pairs)


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in CALLS,
    reason="the sandbox is Linux's seccomp on x86_64 or aarch64",
)
def test_d1_a_hole_that_does_nothing_fails_the_first_gate():
    """Two packages with a function body removed: hidden tests that reach it, and that do not."""
    limits = Limits(cpu_s=1.0, wall_s=5.0, memory_bytes=2**28, output_bytes=100, timeouts=1)
    start = "def core(x): raise NotImplementedError\ndef f(x): return core(x) if x > 0 else 0\n"
    fixed = start + "def core(x): return 2 * x\n"
    reached, missed = [Case("(2,)", "4"), Case("(-1,)", "0")], [Case("(-1,)", "0")]
    with Sandbox(limits, repeats=1, memory=10) as sandbox:
        evidence = {
            name: of(
                stripped=[grade(sandbox, start, tests) for _ in range(2)],
                restored=[grade(sandbox, fixed, tests) for _ in range(4)],
            )
            for name, tests in (("reached", reached), ("missed", missed))
        }
    found = screen(evidence, DEMANDS)
    assert found.kept == ["reached"]
    assert found.dropped == {"missed": ("fail_first", "solved from the start")}


def test_d2_a_coin_of_a_test_passes_the_second_gate_in_one_of_sixteen():
    rng = np.random.default_rng(0)
    runs = rng.random((4000, 4)) > 0.5
    seen = {str(i): of(restored=run.tolist()) for i, run in enumerate(runs)}
    share = len(screen(seen, DEMANDS).kept) / 4000
    assert abs(share - 1 / 16) < 3 * np.sqrt(1 / 16 * 15 / 16 / 4000)


def test_survival():
    assert survival(0.02, 8) == pytest.approx(0.149, abs=1e-3)
    assert survival(0.05, 4) == pytest.approx(survival(0.95, 4)) == pytest.approx(0.185, abs=1e-3)
    assert survival(0.5, 4) == 0.875
    assert survival(0.0, 8) == survival(1.0, 8) == 0
    rng = np.random.default_rng(1)
    passed = rng.random((4000, 8)) < 0.1
    share = np.mean([mixed(row.astype(float)) for row in passed])
    assert abs(share - survival(0.1, 8)) < 0.025


def test_a_solved_task_whose_test_errs_looks_mixed_until_it_is_graded_again():
    """One wrong verdict in ten: mixed in 34 of 100; twice the same submission gives most away."""
    rng = np.random.default_rng(2)
    verdicts = rng.random((2000, 4, 2)) > 0.1
    seen = {str(i): of(attempts=one.tolist()) for i, one in enumerate(verdicts)}
    once = screen(seen, DEMANDS, [gate for gate in GATES if gate != "stable"])
    assert len(once.kept) / 2000 == pytest.approx(0.344, abs=0.03)
    assert len(screen(seen, DEMANDS).kept) / 2000 < 0.05


def test_what_was_never_solved_comes_back_with_a_better_policy():
    seen = {"a": PLANTED["never solved"], "b": PLANTED["never solved"], "c": SOUND}
    found = screen(seen, DEMANDS)
    assert (found.kept, found.retried) == (["c"], ["a", "b"])
    later = rescreen(found, {"b": SOUND.attempts}, seen, DEMANDS)
    assert (later.kept, later.retried, later.dropped) == (["c", "b"], ["a"], {})
    last = rescreen(later, {"a": [[True] * 2] * 4}, seen, DEMANDS)
    assert last.dropped == {"a": ("spread", "too easy")}
    assert isinstance(last, Screening) and sum(last.counts.values()) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stripped": [False]}, "1 runs of the starting state; allowed: at least 2"),
        ({"restored": [True] * 3}, "3 runs of the reference; allowed: at least 4"),
        ({"attempts": [[True] * 2]}, "1 screening rollouts; allowed: at least 4"),
        ({"attempts": [[True]] * 4}, "1 gradings of a submission; allowed: at least 2"),
    ],
)
def test_too_little_evidence_is_no_verdict(change, message):
    with pytest.raises(ValueError, match=message):
        screen({"task": of(**change)}, DEMANDS)
    with pytest.raises(ValueError, match="demands.rollouts=1"):
        dataclasses.replace(DEMANDS, rollouts=1)
