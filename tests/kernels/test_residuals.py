"""Numbers worked by hand and identities for kernels/residuals.py. R1 ... R5: the method's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.residuals import (
    missing_mass,
    overlap,
    residual_advantage,
    response_center,
    stored_residual,
    top_residual,
)

STUDENT = np.array([0.5, 0.3, 0.2])
TEACHER = np.array([0.2, 0.7, 0.1])
EVERY = jnp.arange(3)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def logits_of(probabilities):
    """The same row for each token that may be taken."""
    return jnp.tile(jnp.log(jnp.asarray(probabilities)), (3, 1))


def drawn(positions, vocab, seed, scale=3.0):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(scale * rng.normal(size=(positions, vocab))),
        jnp.asarray(scale * rng.normal(size=(positions, vocab))),
        jnp.asarray(rng.integers(0, vocab, positions)),
    )


def test_by_hand():
    # d = [-.3, .4, -.1], sum pS d = -.15 + .12 - .02 = -.05
    a = residual_advantage(logits_of(STUDENT), logits_of(TEACHER), EVERY)
    np.testing.assert_allclose(a, [-0.25, 0.45, -0.05], rtol=1e-12)
    # sum pS pT = .1 + .21 + .02, sum pS^2 = .25 + .09 + .04: their difference is the -.05 again
    both = overlap(logits_of(STUDENT), logits_of(TEACHER))
    own = overlap(logits_of(STUDENT), logits_of(STUDENT))
    np.testing.assert_allclose([both[0], own[0]], [0.33, 0.38], rtol=1e-12)
    stored = stored_residual(jnp.log(STUDENT)[None], jnp.log(TEACHER)[None], both[None], own[None])
    np.testing.assert_allclose(stored[0], [-0.25, 0.45, -0.05], rtol=1e-12)


def test_a_short_list_of_the_teacher_by_hand():
    # the two likeliest hold .21 + .1 of the .33, and miss .1 of the mass: all residuals are .02 up
    a = top_residual(logits_of(STUDENT), logits_of(TEACHER), EVERY, kept=2)
    np.testing.assert_allclose(a, [-0.23, 0.47, -0.03], rtol=1e-12)
    np.testing.assert_allclose(missing_mass(logits_of(TEACHER), kept=2), 0.1, rtol=1e-12)


def test_a_short_list_errs_by_at_most_what_it_misses():
    arrays = drawn(200, 7, seed=1)
    whole = residual_advantage(*arrays)
    np.testing.assert_allclose(top_residual(*arrays, kept=7), whole, atol=1e-14)
    for kept in (1, 3):
        over = top_residual(*arrays, kept=kept) - whole
        assert (over >= -1e-15).all()
        assert (over <= missing_mass(arrays[1], kept=kept) + 1e-15).all()


def test_centring_by_hand():
    x = jnp.asarray([[1.0, 3.0, 5.0, 9.0], [7.0, 7.0, 7.0, 7.0]])
    mask = jnp.asarray([[True, True, True, False], [False, True, False, False]])
    even = jnp.ones(x.shape)
    of_two = jnp.asarray([4, 2])
    # means 3 and 7; a response of one token is inert
    np.testing.assert_array_equal(
        response_center(x, even, of_two, mask), [[-2, 0, 2, 0], [0, 0, 0, 0]]
    )
    # one rollout in two rows: (1 + 3 + 5 + 7) / 4 = 4
    np.testing.assert_array_equal(
        response_center(x, even, jnp.zeros(2, int), mask), [[-3, -1, 1, 0], [0, 3, 0, 0]]
    )
    # (1 + 3 + 2 * 5) / 4 = 3.5
    weight = even.at[0, 2].set(2)
    np.testing.assert_array_equal(response_center(x, weight, of_two, mask)[0], [-2.5, -0.5, 1.5, 0])


def test_centring_without_weight_changes_nothing():
    x, mask = jnp.asarray([[1.0, 3.0]]), jnp.ones((1, 2), bool)
    np.testing.assert_array_equal(response_center(x, 0 * x, jnp.zeros(1, int), mask), x)


def test_r1_the_centred_sum_is_zero_and_one_token_is_exactly_inert():
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.random((50, 6))) for _ in range(2))
    mask = jnp.asarray(np.arange(6) < rng.integers(1, 7, 50)[:, None])
    centred = response_center(x, weight, jnp.arange(50), mask)
    np.testing.assert_allclose((centred * jnp.where(mask, weight, 0)).sum(-1), 0, atol=1e-15)
    assert (centred[mask.sum(-1) == 1] == 0).all()


def test_r2_bounds():
    a = residual_advantage(*drawn(20_000, 4, seed=3, scale=9.0))
    assert a.min() >= -0.5
    assert a.max() <= 2
    assert a.max() > 1.99
    # -2 p (1 - p) for pS = (p, 1 - p) and a teacher that is sure of the other token
    sure = jnp.asarray([[0.0, 100.0]])
    low = residual_advantage(jnp.zeros((1, 2)), sure, jnp.zeros(1, int))
    np.testing.assert_allclose(low, -0.5, rtol=1e-12)


def test_r3_expectations_under_the_student():
    logits, teacher, _ = drawn(1, 7, seed=4)
    every = jnp.arange(7)

    def spread(row):
        return jnp.tile(row, (7, 1))

    a = residual_advantage(spread(logits[0]), spread(teacher[0]), every)
    p = jax.nn.softmax(logits[0])
    np.testing.assert_allclose((p * a).sum(), 0, atol=1e-15)

    def distance(x):
        return ((jax.nn.softmax(teacher[0]) - jax.nn.softmax(x)) ** 2).sum() / 2

    slopes = jax.jacobian(jax.nn.log_softmax)(logits[0])  # [token, logit]
    np.testing.assert_allclose(
        ((p * a)[:, None] * slopes).sum(0), -jax.grad(distance)(logits[0]), rtol=1e-10
    )


def test_r4_stored_statistics_equal_the_full_form():
    logits, teacher, taken = drawn(100, 7, seed=5)
    stored = stored_residual(
        taken_logp(logits, taken)[None],
        taken_logp(teacher, taken)[None],
        overlap(logits, teacher)[None],
        overlap(logits, logits)[None],
    )[0]
    np.testing.assert_allclose(stored, residual_advantage(logits, teacher, taken), atol=1e-14)


def test_r5_constants_on_the_logits_change_nothing():
    logits, teacher, taken = drawn(50, 7, seed=6)
    shift = jnp.asarray(np.random.default_rng(7).normal(size=(50, 1)))
    np.testing.assert_allclose(
        residual_advantage(logits - 2 * shift, teacher + shift, taken),
        residual_advantage(logits, teacher, taken),
        atol=1e-14,
    )


def test_a_teacher_equal_to_the_student_says_exactly_nothing():
    logits, _, taken = drawn(50, 7, seed=8)
    np.testing.assert_array_equal(residual_advantage(logits, logits, taken), 0)
