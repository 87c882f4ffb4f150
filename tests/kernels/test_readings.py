"""Numbers worked by hand for kernels/readings.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.readings import entropy, taken_logp


def test_case_1_the_log_prob_of_a_token_comes_from_the_position_before_it():
    # rows of probabilities; the logits of position j - 1 predict token j
    logits = jnp.log(jnp.asarray([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]))
    tokens = jnp.asarray([1, 2, 0])
    got = taken_logp(logits[:-1], tokens[1:])
    np.testing.assert_allclose(got, [-0.693147, -0.510826], atol=1e-5)  # log .5, log .6


@pytest.mark.parametrize(
    ("temperature", "right"), [(1, -0.126928), (0.5, -0.018150), (2, -0.313262)]
)
def test_case_2_temperature(temperature, right):
    # -log(1 + exp(-2 / T)): logits come divided by the temperature
    logits = jnp.asarray([[2.0, 0.0]]) / temperature
    np.testing.assert_allclose(taken_logp(logits, jnp.asarray([0])), [right], atol=1e-5)


def test_case_8_float32_log_softmax_of_whatever_comes():
    logits = jnp.asarray([[10.030029, 10.0]])
    got = taken_logp(logits, jnp.asarray([0]))
    np.testing.assert_allclose(got, [-0.678245], atol=1e-5)  # -log(1 + exp(-.030029))
    narrow = taken_logp(jnp.asarray([[10.0, 10.0]], jnp.bfloat16), jnp.asarray([0]))
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, [-np.log(2)], rtol=1e-6)  # exact: not rounded to 8 bits


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_case_8_no_log_prob_is_above_zero(dtype):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(512, 16)) * rng.choice([1, 10, 100], (512, 1))
    logits = jnp.asarray(logits, dtype)
    top = logits.argmax(-1)
    raw = logits[jnp.arange(512), top].astype(jnp.float32) - jax.nn.logsumexp(
        logits.astype(jnp.float32), axis=-1
    )
    got = taken_logp(logits, top)
    assert float(got.max()) <= 0
    np.testing.assert_allclose(got, jnp.minimum(raw, 0), atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: taken_logp(x, top).sum())(logits)).all()


def test_taken_logp_has_the_slope_of_a_softmax():
    # d/dlogits log p_0 = [1 - p_0, -p_1] with p = [.8, .2]
    logits = jnp.log(jnp.asarray([[0.8, 0.2]]))
    slope = jax.grad(lambda x: taken_logp(x, jnp.asarray([0])).sum())(logits)
    np.testing.assert_allclose(slope, [[0.2, -0.2]], atol=1e-6)


def test_entropy():
    # uniform over 4: log 4; [1/2, 1/4, 1/4, 0]: 1/2 log 2 + 1/2 log 4 = 1.5 log 2; certain: 0
    logits = jnp.asarray([[3.0, 3, 3, 3], [np.log(2), 0, 0, -np.inf], [500, 0, 0, 0]], jnp.float32)
    expected = [2 * np.log(2), 1.5 * np.log(2), 0]
    np.testing.assert_allclose(entropy(logits), expected, atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: entropy(x).sum())(logits)).all()


def test_entropy_of_bfloat16_logits_is_computed_in_float32():
    # In bfloat16 the sum over a large vocabulary is off by more than 0.02.
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4096)), jnp.bfloat16)
    x = np.asarray(logits, np.float64)[0]
    p = np.exp(x) / np.exp(x).sum()
    np.testing.assert_allclose(entropy(logits), [-(p * np.log(p)).sum()], rtol=1e-5)
