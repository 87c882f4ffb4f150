"""Numbers worked by hand for kernels/routers.py, then the whole beside the published formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import routers
from tests.papers import routers as paper

EVENNESS = ("max_share", "normalised_entropy", "load_cv", "load_peak", "cold_share")


def evenness(count):
    """What every kernel says of one layer's load."""
    return {name: float(vars(routers)[name](jnp.asarray(count))) for name in EVENNESS}


def softmax(logits, k, normalise=False, scale=1.0):
    return routers.softmax_router(
        jnp.asarray(logits), per_token=k, normalise=normalise, scale=scale
    )


def sigmoid(logits, bias, k, normalise=False, scale=1.0):
    return routers.sigmoid_router(
        jnp.asarray(logits), jnp.asarray(bias), per_token=k, normalise=normalise, scale=scale
    )


def test_softmax_by_hand():
    # p = [4 2 1 1] / 8; the best two are 1/2 and 1/4, of their sum 2/3 and 1/3
    logits = [[math.log(4), math.log(2), 0.0, 0.0]]
    routes, gates = softmax(logits, 2)
    np.testing.assert_array_equal(routes, [[0, 1]])
    np.testing.assert_allclose(gates, [[1 / 2, 1 / 4]], rtol=1e-6)
    np.testing.assert_allclose(softmax(logits, 2, True)[1], [[2 / 3, 1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(softmax(logits, 2, True, 3.0)[1], [[2, 1]], rtol=1e-6)


def test_sigmoid_by_hand():
    # s = [1/2 3/4 4/5]; with the bias 1/2 + 1, 3/4, 4/5 - 1: experts 0 and 1, gates without it
    logits = [[0.0, math.log(3), math.log(4)]]
    routes, gates = sigmoid(logits, [1.0, 0.0, -1.0], 2)
    np.testing.assert_array_equal(routes, [[0, 1]])
    np.testing.assert_allclose(gates, [[1 / 2, 3 / 4]], rtol=1e-6)
    gates = sigmoid(logits, [1.0, 0.0, -1.0], 2, True, 5.0)[1]
    np.testing.assert_allclose(gates, [[2, 3]], rtol=1e-6)


def test_ties_go_to_the_lower_index():
    np.testing.assert_array_equal(softmax([[1.0, 2.0, 2.0, 2.0]], 2)[0], [[1, 2]])
    np.testing.assert_array_equal(sigmoid([[0.0, 0.0, 0.0]], [0.0, 0.0, 0.0], 2)[0], [[0, 1]])
    # far out, where every sigmoid is 0 or 1
    np.testing.assert_array_equal(sigmoid([[-1e4, 1e4, 1e4]], [0.0] * 3, 2)[0], [[1, 2]])


def test_a_bias_gets_no_gradient_and_logits_do():
    def total(logits, bias):
        gates = sigmoid(logits, bias, 2)[1]
        return (gates * jnp.asarray([1.0, 2.0])).sum()

    logits, bias = jnp.asarray([[0.3, -1.0, 0.5]]), jnp.asarray([0.1, 0.2, 0.3])
    d_logits, d_bias = jax.grad(total, (0, 1))(logits, bias)
    np.testing.assert_array_equal(d_bias, 0)
    s = 1 / (1 + np.exp(-np.asarray([0.3, 0.5])))
    np.testing.assert_allclose(d_logits, [[2 * s[0] * (1 - s[0]), 0, s[1] * (1 - s[1])]], rtol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_routers_equal_the_paper(kind, normalise):
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(40, 8))
    bias = rng.normal(size=8) / 4 if kind == "sigmoid" else np.zeros(8)
    router = functools.partial(sigmoid, bias=bias) if kind == "sigmoid" else softmax
    with jax.enable_x64(True):
        routes, gates = router(logits, k=3, normalise=normalise, scale=2.5)
    for t, mine in enumerate(logits):
        chosen = paper.routes(mine, bias, kind, 3)
        np.testing.assert_array_equal(routes[t], chosen)
        expected = paper.gates(mine, chosen, kind, normalise, 2.5)
        np.testing.assert_allclose(gates[t], expected, rtol=1e-12)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_replayed_gates_are_live_and_over_what_is_replayed(kind, normalise):
    rng = np.random.default_rng(1)
    logits, nudge = 3 * rng.normal(size=(40, 8)), rng.normal(size=(40, 8))
    recorded = np.stack([rng.permutation(8)[:3] for _ in range(40)])
    recorded[:5], recorded[5:9, 1:] = -1, -1
    with jax.enable_x64(True):
        kernel, routes = vars(routers)[f"{kind}_gates"], jnp.asarray(recorded)

        @jax.jit
        def gates(logits):
            return kernel(logits, routes, normalise=normalise, scale=2.5)

        found = gates(logits)
        slope = jax.jit(jax.grad(lambda x: (gates(x) ** 2).sum()))(logits)
        ends = [float((gates(logits + h * nudge) ** 2).sum()) for h in (1e-6, -1e-6)]
    for t, mine in enumerate(logits):
        expected = paper.gates(mine, recorded[t], kind, normalise, 2.5)
        np.testing.assert_allclose(found[t], expected, rtol=1e-12)
    np.testing.assert_array_equal(found[:5], 0)
    np.testing.assert_array_equal(slope[:5], 0)
    np.testing.assert_allclose(
        (np.asarray(slope) * nudge).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-6
    )


def test_gates_of_experts_that_are_all_far_out_are_finite():
    logits, routes = jnp.asarray([[0.0, -300.0, -301.0]]), jnp.asarray([[1, 2]])
    for gates in (routers.softmax_gates, routers.sigmoid_gates):
        of = functools.partial(gates, routes=routes, normalise=True, scale=1.0)
        first = 1 / (1 + math.exp(-1))
        np.testing.assert_allclose(of(logits), [[first, 1 - first]], rtol=1e-5)
        assert np.isfinite(jax.jacobian(of)(logits)).all()


def test_case_32_collapse_shows():
    """Two experts, one choice, three tokens that all go to expert 0."""
    count = routers.load(jnp.zeros((3, 1), int), jnp.ones(3, bool), experts=2)
    np.testing.assert_array_equal(count, [3, 0])
    np.testing.assert_array_equal(routers.load_share(count), [1, 0])
    # mean 1.5: std 1.5, peak 3 / 1.5; one of two experts is cold
    expected = dict(zip(EVENNESS, (1, 0, 1, 2, 0.5), strict=True))
    assert evenness(count) == pytest.approx(expected, abs=1e-6)


def test_case_32_even_load_is_even():
    count = jnp.asarray([3, 3, 3, 3])
    expected = dict(zip(EVENNESS, (0.25, 1, 0, 1, 0), strict=True))
    assert evenness(count) == pytest.approx(expected, abs=1e-6)
    # 4 * (1/4 [.7 .1 .1 .1]) summed is 1; and P uniform under any load
    lean, uniform = jnp.asarray([[0.7, 0.1, 0.1, 0.1]]), jnp.full((1, 4), 0.25)
    share = routers.load_share(count)
    np.testing.assert_allclose(routers.balance(lean, share), [1], rtol=1e-6)
    uneven = jnp.asarray([0.9, 0.1, 0, 0])
    np.testing.assert_allclose(routers.balance(uniform, uneven), [1], rtol=1e-6)
    # 4 * (.9 * .7 + .1 * .1)
    np.testing.assert_allclose(routers.balance(lean, uneven), [2.56], rtol=1e-6)


def test_one_expert_and_no_load_have_numbers():
    assert evenness([5]) == dict(zip(EVENNESS, (1, 0, 0, 1, 0), strict=True))
    assert evenness([0, 0]) == dict(zip(EVENNESS, (0, 0, 0, 0, 0), strict=True))


def test_padding_never_counts_and_micro_batches_add_up():
    rng = np.random.default_rng(2)
    routes = rng.integers(-1, 6, (50, 2))
    mask = rng.random(50) < 0.7
    of = jax.jit(functools.partial(routers.load, experts=6))
    whole = of(routes, mask)
    np.testing.assert_array_equal(whole, paper.load(routes, mask, 6))
    np.testing.assert_array_equal(of(routes[:20], mask[:20]) + of(routes[20:], mask[20:]), whole)
    found = evenness(whole)
    assert found == pytest.approx(paper.evenness(np.asarray(whole).tolist()), rel=1e-5)


def test_evenness_equals_the_paper_over_layers():
    count = np.random.default_rng(3).integers(0, 40, (5, 7)) * np.asarray([1, 1, 0, 1, 1, 1, 9])
    for name in EVENNESS:
        found = vars(routers)[name](jnp.asarray(count))
        expected = [paper.evenness(layer)[name] for layer in count.tolist()]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_agreement_is_of_sets_and_what_is_missing_agrees_with_nothing():
    routes = jnp.asarray([[0, 1], [1, 0], [2, 3], [0, 1], [-1, -1], [4, 5]])
    recorded = jnp.asarray([[0, 1], [0, 1], [3, 1], [-1, -1], [-1, -1], [4, -1]])
    found = routers.agreement(routes, recorded)
    np.testing.assert_array_equal(found, [1, 1, 0.5, 0, 0, 0.5])
    both = zip(routes.tolist(), recorded.tolist(), strict=True)
    np.testing.assert_array_equal(found, [paper.agreement(a, b) for a, b in both])
    np.testing.assert_array_equal(routers.routed(recorded), [True] * 3 + [False] * 3)
