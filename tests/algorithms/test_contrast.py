"""Contrastive self-distillation against its oracle. K1 ... K6: the method's own checks, see
tests/kernels too.
"""

import math

import jax
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import (
    batch_of,
    credited,
    differences,
    logps,
    narrow,
    ragged,
    shown,
    update,
)
from tests.algorithms.test_opd import LOOSE
from tests.papers import contrast as paper

PLAIN = {
    "alpha": 0.5,
    "sides": "both",
    "teacher": "reference",
    "success": 1.0,
    "kl_weight": 0.0,
    "trust": LOOSE,
}
# Rollout 1 is right, 3 has no right solution, 5 no wrong one, 6 failed.
REWARD = [0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
HELD = {"right": [1, 1, 1, 0, 1, 1, 1], "wrong": [1, 1, 1, 1, 1, 0, 1]}
GROUP, VALID, LENGTHS = [4, 4, 4, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0], [2, 1, 3, 2, 2, 1, 2]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("contrast", **PLAIN | change)


def both(batch, held):
    return shown(batch, with_solution=held["right"], with_wrong_solution=held["wrong"])


def small():
    return both(batch_of(LENGTHS, REWARD, GROUP, valid=VALID), HELD)


def observed_of(batch):
    names = ("old_logp", "entropy", "right_logp", "wrong_logp", "ref_logp")
    return {name: logps(batch, 2 + i) for i, name in enumerate(names)}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "change",
    [{}, {"alpha": 1.0, "kl_weight": 0.3}, {"sides": "right"}, {"sides": "wrong"}],
    ids=["jsd", "reverse_kl", "attract", "repel"],
)
def test_it_equals_the_oracle(change, dtype):
    parameters, tolerance = PLAIN | change, 1e-6 if dtype is np.float64 else 1e-5
    batch = small()
    logp, observed = logps(batch, 1), observed_of(batch)
    rows = paper.taught(REWARD, VALID, HELD, parameters)

    def oracle(logp):
        names = ("old_logp", "right_logp", "wrong_logp", "ref_logp")
        rest = [observed[name].tolist() for name in names]
        return paper.loss(*[logp, *rest, batch.acted.tolist(), rows, parameters])

    value, slope, _ = update(make(**change), *narrow((batch, logp, observed), dtype), micro=7)
    np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)
    np.testing.assert_allclose(
        slope, differences(oracle, logp), rtol=tolerance, atol=tolerance / 100
    )
    assert np.abs(slope).max() > 0.01


def test_k6_right_responses_and_those_without_contexts_have_no_gradient():
    batch = small()
    for change, trained in (
        ({"kl_weight": 0.3}, [0, 2, 4]),
        ({"sides": "right"}, [0, 2, 4, 5]),
        ({"sides": "wrong"}, [0, 2, 3, 4]),
    ):
        _, slope, _ = update(make(**change), batch, logps(batch, 1), observed_of(batch), micro=7)
        np.testing.assert_array_equal(np.flatnonzero(np.abs(slope).max(1)), trained)


def test_k1_equal_contexts_say_nothing():
    batch = small()
    observed = observed_of(batch)
    observed["wrong_logp"] = observed["right_logp"]
    _, slope, _ = update(make(), batch, logps(batch, 1), observed, micro=7)
    np.testing.assert_array_equal(slope, 0)


def test_k2_swapped_contexts_flip_the_advantage():
    batch = small()
    observed = observed_of(batch)
    swapped = observed | {
        "right_logp": observed["wrong_logp"],
        "wrong_logp": observed["right_logp"],
    }
    a, b = (credited(make(), batch, x).advantage for x in (observed, swapped))
    np.testing.assert_array_equal(a, -b)


def test_k3_in_the_reverse_kl_limit_the_student_cancels():
    batch = small()
    observed = observed_of(batch)
    moved = observed | {"old_logp": observed["old_logp"] - 2}
    for alpha, same in ((1.0, True), (0.5, False)):
        a, b = (credited(make(alpha=alpha), batch, x).advantage for x in (observed, moved))
        assert np.array_equal(a, b) == same


@pytest.mark.parametrize("sides", ["both", "right", "wrong"])
def test_without_a_row_to_train_the_update_is_skipped(sides):
    for batch in (
        both(batch_of([2, 1], [1.0, 1.0], [4, 4]), {"right": [1, 1], "wrong": [1, 1]}),
        both(batch_of([2, 1], [0.0, 0.0], [4, 4]), {"right": [0, 0], "wrong": [0, 0]}),
    ):
        credit = credited(make(sides=sides), batch, observed_of(batch))
        np.testing.assert_array_equal(credit.weight, 0)


def test_a_context_that_holds_a_part_holds_nothing():
    batch = small()
    index = np.array(batch.views["with_solution"].index)
    index[0, 3] = -1  # one of rollout 0's two tokens
    object.__setattr__(batch.views["with_solution"], "index", index)
    _, slope, _ = update(make(), batch, logps(batch, 1), observed_of(batch), micro=7)
    np.testing.assert_array_equal(slope[0], 0)


def test_cases_19_and_20_micro_batches_change_nothing():
    batch = both(ragged(), {"right": np.ones(12), "wrong": np.ones(12)})
    observed = observed_of(batch)
    whole, parts = (
        update(make(kl_weight=0.2), batch, logps(batch, 1), observed, micro=micro)
        for micro in (12, 1)
    )
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-6)


def test_only_what_is_used_is_asked_for():
    assert make().observers == (
        ("student", "plain"),
        ("reference", "with_solution"),
        ("reference", "with_wrong_solution"),
    )
    assert make(sides="right", teacher="self", kl_weight=0.1).observers == (
        ("student", "plain"),
        ("self", "with_solution"),
        ("reference", "plain"),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 0.0),
        ("alpha", 1.1),
        ("sides", "left"),
        ("teacher", "student"),
        ("success", math.nan),
        ("kl_weight", -1.0),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        make(**{field: value})
