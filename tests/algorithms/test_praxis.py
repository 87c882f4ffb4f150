"""PRAXIS's learner against its oracle. P1 ... P6: its own checks, see tests/kernels/test_drift.py.

The sampler and the archive that move beside it are in tests/train/test_curriculum.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.kernels import drift
from tests.algorithms.batches import batch_of, credited, differences, logps, update
from tests.papers import praxis as paper

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": math.inf,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
PLAIN = {
    "trust": TRUST,
    "consistency_weight": 0.4,
    "consistency_cap": 3.0,
    "correction_cap": 0.0,
}
GROUP = [4, 4, 4, 7, 7, 7]
LENGTHS = [2, 1, 3, 1, 2, 0]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("praxis", **(PLAIN | change))


def batch(seed=3, **changes):
    rng = np.random.default_rng(seed)
    plain = batch_of(LENGTHS, rng.random(6), GROUP, **changes)
    picks, weight = [[0, 2, 2], [1, 1, 0]], paper.archive([0.3, -0.1, 0.5], 1.0)
    facts = {
        "endorsement": np.array(
            [e for pick in picks for e in paper.endorsements(pick, weight, [1, 0.5, 1], 3)]
        ),
        "task_probability": np.array([0.1] * 3 + [0.4] * 3),
        "base_probability": np.full(6, 0.25),
    }
    return dataclasses.replace(plain, facts=facts)


def taken(algorithm, made, logp):
    observed = {"old_logp": logps(made, 2), "entropy": np.ones(made.tokens.shape)}
    return update(algorithm, made, logp, observed, micro=3)


@pytest.mark.parametrize(
    "change",
    [{}, {"consistency_weight": 0.0}, {"correction_cap": 1.5}, {"consistency_cap": 0.5}],
    ids=lambda change: "-".join(change) or "plain",
)
def test_it_equals_the_oracle(change):
    p, made = PLAIN | change, batch()
    logp = logps(made, 1)
    value, slope, _ = taken(make(**change), made, logp)
    odds = np.minimum(2.5 * np.ones(6), p["correction_cap"] or 1.0)
    if p["correction_cap"]:
        odds[3:] = 0.625
    else:
        odds[:] = 1.0

    def loss(x):
        return paper.loss(
            x,
            logps(made, 2).tolist(),
            made.reward.tolist(),
            GROUP,
            (made.kind == 2).tolist(),
            made.facts["endorsement"].tolist(),
            odds.tolist(),
            lam=p["consistency_weight"],
            cap=p["consistency_cap"],
            clip=0.2,
        )

    np.testing.assert_allclose(value, loss(logp.tolist()), rtol=1e-6)
    np.testing.assert_allclose(slope, differences(loss, logp), rtol=1e-5, atol=1e-8)


def test_float32_agrees():
    with jax.enable_x64(False):
        made = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, batch())
        logp = logps(made, 1).astype(np.float32)
        value = taken(make(), made, logp)[0]
    wide = taken(make(), batch(), logps(batch(), 1))[0]
    np.testing.assert_allclose(value, wide, rtol=1e-5)


def test_without_rules_it_is_grpo_without_a_standard_deviation_bit_for_bit():
    made = dataclasses.replace(batch(), facts={})
    grpo = load(
        "grpo",
        trust=TRUST,
        kl_weight=0.0,
        scale_by_std=False,
        full_group=0.0,
        mask_limit=math.inf,
        dynamic_sampling=False,
        weighting="rollout_mean",
        length_tokens=0,
    )
    logp = logps(made, 1)
    a, b = taken(make(consistency_weight=0.0), made, logp), taken(grpo, made, logp)
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])
    assert make(consistency_weight=0.0).needs == ()
    assert make(correction_cap=2.0).needs == (
        "endorsement",
        "task_probability",
        "base_probability",
    )


def test_p2_a_label_is_a_constant_and_beyond_the_cap_nothing_pulls():
    made = dataclasses.replace(batch(), reward=np.zeros(6))  # no policy term is left
    logp = np.where(made.acted, -0.4, 0.0)
    _, slope, _ = taken(make(), made, logp)
    endorsed = made.facts["endorsement"] > 0
    assert (slope[endorsed & (np.array(LENGTHS) > 0)][:, 2] < 0).all()  # raised
    np.testing.assert_array_equal(slope[~endorsed], 0)
    _, far, _ = taken(make(), made, np.where(made.acted, -3.5, 0.0))
    np.testing.assert_array_equal(far, 0)


def test_weights_are_corrected_towards_the_base_distribution():
    made = batch()
    plain, corrected = (
        np.asarray(credited(make(correction_cap=cap), made, {}).weight) for cap in (0.0, 100.0)
    )
    np.testing.assert_allclose(corrected[:3], 2.5 * plain[:3], rtol=1e-6)
    np.testing.assert_allclose(corrected[3:], 0.625 * plain[3:], rtol=1e-6)


def test_an_invalid_rollout_has_no_consistency():
    made = batch(valid=[1, 1, 0, 1, 1, 1])
    value, slope, diagnostics = taken(make(), made, logps(made, 1))
    np.testing.assert_array_equal(slope[2], 0)
    np.testing.assert_array_equal(diagnostics["consistency"][2], 0)
    none = batch(valid=[0] * 6)
    value, slope, _ = taken(make(correction_cap=2.0), none, logps(none, 1))
    assert value == 0 and (slope == 0).all()


def test_the_papers_iteration_agrees_with_the_kernels():
    """One move of sampler and archive, by loops and by kernels."""
    rng = np.random.default_rng(0)
    q, base = (np.exp(x) / np.exp(x).sum() for x in rng.normal(size=(2, 5)))
    gain, mask = 3 * rng.random(5), jnp.ones(5, bool)
    target = paper.tilt(q, base, gain, 1.0, 0.1)
    got = drift.tilted(jnp.log(q), jnp.log(base), jnp.asarray(gain), mask, stay=1.0, home=0.1)
    np.testing.assert_allclose(jnp.exp(got), target, rtol=1e-6)
    moved = drift.bounded_move(jnp.log(q), got, mask, kappa=0.02)
    by_steps = paper.bounded(q.tolist(), target, 0.02)
    np.testing.assert_allclose(jnp.exp(moved), by_steps, rtol=5e-3)
    right, model = rng.random((9, 3)) < 0.5, rng.random(9) < 0.5
    got = drift.rule_utility(jnp.asarray(right), jnp.asarray(model), jnp.ones(9, bool), harm=0.7)
    by_hand = [paper.utility(right[:, j].tolist(), model.tolist(), 0.7) for j in range(3)]
    np.testing.assert_allclose(got, by_hand, rtol=1e-6)
    before, after = paper.archive([0.0] * 3, 2.0), paper.archive(by_hand, 2.0)
    np.testing.assert_allclose(drift.archive_weights(got, sharpness=2.0), after, rtol=1e-6)
    loose = drift.drift_bound(
        moved[None],
        jnp.log(q)[None],
        jnp.asarray([after]),
        jnp.asarray([before]),
        mask[None],
        loss_bound=1.0,
        consistency_weight=0.1,
    )
    by_hand = paper.bound(np.exp(moved).tolist(), q.tolist(), after, before, 1.0, 0.1)
    np.testing.assert_allclose(loose, [by_hand], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("consistency_weight", -0.1), ("consistency_cap", 0.0), ("correction_cap", -1.0)],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        make(**{field: value})
