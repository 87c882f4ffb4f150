"""SELF against its oracle. S1 ... S6: its own checks, see tests/kernels/test_hindsight.py too."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrl.algorithms.self_feedback import Algorithm
from jaxrl.batch import ACTION, FEEDBACK, PAD, PROMPT, View
from jaxrl.train.state import scorer
from tests.algorithms.batches import batch_of, credited, shown
from tests.algorithms.test_distilled_steps import Swayed
from tests.papers import self_feedback as paper
from tests.train import toy

VOCAB = 5
NAMES = ("student", "self/with_feedback", "student/as_environment")
# Rows are rollouts; a turn is (action tokens, feedback tokens). The last row is not valid.
TURNS = [[(2, 3), (1, 2), (3, 1)], [(3, 2)], [(2, 0), (1, 2)], [(1, 0)], [(2, 2)], [(2, 2), (1, 1)]]
MINIBATCH = [0, 0, 0, 0, 1, 1]
OVERFLOWN = 4  # the row whose teacher's context does not fit


def make(feedback_weight=0.2, distillation_weight=1.0):
    return Algorithm(feedback_weight, distillation_weight)


def answered(turns=TURNS, overflown=OVERFLOWN, valid=(1, 1, 1, 1, 1, 0)):
    """A batch with the feedback tokens and the two views, whose contexts hold all or nothing."""
    rows = len(turns)
    tokens = [sum(acted + replied for acted, replied in row) for row in turns]
    batch = batch_of(tokens, np.zeros(rows), np.arange(rows), valid=valid[:rows])
    kind, step = np.array(batch.kind), np.full(batch.kind.shape, -1)
    for row, made in enumerate(turns):
        kinds = [[ACTION] * acted + [FEEDBACK] * replied for acted, replied in made]
        at = np.concatenate([[number] * len(one) for number, one in enumerate(kinds)])
        kind[row, 2 : 2 + len(at)] = np.concatenate(kinds)
        step[row, 2 : 2 + len(at)] = at
    place = np.where(kind == PAD, -1, np.arange(kind.shape[1]))
    held = np.where(np.arange(rows)[:, None] == overflown, -1, place)
    frame: Any = (batch.tokens, batch.position, batch.segment)
    views = {
        name: View(*[*frame, index])
        for name, index in (("with_feedback", held), ("as_environment", place))
    }
    return dataclasses.replace(
        batch,
        kind=kind,
        step=step,
        minibatch=np.array(MINIBATCH[:rows]),
        views=views,
    )


def some_logits(batch, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(*batch.kind.shape, VOCAB)).astype(dtype) for name in NAMES}


@functools.partial(jax.jit, static_argnums=0)
def update(algorithm, batch, logits):
    """(loss, gradient by everybody's logits): what step.py makes of one take."""

    def objective(logits):
        flat = {name: x.reshape(-1, VOCAB) for name, x in logits.items()}
        found = algorithm.read(flat, batch.tokens.reshape(-1))
        reading = {name: x.reshape(batch.tokens.shape) for name, x in found.items()}
        credit = algorithm.credit(batch, {})
        token_loss, diagnostics = algorithm.loss(reading, batch, {}, credit)
        return (token_loss * credit.weight).sum(), diagnostics

    (value, _), slopes = jax.value_and_grad(objective, has_aux=True)(logits)
    return value, slopes


def weights_of(batch):
    return np.asarray(credited(make(), batch, {}).weight)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def trajectories(batch, logits, minibatch):
    """The oracle's records, and where in the batch each turn's tokens lie."""
    logp = {
        name: [[paper.log_softmax(p) for p in row] for row in np.asarray(x, float).tolist()]
        for name, x in logits.items()
    }
    found, places = [], []
    for row in np.flatnonzero((np.array(batch.minibatch) == minibatch) & np.array(batch.valid)):
        turns, at = [], []
        for turn in sorted(set(batch.step[row][batch.step[row] >= 0])):
            here = batch.step[row] == turn
            acted = np.flatnonzero(here & (batch.kind[row] == ACTION))
            replied = np.flatnonzero(here & (batch.kind[row] == FEEDBACK))
            taught = batch.views["with_feedback"].index[row][acted].min() >= 0
            turns.append(
                {
                    "student": [logits["student"][row, t].tolist() for t in acted],
                    "teacher": [logits["self/with_feedback"][row, t].tolist() for t in acted]
                    if taught
                    else None,
                    "feedback": [
                        logp["student/as_environment"][row][t][batch.tokens[row, t]]
                        for t in replied
                    ],
                }
            )
            at.append((row, acted, replied))
        found.append(turns)
        places.append(at)
    return found, places


def expected(batch, logits, feedback_weight, distillation_weight):
    """Loss of both updates, and its gradient by the student's plain logits."""
    total, slope = 0.0, np.zeros(logits["student"].shape)
    for minibatch in (0, 1):
        records, places = trajectories(batch, logits, minibatch)
        total += paper.loss(records, feedback_weight, distillation_weight)
        taught = [[paper.distillation(turn) is not None for turn in one] for one in records]
        for turns, at, has in zip(records, places, taught, strict=True):
            for turn, (row, acted, _), counts in zip(turns, at, has, strict=True):
                share = sum(map(any, taught)) * sum(has) * len(acted)
                for j, token in enumerate(acted if counts else ()):
                    gradient = paper.slope(turn["student"][j], turn["teacher"][j])
                    slope[row, token] = distillation_weight * np.array(gradient) / share
    return total, slope


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-6), (np.float32, 1e-5)])
@pytest.mark.parametrize("weights", [(0.2, 1.0), (0.2, 0.0), (0.0, 1.0)])
def test_it_equals_the_oracle(weights, dtype, rtol):
    batch = answered()
    logits = some_logits(batch, dtype=dtype)
    value, slopes = update(make(*weights), batch, logits)
    total, slope = expected(batch, logits, *weights)
    np.testing.assert_allclose(value, total, rtol=rtol)
    np.testing.assert_allclose(slopes["student"], slope, rtol=rtol, atol=1e-8)
    assert total > 0.01


def test_the_oracles_slope_is_that_of_its_loss():
    batch = answered(TURNS[1:3])
    logits = some_logits(batch)
    _, slope = expected(batch, logits, 0.2, 1.0)
    for at in ((0, 2, 0), (0, 4, 3), (1, 4, 2)):
        ends = []
        for move in (1e-6, -1e-6):
            moved = {name: x.copy() for name, x in logits.items()}
            moved["student"][at] += move
            ends.append(expected(batch, moved, 0.2, 1.0)[0])
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, slope[at], rtol=1e-6, atol=1e-9)


def test_s1_no_gradient_reaches_the_moving_average():
    batch = answered()
    _, slopes = update(make(), batch, some_logits(batch))
    np.testing.assert_array_equal(slopes["self/with_feedback"], 0)


@pytest.mark.parametrize("absent", ["student/as_environment", "self/with_feedback"])
def test_s2_a_weight_of_zero_leaves_its_term_out_bit_for_bit(absent):
    batch = answered()
    logits = some_logits(batch)
    algorithm = make(0.0, 1.0) if absent == "student/as_environment" else make(0.2, 0.0)
    value, slopes = update(algorithm, batch, logits)
    other, other_slopes = update(algorithm, batch, logits | {absent: some_logits(batch, 9)[absent]})
    assert value == other
    np.testing.assert_array_equal(slopes["student"], other_slopes["student"])
    names = {who if view == "plain" else f"{who}/{view}" for who, view in algorithm.scorers}
    assert absent not in names and algorithm.scorers[0] == ("student", "plain")
    assert len(make().scorers) == 3


def test_s3_repeating_a_trajectorys_turns_does_not_raise_its_weight():
    once = answered([[(2, 2)], [(3, 2)]])
    thrice = answered([[(2, 2)] * 3, [(3, 2)]])
    for batch in (once, thrice):
        weight = weights_of(batch)
        for kind in (ACTION, FEEDBACK):
            of_row = np.where(batch.kind == kind, weight, 0).sum(-1)
            np.testing.assert_allclose(of_row, [1 / 2, 1 / 2], rtol=1e-6)


def test_s4_actions_are_distilled_and_feedback_is_predicted_and_nothing_else():
    batch = answered()
    _, slopes = update(make(), batch, some_logits(batch))
    pulled = np.abs(slopes["student"]).sum(-1) > 0
    surprised = np.abs(slopes["student/as_environment"]).sum(-1) > 0
    assert pulled.any() and not pulled[batch.kind != ACTION].any()
    assert surprised.any() and not surprised[batch.kind != FEEDBACK].any()
    assert (batch.kind[:, :2] == PROMPT).all()
    np.testing.assert_array_equal(weights_of(batch)[batch.kind < 2], 0)


def test_s5_a_teacher_that_sees_no_more_teaches_nothing():
    batch = answered()
    logits = some_logits(batch)
    logits["self/with_feedback"] = logits["student"] + 2.0  # the same distribution
    value, slopes = update(make(0.0, 1.0), batch, logits)
    np.testing.assert_allclose(value, 0, atol=1e-12)
    np.testing.assert_allclose(slopes["student"], 0, atol=1e-12)
    silent = answered([[(2, 0)], [(3, 0)]])  # and where nothing was answered there is no term
    value, slopes = update(make(), silent, some_logits(silent))
    assert value == 0
    assert all((x == 0).all() for x in slopes.values())


def test_a_turn_without_feedback_is_in_no_mean():
    batch = answered([[(3, 1)], [(2, 0), (1, 2)]])
    weight = weights_of(batch)
    np.testing.assert_array_equal(weight[1, 2:4], 0)
    np.testing.assert_allclose(weight[1, 4:7], [1 / 2, 1 / 4, 1 / 4], rtol=1e-6)


def test_a_teacher_whose_context_does_not_fit_leaves_the_likelihood():
    batch = answered([[(3, 2)], [(2, 1)]], overflown=0)
    weight = weights_of(batch)
    np.testing.assert_allclose(weight[0, 2:7], [0, 0, 0, 1 / 4, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(weight[1, 2:5], [1 / 2, 1 / 2, 1 / 2], rtol=1e-6)  # alone


def test_no_reward_is_looked_at():
    batch, algorithm = answered(), make()
    logits = some_logits(batch)
    rewarded = dataclasses.replace(batch, reward=np.random.default_rng(1).normal(size=6))
    a, b = (update(algorithm, x, logits) for x in (batch, rewarded))
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1]["student"], b[1]["student"])
    assert algorithm.keep(np.zeros(3), {}) and algorithm.needs == ()


def test_case_10_a_batch_without_valid_rollouts_is_harmless():
    batch = answered([[(2, 1)], [(1, 1)]], valid=(0, 0))
    value, slopes = update(make(), batch, some_logits(batch))
    assert value == 0 and all((x == 0).all() for x in slopes.values())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((-0.1, 1.0), "algorithm.feedback_weight=-0.1"),
        ((0.2, float("inf")), "algorithm.distillation_weight=inf"),
        ((0.0, 0.0), "allowed: one > 0"),
    ],
)
def test_a_bad_field_is_named(weights, message):
    with pytest.raises(ValueError, match=message):
        make(*weights)


def answered_groups(seed):
    """Two groups of four rollouts whose last token is what the environment said."""

    def told(rollout):
        kind = rollout.kind.copy()
        kind[-1] = FEEDBACK
        return dataclasses.replace(rollout, kind=kind)

    groups = toy.random_groups(seed, groups=2, size=4)
    return [
        dataclasses.replace(group, rollouts=tuple(map(told, group.rollouts))) for group in groups
    ]


def take(policy, algorithm, takes):
    """(student, its average) before the first take and after each."""
    sgd = optax.sgd(0.5)
    average = scorer(policy.init(jax.random.key(0)), ema_rate=0.75)
    state = toy.state_of(algorithm, sgd, policy=policy, others={"self": average})
    step = toy.step_of(algorithm, sgd, micro=8, size=4, policy=policy)
    found = []
    for number in range(takes + 1):
        found.append([jax.device_get(state.roles[who].all) for who in ("student", "self")])
        batch = toy.batch_of(answered_groups(number), step_groups=2, size=4)
        views = {view: np.ones(8) for view in ("with_feedback", "as_environment")}
        if number < takes:
            state, metrics = step(state, shown(batch, **views))
            assert metrics["optim/updates"] == 1
    return found


def test_s5_a_whole_step_without_new_words_leaves_the_student_alone():
    with jax.enable_x64(False):
        (before, _), (after, average) = take(toy.Bigram(), make(0.0, 1.0), takes=1)
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x)
        np.testing.assert_array_equal(average[name], x)


def test_s1_a_whole_step_moves_the_average_by_the_student_and_by_nothing_else():
    with jax.enable_x64(False):
        found = take(Swayed(), make(), takes=2)
    average = found[0][1]
    for student, now in found[1:]:
        average = {name: 0.75 * x + 0.25 * student[name] for name, x in average.items()}
        for name, x in now.items():
            np.testing.assert_allclose(x, average[name], rtol=1e-6, atol=1e-7)
    assert np.abs(found[2][0]["head"] - found[0][0]["head"]).max() > 1e-3
