"""GSPO against its oracle."""

import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from tests.algorithms.batches import logps, update
from tests.algorithms.oracles import CAPPED, LOOSE, TRUST, agree, listed, observed_of, small
from tests.papers import gspo as paper

BY_ROLLOUT = TRUST | {"mismatch": "rollout_truncate", "mismatch_high": 1.5}


@pytest.mark.parametrize("trust", [TRUST, BY_ROLLOUT, CAPPED], ids=lambda x: x["mismatch"])
def test_it_equals_the_oracle(trust):
    batch = small()
    rest = listed(
        observed_of(batch)["old_logp"],
        batch.sampler_logp,
        batch.reward,
        batch.group,
        batch.valid,
        batch.acted,
    )
    parameters = {"trust": trust}
    # The response's ratio is one number in the oracle: slopes agree where its tokens weigh alike.
    told = agree(
        load("gspo", **parameters),
        batch,
        lambda x: paper.loss(x, *rest, p=parameters),
        slopes=trust is not CAPPED,
    )
    acted = np.asarray(batch.acted)
    assert 0 < told["clipped"][acted].sum() < acted.sum()


def test_a_response_has_one_ratio_and_one_decision():
    batch = small()
    _, _, told = update(
        load("gspo", trust=TRUST), batch, logps(batch, 1), observed_of(batch), micro=6
    )
    old_logp, logp = observed_of(batch)["old_logp"], logps(batch, 1)
    for i, acted in enumerate(np.asarray(batch.acted)):
        if not acted.any():
            continue
        s = paper.ratio(*listed(logp[i], old_logp[i], acted))
        np.testing.assert_allclose(told["ratio"][i, acted], s, rtol=1e-5)
        assert len(set(told["clipped"][i, acted])) == 1


def test_on_policy_it_is_grpo():
    batch = small()
    observed = observed_of(batch)
    grpo = load(
        "grpo",
        trust=LOOSE,
        kl_weight=0.0,
        scale_by_std=True,
        full_group=0.0,
        mask_limit=float("inf"),
        dynamic_sampling=False,
        weighting="rollout_mean",
        length_tokens=0,
    )
    slopes = [
        update(which, batch, observed["old_logp"], observed, micro=6)[1]
        for which in (load("gspo", trust=LOOSE), grpo)
    ]
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-5)
    assert np.abs(slopes[0]).max() > 1e-3
