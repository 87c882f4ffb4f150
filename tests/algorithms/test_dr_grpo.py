"""Dr. GRPO against its oracle."""

import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import batch_of, credited, logps, update
from tests.algorithms.oracles import CAPPED, LOOSE, TRUST, agree, listed, observed_of, small
from tests.papers import dr_grpo as paper

PLAIN = {"trust": TRUST, "length_tokens": 8}


@pytest.mark.parametrize("change", [{}, {"trust": CAPPED, "length_tokens": 3}], ids=str)
def test_it_equals_the_oracle(change):
    parameters, batch = PLAIN | change, small()
    rest = listed(
        observed_of(batch)["old_logp"],
        batch.sampler_logp,
        batch.reward,
        batch.group,
        batch.valid,
        batch.acted,
    )
    agree(load("dr_grpo", **parameters), batch, lambda x: paper.loss(x, *rest, p=parameters))


def test_it_is_grpo_without_deviation_under_a_constant_length():
    grpo = load(
        "grpo",
        trust=TRUST,
        kl_weight=0.0,
        scale_by_std=False,
        full_group=0.0,
        mask_limit=float("inf"),
        dynamic_sampling=False,
        weighting="fixed_length",
        length_tokens=8,
    )
    batch = small()
    arguments = (batch, logps(batch, 1), observed_of(batch))
    a, b = (update(which, *arguments, micro=6) for which in (load("dr_grpo", **PLAIN), grpo))
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize("longest", [8, 16])
def test_case_21_a_response_counts_by_its_length_and_the_width_does_not(longest):
    # A = -1, ratio 1, lengths 2 and 8, constant 8: 1 / (2 * 8) a token, whatever the padding. The
    # third response widens the batch and is not valid
    lengths = [2, 8, longest]
    batch = batch_of(lengths, [0.0, 0.0, 0.0], [0, 0, 0], valid=[1, 1, 0])
    algorithm = load("dr_grpo", trust=LOOSE, length_tokens=8)
    weight = credited(algorithm, batch, {}).weight
    np.testing.assert_allclose(weight[np.asarray(batch.acted)], 0.0625, rtol=1e-6)


def test_the_gradient_has_the_reward_s_scale():
    batch = small()
    algorithm = load("dr_grpo", trust=LOOSE, length_tokens=8)
    slopes = []
    for scale in (1.0, 3.0):
        batch_ = batch_of(
            [2, 1, 3, 0, 2, 3], scale * np.asarray(batch.reward), batch.group, valid=batch.valid
        )
        slopes.append(update(algorithm, batch_, logps(batch, 1), observed_of(batch), micro=6)[1])
    np.testing.assert_allclose(slopes[1], 3 * slopes[0], rtol=1e-5)


def test_bad_fields_are_named():
    with pytest.raises(ValueError, match="algorithm.length_tokens="):
        load("dr_grpo", **PLAIN | {"length_tokens": 0})
