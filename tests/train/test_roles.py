"""Models beside the student inside a take: who moves, when, and by whose gradient."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.algorithms import sft
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.weights import token_mean
from jaxrl.pool.rollout import Failure
from jaxrl.train import state as states
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.state import scorer
from jaxrl.train.step import follow
from tests.train.test_step import ADAM, assert_close, assert_same
from tests.train.toy import Bigram, batch_of, group, mesh_of, random_groups, state_of, step_of

SGD = optax.sgd(0.1)  # small enough that rounding does not grow from update to update
RATE = 0.75  # of the old average
PLAIN = tuple((who, "plain") for who in ("student", "teacher", "self", "reference"))


def weight_of(batch: Batch):
    return token_mean(batch.minibatch[batch.rollout], batch.acted)


@dataclasses.dataclass(frozen=True)
class Graded:
    """The teacher learns what was rewarded and stays near the student, which gets no gradient."""

    scorers = (("teacher", "plain"), ("student", "plain"))

    def credit(self, batch, observed):
        reward = over_tokens(batch.reward, batch.rollout, batch.acted)
        return Credit(advantage=reward, weight=weight_of(batch))

    def read(self, logits, taken):
        return {
            "logp": taken_logp(logits["teacher/plain"], taken),
            "student": taken_logp(logits["student"], taken),
        }

    def loss(self, reading, batch, observed, credit):
        distance = (reading["logp"] - reading["student"]) ** 2
        return distance - credit.advantage * reading["logp"], {"distance": distance}


@dataclasses.dataclass(frozen=True)
class Drawn(sft.Algorithm):
    """The student is drawn to three others; ``lesson``: the teacher learns meanwhile."""

    lesson: bool

    scorers = PLAIN

    @property
    def lessons(self):
        return (("teacher", Graded()),) if self.lesson else ()

    def credit(self, batch, observed):
        return Credit(advantage=jnp.zeros(batch.tokens.shape), weight=weight_of(batch))

    def read(self, logits, taken):
        names = ("student", *("/".join(pair) for pair in PLAIN[1:]))
        return {name: taken_logp(logits[name], taken) for name in names}

    def loss(self, reading, batch, observed, credit):
        others = [reading["/".join(pair)] for pair in PLAIN[1:]]
        return jnp.stack([(reading["student"] - x) ** 2 for x in others]).sum(0), {}


def start(lesson: bool, mesh: Any = None) -> states.TrainState:
    algorithm = Drawn(lesson)
    params, other = (Bigram().init(jax.random.key(seed)) for seed in (0, 5))
    teacher = scorer(other, tx=ADAM if lesson else None, freeze=("^scale$",))
    others = {"self": scorer(params, ema_rate=RATE), "teacher": teacher}
    return state_of(algorithm, SGD, params=params, others=others, mesh=mesh)


def step(lesson: bool, **cuts: Any) -> Any:
    txs = {"teacher": ADAM} if lesson else None
    return step_of(Drawn(lesson), SGD, micro=2, size=2, lesson_txs=txs, **cuts)


@pytest.fixture(scope="module")
def twice_two():
    """Steps of four updates, two epochs of two, without and with a lesson, compiled once."""
    return {lesson: step(lesson, epochs=2, minibatches=2) for lesson in (False, True)}


@pytest.fixture(scope="module")
def single():
    """A step of one update from two groups."""
    return step(False)


GROUPS = random_groups(0, 4, 2)
BATCH = batch_of(GROUPS, step_groups=4, size=2, minibatches=2)
HALVES = [batch_of(GROUPS[i : i + 2], step_groups=2, size=2) for i in (0, 2)]


def test_the_average_follows_update_after_update(twice_two, single):
    """S1: after n updates it is the recurrence, whether they were n takes or one."""
    state, average = start(False), jax.device_get(start(False).roles["self"].params)
    for half in (*HALVES, *HALVES):
        state, _ = single(state, half)
        student = jax.device_get(state.roles["student"].params)
        average = {name: RATE * x + (1 - RATE) * student[name] for name, x in average.items()}
        assert_close(state.roles["self"].params, average, 1e-6)
    at_once, metrics = twice_two[False](start(False), BATCH)
    assert metrics["optim/updates"] == 4
    assert_close(at_once.roles["self"].params, average, 1e-5)
    assert_close(at_once.roles["student"].params, state.roles["student"].params, 1e-5)


def test_an_update_that_is_skipped_moves_no_average(twice_two, single):
    lost = [
        group(g.id, [dataclasses.replace(r, failure=Failure.INFRA) for r in g.rollouts])
        for g in GROUPS[2:]
    ]
    batch = batch_of([*GROUPS[:2], *lost], step_groups=4, size=2, minibatches=2)
    at_once, metrics = twice_two[False](start(False), batch)
    assert metrics["optim/updates"] == metrics["optim/skipped"] == 2
    state = start(False)
    for _ in range(2):
        state, _ = single(state, HALVES[0])
    assert_close(at_once.roles["self"].params, state.roles["self"].params, 1e-6)
    nothing = batch_of([], step_groups=4, size=2, minibatches=2)
    before = jax.device_get(start(False))
    after, _ = twice_two[False](start(False), nothing)
    assert_same(jax.device_get(after.roles), before.roles)


def test_a_lesson_is_not_seen_before_the_next_take(twice_two):
    """R6: the student of a take is the same bit for bit whatever its teacher learns, and the same
    as in the program in which it learns nothing."""
    before = jax.device_get(start(True))
    alone, told = twice_two[False](start(False), BATCH)
    taught, metrics = twice_two[True](start(True), BATCH)
    rewarded = dataclasses.replace(BATCH, reward=1 - BATCH.reward)
    otherwise = jax.device_get(twice_two[True](start(True), rewarded)[0])
    for who in ("student", "self", "reference"):
        assert_same(jax.device_get(taught.roles[who]), otherwise.roles[who])
        assert_close(jax.device_get(taught.roles[who]), jax.device_get(alone.roles[who]))
    assert_same(jax.device_get(alone.roles["teacher"].all), before.roles["teacher"].all)
    moved = jax.device_get(taught.roles["teacher"])
    assert set(moved.params) == {"embed", "head"}
    for name, x in moved.params.items():
        assert not np.array_equal(x, before.roles["teacher"].all[name])
        assert not np.array_equal(x, otherwise.roles["teacher"].params[name])
    assert_same(moved.frozen, before.roles["teacher"].frozen)
    mine = {name: x for name, x in metrics.items() if not name.startswith("teacher/")}
    assert_close(mine, told)
    second, told_second = twice_two[True](taught, BATCH)
    again, told_again = twice_two[False](alone, BATCH)
    assert told_second["loss/total"] != told_again["loss/total"]  # now it is seen
    del second, again


def test_a_role_that_no_lesson_moves_stays_bit_for_bit(twice_two):
    before, state = jax.device_get(start(True)), start(True)
    for _ in range(3):
        state, _ = twice_two[True](state, BATCH)
    assert_same(jax.device_get(state.roles["reference"]), before.roles["reference"])


def test_a_lesson_is_its_own_gradient_with_the_models_of_the_takes_start(twice_two):
    """Against plain gradients of the same updates, one after another, with its own moments."""
    state, after = start(True), jax.device_get(twice_two[True](start(True), BATCH)[0])
    lesson, policy = Graded(), Bigram()
    models = {who: role.all for who, role in state.roles.items()}
    teacher = state.roles["teacher"]
    params, moments = teacher.params, ADAM.init(teacher.params)

    def loss(params, batch):
        who = {**models, "teacher": {**teacher.frozen, **params}}
        reading = policy.score(who, batch, lesson.read, lesson.scorers)
        credit = lesson.credit(batch, {})
        return (lesson.loss(reading, batch, {}, credit)[0] * credit.weight).sum()

    slope_of = jax.jit(jax.grad(loss))
    for half in (*HALVES, *HALVES):
        slope = slope_of(params, jax.tree.map(jnp.asarray, half))
        changes, moments = ADAM.update(slope, moments, params)
        params = optax.apply_updates(params, changes)
    assert_close(after.roles["teacher"].params, params, 1e-4)
    assert_close(after.roles["teacher"].opt_state, moments, 1e-3)
    assert optax.tree.get(after.roles["teacher"].opt_state, "updates_made") == 4


def test_a_lessons_numbers_carry_its_name(twice_two):
    _, metrics = twice_two[True](start(True), BATCH)
    told = {name for name in metrics if name.startswith("teacher/")}
    assert {"teacher/loss/total", "teacher/optim/updates", "teacher/loss/distance_mean"} <= told
    assert metrics["teacher/optim/updates"] == 4 and metrics["teacher/optim/skipped"] == 0
    assert metrics["teacher/optim/grad_norm"] > 0
    assert metrics["teacher/loss/total"] != metrics["loss/total"]


def test_four_devices_teach_the_same(twice_two):
    wanted = jax.device_get(twice_two[True](start(True), BATCH)[0])
    mesh = mesh_of(fsdp=2, tensor=2)
    spread = step(True, epochs=2, minibatches=2, mesh=mesh)
    found = jax.device_get(spread(start(True, mesh), BATCH)[0])
    for who in ("student", "self", "teacher"):  # after four steep steps
        for name, x in wanted.roles[who].params.items():
            # Steep steps grow what rounding leaves: numbers here go up to 70.
            np.testing.assert_allclose(found.roles[who].params[name], x, rtol=1e-4, atol=1e-3)


def test_run_4_equals_run_2_then_run_2(twice_two, tmp_path):
    """Case 34, with an average, a pupil and its moments: bit for bit through the disk."""
    draws = [random_groups(seed, 4, 2) for seed in range(4)]
    takes = [batch_of(draw, step_groups=4, size=2, minibatches=2) for draw in draws]
    whole = start(True)
    for batch in takes:
        whole, _ = twice_two[True](whole, batch)
    state = start(True)
    for batch in takes[:2]:
        state, _ = twice_two[True](state, batch)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, state, {})
    where = states.shardings(state, Bigram(), mesh_of(data=1))
    form = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, where
    )
    restored = checkpoints.latest(lambda step: form)
    checkpoints.close()
    assert restored is not None
    assert restored.state.roles["self"].ema_rate == RATE
    state = restored.state
    for batch in takes[2:]:
        state, _ = twice_two[True](state, batch)
    assert_same(jax.device_get(state), jax.device_get(whole))
    assert int(optax.tree.get(state.roles["teacher"].opt_state, "updates_made")) == 16


@dataclasses.dataclass(frozen=True)
class Watched(sft.Algorithm):
    """Observes the average before each update, beside what it was at the take's start."""

    observers = (("self", "plain"),)
    refresh = "update"

    def observe(self, logits, taken):
        return {"average": taken_logp(logits["self/plain"], taken)}

    def loss(self, reading, batch, observed, credit):
        moved = jnp.abs(observed["average"] - observed["start/average"])
        return (reading["logp"] - observed["average"]) ** 2 - reading["logp"], {"moved": moved}


def test_an_average_that_is_observed_before_each_update_has_moved():
    algorithm = Watched()
    params = Bigram().init(jax.random.key(0))
    average = scorer(params, ema_rate=RATE)
    state = state_of(algorithm, SGD, params=params, others={"self": average})
    watching = step_of(algorithm, SGD, micro=4, size=2, minibatches=2)
    _, metrics = watching(state, BATCH)
    assert metrics["loss/moved_max"] > 1e-3 and metrics["optim/updates"] == 2


@pytest.mark.parametrize(
    ("lessons", "words"),
    [
        ([("teacher", Graded())], r"trains \['teacher'\]; allowed: roles with an optimizer"),
        ([("value", Graded())] * 2, r"lessons for \['value', 'value'\]; allowed: one a role"),
        ([("student", Graded())], r"lessons for \['student'\]; .*none for the student"),
    ],
)
def test_lessons_that_cannot_be_given(lessons, words):
    algorithm = dataclasses.make_dataclass("Bad", [], bases=(sft.Algorithm,), frozen=True)()
    object.__setattr__(algorithm, "lessons", tuple(lessons))
    with pytest.raises(ValueError, match=words):
        step_of(algorithm, SGD, micro=2, size=2, lesson_txs={"value": SGD, "student": SGD})


def test_roles_are_copies_and_an_average_starts_as_the_student():
    state = start(True)
    assert_same(state.roles["self"].params, state.roles["student"].params)
    for leaf in jax.tree.leaves(state.roles["student"]):
        leaf.delete()  # as donation does
    for who in ("self", "reference", "teacher"):
        assert all(bool((x == x).all()) for x in state.roles[who].all.values())
    params = Bigram().init(jax.random.key(0))
    role = scorer(params, tx=ADAM)
    jax.tree.map(lambda x: x.delete(), role)
    assert all(bool((x == x).all()) for x in params.values())


def test_an_average_of_what_stands_still_is_exact():
    draw = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
    params = {"embed": jnp.asarray(draw), "head": jnp.asarray(draw.T)}
    student, average = scorer(params), scorer(params, ema_rate=0.99)
    moved = follow(average, student, jnp.asarray(True))
    assert_same(moved.params, params)
