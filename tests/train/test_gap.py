"""The gap between sampler and trainer, and what part of it is the weights' age: against numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.train.step import gap_metrics
from tests.train.test_step import ADAM, gvpo, run
from tests.train.toy import VOCAB, Bigram, batch_of, group, rollout, state_of


def told(gap, lag, mask) -> dict[str, float]:
    found = gap_metrics(jnp.float32(gap), jnp.int32(lag), jnp.asarray(mask))
    return {name.removeprefix("sampler/gap_"): float(x) for name, x in found.items()}


def test_the_share_of_the_lag_is_the_squared_correlation():
    random = np.random.default_rng(0)
    lag = random.integers(0, 5, (30, 20))
    gap = np.abs(random.normal(0.01, 0.01, (30, 20)) + 0.01 * lag)
    mask = random.random((30, 20)) < 0.7
    found = told(gap, lag, mask)
    expected = np.corrcoef(gap[mask], lag[mask])[0, 1] ** 2
    assert 0.3 < expected < 0.9
    assert found["lag_share"] == pytest.approx(expected, rel=1e-4)
    assert found["mean"] == pytest.approx(gap[mask].mean(), rel=1e-5)
    assert found["max"] == pytest.approx(gap[mask].max())
    assert (gap[mask] > found["p99"] + 1e-6).mean() <= 0.01
    assert (gap[mask] > found["p99"] - 1e-6).mean() > 0.01


def test_one_version_explains_nothing_and_nothing_taken_is_zero():
    gap, lag = np.array([[0.1, 0.2, 9.0]]), np.array([[1, 1, 7]])
    assert told(gap, lag, np.array([[True, True, False]]))["lag_share"] == 0
    assert set(told(gap, lag, np.zeros((1, 3), bool)).values()) == {0.0}
    assert told(0 * gap, lag, np.ones((1, 3), bool))["lag_share"] == 0


def test_the_gap_is_told_of_the_first_update_where_nobody_observes_the_student():
    """A uniform policy in two updates; only the first one's rollouts are of the weights that
    sampled, so the second one's gap does not count."""
    algorithm = gvpo(coupling="written", anchor="frozen")
    params = jax.tree.map(jnp.zeros_like, Bigram().init(jax.random.key(0)))
    state = state_of(algorithm, ADAM, params=params | {"scale": jnp.ones(4)})
    groups = [
        group(n, [rollout(n, i, [1], [2 + i], float(i), logp=[-math.log(VOCAB) - gap])
                  for i in range(2)])
        for n, gap in ((1, 0.5), (2, 8.0))
    ]  # fmt: skip
    batch = batch_of(groups, step_groups=2, size=2)
    _, metrics = run(algorithm, batch, tx=ADAM, size=2, state=state, minibatches=2)
    told = {name: metrics[f"sampler/gap_{name}"] for name in ("mean", "p99", "max")}
    assert told == pytest.approx({"mean": 0.5, "p99": 0.5, "max": 0.5}, rel=1e-4)
