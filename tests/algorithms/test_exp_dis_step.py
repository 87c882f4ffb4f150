"""ExpDis through a whole take: who moves, what is judged before whom. E2: the targets never do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.batch import View
from jaxrl.model import novelty
from jaxrl.train.state import Role
from tests.algorithms.test_exp_dis import make
from tests.train.test_step import assert_same
from tests.train.toy import Bigram, batch_of, random_groups, state_of, step_of

SGD = optax.sgd(0.3)


@dataclasses.dataclass(frozen=True)
class Judged(Bigram):
    """Features are the student's embeddings, for each of three layers."""

    def score(self, params, batch, read, scorers):
        others = [pair for pair in scorers if pair[0] != "novelty"]

        def with_novelty(logits, taken):
            if len(others) < len(scorers):
                table = jax.lax.stop_gradient(params["student"]["embed"])
                mean = novelty.pooled(table[batch.tokens], batch.acted)
                error = novelty.error(params["novelty"], jnp.stack([mean, 2 * mean, 3 * mean], 1))
                logits = logits | {
                    "novelty/response_only": jnp.repeat(error, batch.tokens.shape[1], 0)
                }
            return read(logits, taken)

        return super().score(params, batch, with_novelty, others)


def networks(tx) -> Role:
    params = novelty.init(jax.random.key(3), layers=3, width=4, hidden=8)
    fixed = {name: x for name, x in params.items() if name.startswith(novelty.FROZEN)}
    trained = {name: x for name, x in params.items() if name not in fixed}
    return Role(trained, fixed, tx.init(trained), 0.0)


def batch() -> Any:
    """Two updates of two groups, all of whose answers are right: only novelty tells them apart."""
    found = batch_of(random_groups(0, 4, 3), step_groups=4, size=3, minibatches=2)
    acted = np.asarray(found.kind == 2)
    place: Any = np.where(acted, np.cumsum(acted, -1) - 1, -1).astype(np.int32)
    ones: Any = np.ones(found.tokens.shape, np.int32)
    views = {"response_only": View(ones, ones, ones, place)}
    return dataclasses.replace(found, reward=np.ones_like(found.reward), views=views)


def take(tx, takes: int = 1):
    """Roles and metrics after each take of the same batch, the predictor trained by ``tx``."""
    algorithm, policy = make(length_tokens=5), Judged()
    step = step_of(
        algorithm, SGD, micro=6, size=3, minibatches=2, policy=policy, lesson_txs={"novelty": tx}
    )
    state = state_of(algorithm, SGD, policy=policy, others={"novelty": networks(tx)})
    seen = []
    for _ in range(takes):
        state, metrics = step(state, batch())
        seen.append(jax.device_get((state.roles, metrics)))
    return seen


@pytest.fixture(scope="module")
def learnt():
    return take(optax.adam(1e-2), takes=6)


def test_e2_the_targets_never_move_and_the_predictor_improves(learnt):
    first, last = networks(SGD), learnt[-1][0]["novelty"]
    assert_same(last.frozen, jax.device_get(first.frozen))
    for name, x in last.params.items():
        assert not np.array_equal(x, first.params[name]), name
    told = [metrics for _, metrics in learnt]
    assert told[-1]["novelty/loss/total"] < 0.7 * told[0]["novelty/loss/total"]
    assert told[-1]["loss/novelty_mean"] < told[0]["loss/novelty_mean"]
    assert told[0]["novelty/optim/updates"] == told[0]["optim/updates"] == 2


def test_rollouts_are_judged_before_the_predictor_learns_from_them(learnt):
    """The student of a take is the same bit for bit whether the predictor learns in it or not."""
    ((roles, _),) = take(optax.sgd(0.0))
    assert_same(learnt[0][0]["student"], roles["student"])
    moved = roles["student"].params["head"] - Judged().init(jax.random.key(0))["head"]
    assert np.abs(moved).max() > 1e-4  # all answers are right: it learns from novelty alone
