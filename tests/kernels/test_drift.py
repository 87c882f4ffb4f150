"""Numbers worked by hand and identities for kernels/drift.py. P1 ... P6: PRAXIS's own checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import drift

ALL = jnp.ones(4, bool)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def simplex(rng, *shape, spread=2.0):
    """Log-probabilities along the last axis."""
    return jax.nn.log_softmax(jnp.asarray(spread * rng.normal(size=shape)), axis=-1)


def kl(log_q, log_p):
    return float((np.exp(log_q) * (np.asarray(log_q) - np.asarray(log_p))).sum())


def test_a_step_by_hand():
    # q = [.5, .25, .25], gain log 2 for the last: [.5, .25, .5] / 1.25
    log_q = jnp.log(jnp.asarray([0.5, 0.25, 0.25]))
    gain = jnp.asarray([0.0, 0.0, np.log(2)])
    got = drift.exponentiated_gradient(log_q, gain, jnp.ones(3, bool), rate=1.0)
    np.testing.assert_allclose(jnp.exp(got), [0.4, 0.2, 0.4])


def test_an_empty_universe_is_masked_and_the_rest_renormalised():
    log_q, mask = jnp.log(jnp.asarray([0.5, 0.25, 0.25])), jnp.asarray([True, False, True])
    got = drift.renormalised(log_q, mask)
    np.testing.assert_allclose(jnp.exp(got), [2 / 3, 0, 1 / 3])
    gain = jnp.asarray([0.0, jnp.nan, 0.0])  # nobody measured it
    got = drift.exponentiated_gradient(log_q, gain, mask, rate=1.0)
    np.testing.assert_allclose(jnp.exp(got), [2 / 3, 0, 1 / 3])


def test_a_probability_that_underflows_comes_back():
    """Case: q kept as q would be 0 for ever."""
    log_q, mask = jnp.zeros(2), jnp.ones(2, bool)
    away = drift.exponentiated_gradient(log_q, jnp.asarray([0.0, -2000.0]), mask, rate=1.0)
    assert jnp.exp(away)[1] == 0
    back = drift.exponentiated_gradient(away, jnp.asarray([0.0, 2000.0]), mask, rate=1.0)
    np.testing.assert_allclose(jnp.exp(back), [0.5, 0.5])


def objective(log_p, log_q, log_base, gain, stay, home):
    """<p, gain> - stay KL(p, q) - home KL(p, base)."""
    return (
        float((jnp.exp(log_p) * gain).sum()) - stay * kl(log_p, log_q) - home * kl(log_p, log_base)
    )


def test_tilted_is_the_exact_maximiser():
    rng = np.random.default_rng(0)
    for stay, home in ((1.0, 0.1), (0.3, 2.0), (1.0, 0.0)):
        log_q, log_base, gain = simplex(rng, 4), simplex(rng, 4), jnp.asarray(rng.normal(size=4))
        best = drift.tilted(log_q, log_base, gain, ALL, stay=stay, home=home)
        value = objective(best, log_q, log_base, gain, stay, home)
        for _ in range(200):
            near = jax.nn.log_softmax(best + 0.1 * jnp.asarray(rng.normal(size=4)))
            assert objective(near, log_q, log_base, gain, stay, home) <= value + 1e-12


def test_p6_at_the_old_q_its_own_divergence_has_no_gradient():
    log_q = simplex(np.random.default_rng(1), 4)

    def divergence(phi):
        moved = jax.nn.log_softmax(phi)
        return drift.relative_entropy(moved[None], log_q[None], ALL[None])[0]

    np.testing.assert_allclose(jax.grad(divergence)(log_q + 3.0), 0, atol=1e-12)
    away = log_q + jnp.asarray([1.0, 0.0, 0.0, 0.0])
    assert jnp.abs(jax.grad(divergence)(away)).max() > 1e-2


def test_p4_the_cap_is_never_exceeded():
    rng = np.random.default_rng(2)
    move = jax.jit(drift.bounded_move, static_argnames="kappa")
    reached = []
    for trial in range(200):
        log_q = simplex(rng, 4)
        size = 10.0 ** rng.uniform(-3, 1)
        target = jax.nn.log_softmax(log_q + size * jnp.asarray(rng.normal(size=4)))
        moved = move(log_q, target, ALL, kappa=0.02)
        assert kl(moved, log_q) <= 0.02 + 1e-9, trial
        np.testing.assert_allclose(jnp.exp(moved).sum(), 1)
        if kl(target, log_q) > 0.02:  # as far as it may go
            np.testing.assert_allclose(kl(moved, log_q), 0.02, rtol=1e-6)
            reached.append(trial)
        else:
            np.testing.assert_allclose(moved, target, atol=1e-12)
    assert 50 < len(reached) < 150
    # in float32 too, up to its rounding
    wide = [simplex(rng, 4).astype(jnp.float32) for _ in range(2)]
    assert kl(np.float64(move(*wide, ALL, kappa=0.02)), np.float64(wide[0])) <= 0.02 + 1e-6


def test_no_drift_allowed_freezes_q():
    rng = np.random.default_rng(3)
    log_q = simplex(rng, 4)
    np.testing.assert_array_equal(
        drift.bounded_move(log_q, simplex(rng, 4), ALL, kappa=0.0), drift.renormalised(log_q, ALL)
    )


def test_a_bounded_step_is_the_best_one_inside_the_bound():
    rng = np.random.default_rng(4)
    log_q, gain = simplex(rng, 4), jnp.asarray(rng.normal(size=4))
    target = drift.exponentiated_gradient(log_q, gain, ALL, rate=50.0)
    moved = drift.bounded_move(log_q, target, ALL, kappa=0.05)
    best = float((jnp.exp(moved) * gain).sum())
    for _ in range(2000):
        other = jax.nn.log_softmax(log_q + 0.5 * jnp.asarray(rng.normal(size=4)))
        if kl(other, log_q) <= 0.05:
            assert float((jnp.exp(other) * gain).sum()) <= best + 1e-9


def test_rule_utility_by_hand():
    # rule 0 right on 3 of 4, breaks example 1; rule 1 copies the model; the fifth does not count
    rule_right = jnp.asarray([[1, 1], [0, 1], [1, 0], [1, 0], [0, 1]], bool)
    model_right = jnp.asarray([1, 1, 0, 0, 1], bool)
    mask = jnp.asarray([1, 1, 1, 1, 0], bool)
    got = drift.rule_utility(rule_right, model_right, mask, harm=0.5)
    np.testing.assert_allclose(got, [3 / 4 - 0.5 / 4, 2 / 4])


def test_p1_weights_are_the_multiplicative_update():
    rng = np.random.default_rng(5)
    score, utility = jnp.asarray(rng.normal(size=6)), jnp.asarray(rng.normal(size=6))
    before = drift.archive_weights(score, sharpness=2.0)
    after = drift.archive_weights(score + 0.5 * utility, sharpness=2.0)
    by_hand = np.asarray(before) * np.exp(2.0 * 0.5 * np.asarray(utility))
    np.testing.assert_allclose(after, by_hand / by_hand.sum(), rtol=1e-10)


def test_p5_a_lasting_gap_in_utility_tells_by_exactly_itself_each_step():
    utility, score = jnp.asarray([0.7, 0.4, 0.1]), jnp.zeros(3)
    ratios = []
    for _ in range(6):
        weight = drift.archive_weights(score, sharpness=1.5)
        ratios.append(float(jnp.log(weight[1] / weight[0])))
        score = score + 0.5 * utility
    np.testing.assert_allclose(np.diff(ratios), -1.5 * 0.5 * 0.3, rtol=1e-9)


def test_one_rule_has_all_the_weight_and_equal_rules_share_it():
    np.testing.assert_allclose(drift.archive_weights(jnp.asarray([-3.0]), sharpness=2.0), [1.0])
    np.testing.assert_allclose(drift.archive_weights(jnp.full(4, 9.0), sharpness=2.0), 0.25)


def test_consistency_by_hand_and_its_gradient_beyond_the_cap():
    logp = jnp.asarray([0.0, -1.0, -5.0, -7.0, -jnp.inf])
    np.testing.assert_allclose(drift.clipped_consistency(logp, cap=5.0), [0, 0.2, 1, 1, 1])
    slope = jax.grad(lambda x: drift.clipped_consistency(x, cap=5.0).sum())(logp[:4])
    np.testing.assert_array_equal(slope, [-0.2, -0.2, 0, 0])


def test_p3_the_drift_bound_holds_on_random_pairs():
    """F_t(theta) = E_q[loss + lam sum_j w_j D_j] at a fixed theta, loss <= L, D in [0, 1]."""
    rng = np.random.default_rng(6)
    steps, universes, rules, top, lam = 400, 5, 3, 2.0, 0.7
    log_q = simplex(rng, steps, universes)
    size = jnp.asarray(10.0 ** rng.uniform(-3, 1, (steps, 1)))
    log_q_next = jax.nn.log_softmax(log_q + size * jnp.asarray(rng.normal(size=log_q.shape)))
    weight, weight_next = (jnp.exp(simplex(rng, steps, rules)) for _ in range(2))
    loss = jnp.asarray(top * (rng.random((steps, universes)) < 0.5))  # at the ends of the interval
    gap = jnp.asarray(rng.random((steps, universes, rules)) < 0.5, float)

    def value(log_q, weight):
        return (jnp.exp(log_q) * (loss + lam * (gap * weight[:, None]).sum(-1))).sum(-1)

    drifted = jnp.abs(value(log_q_next, weight_next) - value(log_q, weight))
    mask = jnp.ones((steps, universes), bool)
    numbers = {"loss_bound": top, "consistency_weight": lam}
    pairs = (log_q_next, log_q, weight_next, weight, mask)
    loose, tight = drift.drift_bound(*pairs, **numbers), drift.tight_drift_bound(*pairs, **numbers)
    assert (drifted <= tight + 1e-12).all() and (tight <= loose / 2 + 1e-12).all()
    assert (drifted / tight).max() > 0.8  # and it is nearly reached


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3])
def test_a_tiny_move_has_a_distance_and_a_bound_in_a_runs_own_float32(size):
    """Case: KL rounds to 0, and the ledger counts a broken bound where none was."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(False):
        log_q = simplex(rng, 64, 4, spread=1.0)
        moved = jax.nn.log_softmax(log_q + size * jnp.asarray(rng.normal(size=(64, 4))), axis=-1)
        loss = jnp.asarray(rng.random((64, 4)) < 0.5, jnp.float32)
        weight, mask = jnp.ones((64, 1)), jnp.ones((64, 4), bool)
        told = drift.relative_entropy(moved, log_q, mask)
        bound = drift.drift_bound(
            moved, log_q, weight, weight, mask, loss_bound=1.0, consistency_weight=0.0
        )
    a, b = (np.asarray(x, np.float64) for x in (log_q, moved))
    a, b = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (a, b))
    true = (np.exp(b) * (b - a)).sum(-1)
    np.testing.assert_allclose(told, true, rtol=0.5 if size < 1e-4 else 0.05, atol=1e-13)
    went = np.abs(((np.exp(b) - np.exp(a)) * np.asarray(loss, np.float64)).sum(-1))
    assert (went <= np.asarray(bound) + 1e-6).all()


def test_p4_the_cap_is_kept_in_a_runs_own_float32():
    rng = np.random.default_rng(1)
    with jax.enable_x64(False):
        mask, move = jnp.ones(4, bool), jax.jit(drift.bounded_move, static_argnames="kappa")
        pairs = [(simplex(rng, 4, spread=1.0), simplex(rng, 4)) for _ in range(20)]
        moved = [(q, move(q, target, mask, kappa=1e-6)) for q, target in pairs]
    for pair in moved:
        a, b = (np.asarray(x, np.float64) for x in pair)
        a, b = (x - np.log(np.exp(x).sum()) for x in (a, b))
        assert 0.9e-6 < (np.exp(b) * (b - a)).sum() <= 1.01e-6


def test_nothing_here_is_differentiated_but_the_consistency():
    log_q, gain = jnp.zeros(4), jnp.arange(4.0)
    slope = jax.grad(lambda x: drift.tilted(x, log_q, gain, ALL, stay=1.0, home=1.0).sum())(log_q)
    np.testing.assert_array_equal(slope, 0)
