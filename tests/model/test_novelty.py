"""Random networks and their predictors: shapes, numbers by hand, what is trained and what is
not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model import novelty

FORM = {"layers": 3, "width": 4, "hidden": 5}


@pytest.fixture(scope="module")
def params():
    return novelty.init(jax.random.key(0), **FORM)


@pytest.mark.parametrize(
    ("layers", "expected"), [(28, (7, 14, 21)), (4, (1, 2, 3)), (2, (0, 1, 1)), (1, (0, 0, 0))]
)
def test_three_quarters_of_the_depth_are_read(layers, expected):
    assert novelty.depths(layers) == expected


def test_parameters_have_the_stated_shapes_and_bounds(params):
    stated = novelty.shapes(**FORM)
    assert {name: (x.shape, x.dtype) for name, x in params.items()} == {
        name: (form.shape, form.dtype) for name, form in stated.items()
    }
    assert params["target/0/kernel"].shape == (3, 4, 5)
    bound = np.sqrt(6 / (4 + 5))
    assert 0.8 * bound < np.abs(params["predictor/0/kernel"]).max() <= bound
    assert not np.any(params["target/2/bias"])
    # the two networks of a layer, and those of two layers, are drawn apart
    assert np.abs(params["target/0/kernel"] - params["predictor/0/kernel"]).min() > 0
    assert np.abs(params["target/0/kernel"][0] - params["target/0/kernel"][1]).min() > 0


def test_a_key_gives_the_same_networks_and_another_key_others(params):
    again = novelty.init(jax.random.key(0), **FORM)
    other = novelty.init(jax.random.key(1), **FORM)
    assert all(np.array_equal(params[name], again[name]) for name in params)
    assert not np.array_equal(params["target/0/kernel"], other["target/0/kernel"])


def test_by_hand():
    # one feature, one unit: target relu(relu(x)) = x, predictor relu(relu(2 x)) * .5 + 1 = x + 1
    # where x > 0; below 0 the target is 0 and the predictor its last bias, 1
    one, zero = jnp.ones((1, 1, 1)), jnp.zeros((1, 1))
    params = {f"{n}/{i}/kernel": one for n in novelty.NETWORKS for i in range(3)}
    params |= {f"{n}/{i}/bias": zero for n in novelty.NETWORKS for i in range(3)}
    params |= {"predictor/0/kernel": 2 * one, "predictor/2/kernel": one / 2}
    params |= {"predictor/2/bias": zero + 1, "target/2/bias": zero - 2}
    error = novelty.error(params, jnp.asarray([[[3.0]], [[-3.0]]]))
    np.testing.assert_allclose(error, [[(3 - 2 - 4) ** 2], [(-2 - 1) ** 2]])


def test_each_layer_has_its_own_pair(params):
    features = jax.random.normal(jax.random.key(2), (6, 3, 4))
    whole = novelty.error(params, features)
    assert whole.shape == (6, 3)
    for layer in range(3):
        part = {name: x[layer : layer + 1] for name, x in params.items()}
        alone = novelty.error(part, features[:, layer : layer + 1])
        np.testing.assert_allclose(whole[:, layer], alone[:, 0], rtol=1e-5)


def test_the_policy_and_the_target_get_no_gradient(params):
    features = jax.random.normal(jax.random.key(2), (6, 3, 4))
    by_params, by_features = jax.grad(lambda p, x: novelty.error(p, x).sum(), argnums=(0, 1))(
        params, features
    )
    np.testing.assert_array_equal(by_features, 0)
    for name, gradient in by_params.items():
        moved = bool(np.any(gradient))
        assert moved is not name.startswith(novelty.FROZEN), name


def test_e2_the_error_falls_on_repeated_data_and_less_elsewhere():
    params = novelty.init(jax.random.key(0), layers=3, width=4, hidden=32)
    seen, unseen = jax.random.normal(jax.random.key(2), (2, 4, 3, 4))

    @jax.jit
    def walk(params):
        def step(params, _):
            slope = jax.grad(lambda p: novelty.error(p, seen).sum())(params)
            return jax.tree.map(lambda x, g: x - 0.05 * g, params, slope), None

        return jax.lax.scan(step, params, None, length=200)[0]

    trained = walk(params)
    for name in params:
        if name.startswith(novelty.FROZEN):
            np.testing.assert_array_equal(trained[name], params[name])
    before, after = novelty.error(params, seen).mean(), novelty.error(trained, seen).mean()
    assert after < before / 10
    assert novelty.error(trained, unseen).mean() > 5 * after


def test_pooling_is_a_mean_over_counted_tokens():
    states = jnp.asarray([[[1.0, 2.0], [3.0, 6.0], [jnp.nan, 1e9]], [[5.0, 5.0]] * 3])
    mask = jnp.asarray([[True, True, False], [False] * 3])
    np.testing.assert_allclose(novelty.pooled(states, mask), [[2, 4], [0, 0]])
    assert novelty.pooled(states.astype(jnp.bfloat16), mask).dtype == jnp.float32
