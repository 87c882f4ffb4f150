"""Numbers worked by hand for kernels/hindsight.py. S...: SELF's own checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.hindsight import feedback_loss, hindsight_gap, turn_mean, turn_sum


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


mean = jax.jit(turn_mean)

# Two rows of one rollout, then one row of another. Labels repeat between rows.
TURN = jnp.asarray([[0, 0, 7, 7, 7], [0, 3, 3, 0, 0], [5, 5, 5, 5, -1]])
MASK = jnp.asarray([[1, 1, 1, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 0]], bool)
ROLLOUT, MINIBATCH = jnp.asarray([4, 4, 9]), jnp.zeros(3, int)


def test_turn_sum_adds_inside_a_turn_of_a_row():
    x = jnp.asarray([[1.0, 2, 4, jnp.nan, 8], [1, 9, 9, 2, 4], [1, 1, 1, 1, 1]])
    got = turn_sum(x, TURN, MASK)
    np.testing.assert_array_equal(got, [[3, 3, 12, 12, 12], [7, 0, 0, 7, 7], [4, 4, 4, 4, 0]])


def test_turn_mean_by_hand():
    """Rollout 4 has three turns (2, 2 and 3 tokens), rollout 9 one of 4."""
    got = mean(TURN, ROLLOUT, MINIBATCH, MASK)
    third = 1 / 3 / 2
    expected = [
        [third / 2, third / 2, third / 2, 0, third / 2],
        [third / 3, 0, 0, third / 3, third / 3],
        [1 / 8, 1 / 8, 1 / 8, 1 / 8, 0],
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(got.sum(), 1, rtol=1e-6)


def test_s3_repeating_a_rollouts_turns_does_not_raise_its_weight():
    turn = np.array([[0, 0, 1, 1, 1, 1], [5, 5, 6, 6, 8, 8]])  # two turns of unlike length; three
    mask = np.ones(turn.shape, bool)
    rollout, minibatch = np.array([4, 9]), np.zeros(2, int)
    thrice = mean(turn, rollout, minibatch, mask)
    mask[1, 2:] = False  # the first of the three alone
    once = mean(turn, rollout, minibatch, mask)
    np.testing.assert_allclose(thrice.sum(-1), [1 / 2, 1 / 2], rtol=1e-6)
    np.testing.assert_allclose(once.sum(-1), [1 / 2, 1 / 2], rtol=1e-6)
    np.testing.assert_allclose(thrice[0], [1 / 8] * 2 + [1 / 16] * 4, rtol=1e-6)


def test_what_has_no_token_is_in_no_denominator():
    empty = mean(TURN, ROLLOUT, MINIBATCH, MASK.at[:2].set(False))
    np.testing.assert_allclose(empty[2], [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0])
    np.testing.assert_array_equal(empty[:2], 0)


def test_updates_are_apart():
    got = mean(TURN, ROLLOUT, jnp.asarray([0, 0, 1]), MASK)
    np.testing.assert_allclose(got[:2].sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(got[2].sum(), 1, rtol=1e-6)


def test_hindsight_gap_by_hand():
    # p = [.5, .5], q = [.8, .2]: .5 log(.5 / .8) + .5 log(.5 / .2) = .223144
    logits, seen = jnp.zeros((1, 2)), jnp.log(jnp.asarray([[0.8, 0.2]]))
    np.testing.assert_allclose(hindsight_gap(logits, seen), [0.22314355], rtol=1e-7)
    # p_v (log p_v - log q_v - KL): .5 (-.470004 - .223144)
    slope = jax.grad(lambda z: hindsight_gap(z, seen).sum())(logits)
    np.testing.assert_allclose(slope, [[-0.34657359, 0.34657359]], rtol=1e-7)


def test_s1_no_gradient_reaches_the_one_who_has_seen_the_feedback():
    rng = np.random.default_rng(0)
    logits, seen = (jnp.asarray(rng.normal(size=(3, 5))) for _ in range(2))
    slope = jax.grad(lambda z: hindsight_gap(logits, z).sum())(seen)
    np.testing.assert_array_equal(slope, 0)


def test_s6_the_gap_is_never_negative_and_zero_between_equals():
    rng = np.random.default_rng(1)
    logits, seen = (jnp.asarray(5 * rng.normal(size=(400, 6))) for _ in range(2))
    assert (hindsight_gap(logits, seen) > 0).all()
    np.testing.assert_allclose(hindsight_gap(logits, logits + 3), 0, atol=1e-12)


def test_feedback_loss_is_the_negative_log_prob_of_what_counts():
    logp = jnp.asarray([[-1.0, jnp.nan, -0.25]])
    np.testing.assert_array_equal(
        feedback_loss(logp, jnp.asarray([[1, 0, 1]], bool)), [[1, 0, 0.25]]
    )
