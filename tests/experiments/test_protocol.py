"""A claim is measured once: rates on the development seed, fresh seeds after, resumed when cut."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.claims.protocol import DEVELOPMENT_SEED, Book, Claim, cell, measure, report

PEAK = {"low": 0.01, "high": 0.1}  # the rate that suits each arm


class Runs:
    """A claim whose accuracy falls with the distance to the arm's own best rate."""

    def __init__(self, fail_after: int = 1000):
        self.made: list[tuple[str, float, int]] = []
        self.fail_after = fail_after

    def __call__(self, arm: str, rate: float, seed: int):
        if len(self.made) == self.fail_after:
            raise KeyboardInterrupt
        self.made.append((arm, rate, seed))
        accuracy = 1 - abs(np.log10(rate / PEAK[arm])) / 4 + 0.01 * seed * (seed < 5)
        return {"accuracy": accuracy, "curve": [0.0, accuracy]}

    def claim(self, **changes) -> Claim:
        return dataclasses.replace(
            Claim(
                name="toy",
                arms=("low", "high"),
                run=self,
                rates=(0.01, 0.1, 1.0),
                choose="accuracy",
                larger=True,
                shown=("accuracy",),
                drawn=("accuracy", "curve"),
                against="low",
                seeds=5,
            ),
            **changes,
        )


def test_each_arm_gets_its_own_rate_and_only_fresh_seeds_are_reported(tmp_path):
    runs = Runs()
    text = report(runs.claim(), tmp_path, quick=False, arms=())
    grid = [(arm, rate, DEVELOPMENT_SEED) for arm in PEAK for rate in (0.01, 0.1, 1.0)]
    fresh = [(arm, PEAK[arm], seed) for arm in PEAK for seed in range(5)]
    assert sorted(runs.made) == sorted(grid + fresh)
    # 1, 1.01, ... 1.04: mean 1.02, s = .0158, t(4, .975) = 2.776, half width .0196
    assert "| low | 0.01 (edge of the grid) | 1.02 [1, 1.04] |" in text
    assert "| high | 0.1 | 1.02 [1, 1.04] |" in text
    assert "| high - low |  | 0 [0, 0] |" in text  # paired by seed
    assert (tmp_path / "toy.md").read_text() == text + "\n"
    assert (tmp_path / "toy.png").stat().st_size > 1000


def test_a_script_cut_off_goes_on_where_it_was(tmp_path):
    first = Runs(fail_after=4)
    with pytest.raises(KeyboardInterrupt):
        report(first.claim(), tmp_path, quick=False, arms=())
    with (tmp_path / "toy.jsonl").open("a") as file:
        file.write('{"arm": "hi')  # a line that was being written
    second = Runs()
    report(second.claim(), tmp_path, quick=False, arms=())
    assert len(first.made) + len(second.made) == 16
    assert not set(first.made) & set(second.made)
    third = Runs()
    report(third.claim(), tmp_path, quick=False, arms=())
    assert not third.made


def test_other_sources_and_quick_runs_are_measured_anew(tmp_path):
    report(Runs().claim(), tmp_path, quick=True, arms=["low"])
    path, runs = tmp_path / "toy.jsonl", Runs()
    report(runs.claim(), tmp_path, quick=False, arms=["low"])
    assert len(runs.made) == 8
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["quick"] for line in lines} == {True, False}
    path.write_text("".join(json.dumps(line | {"sources": "old"}) + "\n" for line in lines))
    again = Runs()
    report(again.claim(), tmp_path, quick=False, arms=["low"])
    assert len(again.made) == 8


def test_smaller_is_better_where_said_and_what_is_not_finite_never_wins(tmp_path):
    values = {0.01: np.nan, 0.1: 3.0, 1.0: 2.0}
    claim = Runs().claim(
        run=lambda arm, rate, seed: {"accuracy": values[rate]}, larger=False, drawn=()
    )
    found = measure(claim, Book(tmp_path / "toy.jsonl", False), ["low"])
    assert {result.rate for result in found["low"]} == {1.0}
    assert cell([1.0, np.nan]) == "not finite in 1 of 2"


def test_one_rate_needs_no_development_run(tmp_path):
    runs = Runs()
    report(runs.claim(rates=(0.1,)), tmp_path, quick=False, arms=("high",))
    assert runs.made == [("high", 0.1, seed) for seed in range(5)]


def test_bad_claims_are_refused(tmp_path):
    with pytest.raises(ValueError, match="against='other'"):
        Runs().claim(against="other")
    with pytest.raises(ValueError, match="arms="):
        report(Runs().claim(), tmp_path, quick=False, arms=["other"])
