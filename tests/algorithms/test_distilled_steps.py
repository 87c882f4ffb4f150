"""Whole updates of the methods that distil token by token: who moves, and who must not."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.train.state import scorer
from tests.algorithms.batches import shown
from tests.algorithms.test_contrast import PLAIN as CONTRAST
from tests.algorithms.test_opd import FULL, SAMPLED, TRUST
from tests.train import toy

ADAM = optax.adam(0.1)
RATE = 0.9  # of the moving average


class Swayed(toy.Bigram):
    """A model whose head every context besides the plain one shifts, in its own way."""

    def score(self, params, batch, read, scorers):
        heads, names = {}, {}
        for who, view in scorers:
            head = params[who]["head"]
            if view != "plain":
                key = jax.random.key(zlib.crc32(view.encode()))
                head = head + jax.random.normal(key, head.shape)
            heads[f"{who} {view}"] = params[who] | {"head": head}
            name = "student" if (who, view) == ("student", "plain") else f"{who}/{view}"
            names[f"{who} {view}/plain"] = name

        def seen(logits, taken):
            return read({names[key]: x for key, x in logits.items()}, taken)

        return super().score(heads, batch, seen, tuple((who, "plain") for who in heads))


@functools.cache
def step_of(algorithm):
    """Compiled once for the tests of one algorithm."""
    return toy.step_of(algorithm, ADAM, micro=8, size=4, policy=Swayed())


def take(algorithm, others, *, takes=2):
    """(states as numpy, metrics) before and after each take; one update a take."""
    state = toy.state_of(algorithm, ADAM, policy=Swayed(), others=others)
    step = step_of(algorithm)
    found = [snapshot(state)]
    metrics = {}
    for number in range(takes):
        groups = toy.random_groups(number, groups=2, size=4)
        batch = toy.batch_of(groups, step_groups=2, size=4)
        views = ("judged_right", "judged_wrong", "with_solution", "with_wrong_solution")
        state, metrics = step(state, shown(batch, **dict.fromkeys(views, np.ones(8))))
        found.append(snapshot(state))
    return found, metrics


def snapshot(state):
    return {who: jax.tree.map(np.asarray, role.all) for who, role in state.roles.items()}


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in b)


def student():
    return toy.Bigram().init(jax.random.key(0))  # as toy.state_of has it


@pytest.mark.parametrize(
    "change", [SAMPLED, FULL | {"divergence": "jsd", "alpha": 0.3}], ids=["sampled", "full"]
)
def test_a_student_that_is_its_teacher_stays_bit_for_bit(change):
    states, metrics = take(load("opd", **change), {"teacher": scorer(student())})
    assert metrics["optim/updates"] == 1  # a whole step of Adam, of a gradient that is exactly 0
    assert same(states[0]["student"], states[2]["student"])


def test_another_teacher_moves_the_student_and_stays():
    other = toy.Bigram().init(jax.random.key(1))
    algorithm = load("cal_opd", width=0.3, trust=TRUST)
    states, metrics = take(algorithm, {"teacher": scorer(other)})
    assert not same(states[0]["student"], states[1]["student"])
    assert same(states[0]["teacher"], states[2]["teacher"])
    assert 0 < metrics["loss/active_mean"] < 1
    assert metrics["loss/kept_mean"] < metrics["loss/discrepancy_mean"]


def test_without_an_active_token_cal_opd_skips_the_update():
    algorithm = load("cal_opd", width=0.3, trust=TRUST)
    states, metrics = take(algorithm, {"teacher": scorer(student())}, takes=1)
    assert metrics["batch/empty"] == metrics["optim/skipped"] == 1
    assert same(states[0]["student"], states[1]["student"])


def test_k5_a_frozen_self_stays_bit_for_bit():
    states, metrics = take(load("contrast", **CONTRAST | {"kl_weight": 0.1}), {})
    assert metrics["optim/updates"] == 1
    assert not same(states[0]["student"], states[2]["student"])
    for state in states:
        assert same(state["reference"], states[0]["student"])


def test_k5_a_moving_self_is_the_average_of_the_students():
    algorithm = load("contrast", **CONTRAST | {"teacher": "self"})
    average = scorer(student(), ema_rate=RATE)
    states, _ = take(algorithm, {"self": average})
    for before, after in zip(states, states[1:], strict=False):
        for name, x in after["self"].items():
            expected = RATE * before["self"][name] + (1 - RATE) * after["student"][name]
            np.testing.assert_allclose(x, expected, rtol=1e-6)
    gap = [np.abs(x - states[0]["self"][name]).max() for name, x in states[2]["self"].items()]
    assert max(gap) > 1e-3


def test_a_context_sways_the_toy():
    params, logits = student(), []
    for view in ("plain", "judged_right", "with_solution"):

        def read(seen, taken):
            logits.extend(seen.values())
            return {"x": jnp.zeros(taken.shape)}

        batch = toy.batch_of(toy.random_groups(0, groups=1, size=4), step_groups=1, size=4)
        Swayed().score({"reference": params}, batch, read, (("reference", view),))
    assert np.abs(logits[0] - logits[1]).max() > 0.1 < np.abs(logits[1] - logits[2]).max()
