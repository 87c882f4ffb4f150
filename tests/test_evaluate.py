"""Accuracy and its intervals against numbers worked by hand; evaluation on scripted generators.

The generators are real small classes: each computes its responses from the request.
"""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from jaxrl.evaluate import FIRST_GROUP, EvalResult, evaluate, interval, paired, pass_at_k
from jaxrl.pool.contract import Completion, Request
from jaxrl.pool.rollout import Version
from jaxrl.tasks.contract import Task, Verdict
from tests.pool.scripted import FIRST, Letters, Scripted, Sums, answer_of


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (4, 1, 1, 0.25),  # k = 1: c / n
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 1, 4, 1.0),  # all four are drawn
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (10, 3, 5, 1 - 21 / 252),  # C(7,5) = 21, C(10,5) = 252
        (4, 2, 3, 1.0),  # only two wrong ones for three places
    ],
)
def test_pass_at_k_by_hand(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, rel=1e-12, abs=1e-15)


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            picks = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, picks)) / len(picks), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not():
    """Rate p, n samples: the expectation over c is 1 - (1-p)^k exactly."""
    n, k, p = 6, 3, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    right = 1 - (1 - p) ** k
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(chance)) == pytest.approx(
        right, rel=1e-12
    )
    plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chance))
    assert abs(plug_in - right) > 0.02


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_t_interval_by_hand():
    """Seeds 0.5, 0.6, 0.7: mean 0.6, s = 0.1, t(2 degrees, 97.5 %) = 4.302653, half 0.248414."""
    got = interval([0.5, 0.6, 0.7], "t")
    assert (got.mean, got.n, got.method, got.level) == (pytest.approx(0.6), 3, "t", 0.95)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (got.low, got.high) == (pytest.approx(0.6 - half), pytest.approx(0.6 + half))


def test_normal_interval_by_hand():
    """60 of 100 right: s = sqrt(100/99 * 0.24) = 0.492366, half 1.959964 * 0.0492366 = 0.096502."""
    got = interval([1.0] * 60 + [0.0] * 40, "normal")
    assert (got.low, got.high) == (
        pytest.approx(0.503498, abs=1e-6),
        pytest.approx(0.696502, abs=1e-6),
    )


def test_bootstrap_interval_repeats_and_agrees_with_the_normal_one():
    values = [1.0] * 60 + [0.0] * 40
    got, again, normal = (
        interval(values, "bootstrap"),
        interval(values, "bootstrap"),
        interval(values, "normal"),
    )
    assert got == again
    assert got.low is not None and got.high is not None
    assert normal.low is not None and normal.high is not None
    assert abs(got.low - normal.low) < 0.015 and abs(got.high - normal.high) < 0.015
    narrow = interval(values, "bootstrap", level=0.5)
    assert narrow.low is not None and narrow.high is not None
    assert got.low < narrow.low < 0.6 < narrow.high < got.high


def test_the_t_interval_covers_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(0.4, 0.1, (2000, 3))
    found = [interval(row, "t") for row in draws]
    assert all(got.low is not None and got.high is not None for got in found)
    held = [np.float64(got.low or 0) <= 0.4 <= np.float64(got.high or 0) for got in found]
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)  # standard deviation 0.005


@pytest.mark.parametrize("method", ["t", "normal", "bootstrap"])
def test_one_value_has_no_interval(method):
    got = interval([0.5], method)
    assert (got.mean, got.low, got.high, got.n) == (0.5, None, None, 1)
    assert json.loads(json.dumps(got.to_json(), allow_nan=False))["low"] is None


@pytest.mark.parametrize(
    ("values", "method", "level", "message"),
    [
        ([], "t", 0.95, "values="),
        ([0.1, float("nan")], "t", 0.95, "values="),
        ([0.1, 0.2], "wald", 0.95, "method='wald'; allowed"),
        ([0.1, 0.2], "t", 95, "level=95; allowed"),
    ],
)
def test_bad_intervals_are_refused(values, method, level, message):
    with pytest.raises(ValueError, match=message):
        interval(values, method, level=level)


def test_paired_differences_cancel_what_seeds_share():
    """Differences 0.25, 0.30, 0.35: s = 0.05, though the values themselves spread by 0.3."""
    before = {0: 0.2, 1: 0.35, 2: 0.5}
    after = {2: 0.85, 0: 0.45, 1: 0.65}
    got = paired(before, after)
    half = 4.302653 * 0.05 / math.sqrt(3)
    assert got.mean == pytest.approx(0.3)
    assert (got.low, got.high) == (pytest.approx(0.3 - half), pytest.approx(0.3 + half))
    with pytest.raises(ValueError, match=r"seeds \[1, 3\] have no partner"):
        paired({0: 0.1, 1: 0.2}, {0: 0.1, 3: 0.2})
    with pytest.raises(ValueError, match="no partner; allowed: the same seeds on both sides"):
        paired({}, {})


def measured(generator: Scripted, count: int = 4, **changes) -> EvalResult:
    generator.load(FIRST, "nowhere")
    source = Sums(count)
    settings: dict[str, Any] = dict(samples=4, temperature=1.0, max_new_tokens=8)
    return evaluate(generator, Letters(), source, source.tasks("train"), **(settings | changes))


def respond(request: Request) -> str:
    """Task i is answered right by its first i samples; greedily all but task 0 are right."""
    task = request.group - FIRST_GROUP
    right = request.sample < task if request.temperature else task > 0
    return answer_of(request) if right else "no"


def test_accuracy_by_hand():
    """Correct of 4: 0, 1, 2, 3. avg = 6/16; pass@4 = 3/4; pass@2 = (0 + 1/2 + 5/6 + 1)/4."""
    result = measured(Scripted(respond))
    assert result.avg_at_k == result.interval.mean == 6 / 16
    assert result.pass_at_k == result.pass_interval.mean == 3 / 4
    assert result.greedy == result.greedy_interval.mean == 3 / 4
    assert (result.k, result.samples, result.prompts, result.temperature) == (4, 4, 4, 1.0)
    assert list(result.correct.values()) == [0, 1, 2, 3]
    assert result.version == (0, 0, "first")
    assert measured(Scripted(respond), k=2).pass_at_k == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)


def test_requests_have_ids_of_their_own_and_one_greedy_sample():
    generator = Scripted(respond)
    measured(generator, count=3)
    asked = [(r.group - FIRST_GROUP, r.sample, r.temperature) for r in generator.requests]
    assert asked == [(i, s, 1.0 if s < 4 else 0.0) for i in range(3) for s in range(5)]
    assert min(r.group for r in generator.requests) == 2**30  # training stays below


def test_the_result_is_json_without_infinities():
    text = json.dumps(measured(Scripted(respond)).to_json(), allow_nan=False)
    back = json.loads(text)
    assert {"avg_at_k", "pass_at_k", "greedy", "k", "temperature", "prompts"} <= set(back)
    assert back["interval"]["method"] == "bootstrap" and back["interval"]["level"] == 0.95


def test_cut_responses_are_counted():
    def long(request: Request) -> str:
        return "123456789" if request.sample == 0 else answer_of(request)

    result = measured(Scripted(long))
    assert (result.truncated, result.avg_at_k) == (1 / 4, 3 / 4)


def test_overlong_prompts_are_left_out_and_counted():
    """Case 6: tasks 10 and 11 have five characters."""
    result = measured(Scripted(answer_of), count=12, max_prompt_tokens=4)
    assert (result.prompts, result.rejected_long, result.avg_at_k) == (10, 2, 1.0)
    with pytest.raises(ValueError, match="none of 12 prompts fits max_prompt_tokens=3"):
        measured(Scripted(answer_of), count=12, max_prompt_tokens=3)


class Flaky(Sums):
    """The verifier of task 1 raises, that of task 2 gives NaN."""

    def verify(self, task: Task, response: str) -> Verdict:
        if task.key == "sum/1":
            raise RuntimeError("the checker crashed")
        if task.key == "sum/2":
            return Verdict(float("nan"), False, {})
        return super().verify(task, response)


def test_a_failing_verifier_lowers_no_mean():
    generator, source = Scripted(answer_of), Flaky(4)
    generator.load(FIRST, "nowhere")
    settings: dict[str, Any] = dict(samples=2, temperature=1.0, max_new_tokens=8)
    result = evaluate(generator, Letters(), source, source.tasks("train"), **settings)
    assert (result.prompts, result.unverified, result.avg_at_k) == (2, 2, 1.0)
    with pytest.raises(ValueError, match="verifier failed on all of 2"):
        evaluate(generator, Letters(), source, source.tasks("train")[1:3], **settings)


def test_weights_that_change_under_way_are_refused():
    class Changing(Scripted):
        def completion(self, request: Request) -> Completion:
            self.version = Version(0, request.sample % 2, "weights")
            return super().completion(request)

    with pytest.raises(ValueError, match="all of one version"):
        measured(Changing())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "eval.temperature=0.0"),
        ({"k": 5}, "k=5, eval.samples=4"),
        ({"k": 0}, "k=0, eval.samples=4"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        measured(Scripted(), **change)
