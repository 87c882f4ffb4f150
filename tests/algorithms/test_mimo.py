"""MiMo-V2.6's credit against its oracle. Its redistribution's own checks: tests/kernels too."""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.train.collate import collate
from tests.algorithms.batches import batch_of, credited, logps, narrow, update
from tests.papers import mimo as paper
from tests.train import toy

BAND = {"positive_low": 0.2, "positive_high": 5.0, "negative_low": 0.2, "negative_high": 5.0}
LENGTH = {
    "penalty": 0.0,
    "quantile": 0.3,
    "pass_rate": 0.5,
    "slack": 0.2,
    "full": 2.0,
    "power": 1.5,
}
SEGMENTS = {"use": False, "harsher": 2.0, "most": 2.0, "least": 0.5}
PLAIN = {
    "grading": "redistribution",
    "least_spread": 0.05,
    "cap": 1.5,
    "band": BAND,
    "length": LENGTH,
    "segments": SEGMENTS,
    "dynamic_sampling": True,
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return load("mimo", **PLAIN | change)


def graded(batch, **facts):
    """The batch with binary rewards and a grader's facts, drawn where they are not given."""
    rng = np.random.default_rng(0)
    n = batch.valid.shape[0]
    reward = facts.pop("reward", None)
    drawn = {
        "grade": rng.choice([0.2, 0.5, 0.85, 1.0], n),
        "exploit": rng.random(n) < 0.15,
        "graded": rng.random(n) < 0.9,
        "token_flagged": rng.random(batch.tokens.shape) < 0.3,
    }
    kinds = {"grade": float, "exploit": int, "graded": int, "token_flagged": int}
    known = {name: np.asarray(facts.get(name, x), kinds[name]) for name, x in drawn.items()}
    reward = (rng.random(n) < 0.7) if reward is None else reward
    return dataclasses.replace(batch, reward=np.asarray(reward, float), facts=known)


def one_group(reward, lengths=None, **facts):
    """A single prompt's rollouts; honest and graded unless told otherwise. Rows that do not count
    fill it up to one size for all tests, so that they share what is compiled.
    """
    spare = 8 - len(reward)
    known = {"grade": 1.0, "exploit": 0, "graded": 1, "token_flagged": np.zeros(10)}
    for name, fill in known.items():
        given = facts.get(name, [fill] * len(reward))
        known[name] = np.asarray([*given, *[fill] * spare])
    lengths = [*(lengths or [2] * len(reward)), *[1] * spare]
    reward = [*reward, *[1] * spare]
    valid = np.arange(8) < 8 - spare
    batch = batch_of([*lengths, 7], [*reward, 1], [4] * 9, valid=[*valid, False])
    known = {name: np.concatenate([x, x[-1:]]) for name, x in known.items()}
    return graded(batch, reward=[*reward, 1], **known)


def credit_of(batch, **change):
    return credited(make(**change), batch, {})


def advantage_of(batch, **change):
    """Of each valid rollout, at its first action token."""
    return np.asarray(credit_of(batch, **change).advantage)[batch.valid, 2]


def mixed():
    """Three prompts, two updates: a usable grading, one that lacks a grade, a lone pass; an exploit
    and a failed attempt among them.
    """
    batch = batch_of(
        lengths=[3, 1, 4, 2, 2, 4, 0, 4, 1, 3, 2, 4],
        reward=[1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0],
        group=[40] * 6 + [7] * 3 + [8] * 3,
        valid=[1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1],
        minibatch=[0] * 6 + [1] * 6,
    )
    return graded(
        batch,
        reward=batch.reward,
        grade=[0.5, 1, 0.85, 1, 0.2, 0.9, 0.3, 1, 0.6, 0.4, 1, 1],
        exploit=[0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        graded=[1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1],
    )


LONG = LENGTH | {"penalty": 0.3, "pass_rate": 0.3}
CHANGES = {
    "redistribution": {},
    "product, length": {"grading": "product", "length": LONG},
    "low cap, length, bounds": {
        "cap": 1.0,
        "length": LONG,
        "band": BAND | {"positive_high": 1.5, "negative_low": 0.7},
    },
    "segments": {"segments": SEGMENTS | {"use": True}},
}


@pytest.mark.parametrize(
    ("change", "dtype"),
    [(name, np.float64) for name in CHANGES]
    + [("product, length", np.float32), ("low cap, length, bounds", np.float32)],
)
def test_it_equals_the_oracle(change, dtype):
    change = CHANGES[change]
    parameters, tolerance = PLAIN | change, 1e-6 if dtype is np.float64 else 1e-5
    batch = mixed()
    logp = logps(batch, 1)
    acted = np.asarray(batch.acted)
    facts = {name: fact.tolist() for name, fact in batch.facts.items()}
    group, valid = batch.group.tolist(), batch.valid.tolist()
    advantage = paper.advantages(
        batch.reward.tolist(),
        acted.sum(-1).tolist(),
        facts,
        group,
        valid,
        acted.tolist(),
        parameters,
    )
    total, slopes = 0.0, np.zeros(logp.shape)
    for number in (0, 1):
        part = (acted & (batch.minibatch == number)[:, None]).tolist()
        arrays = (logp.tolist(), batch.sampler_logp.tolist(), advantage, group, part)
        value, slope = paper.gradient(*arrays, parameters["band"])
        total, slopes = total + value, slopes + np.asarray(slope)
    value, slope, told = update(make(**change), *narrow((batch, logp, {}), dtype), micro=2)
    np.testing.assert_allclose(value, total, rtol=tolerance)
    np.testing.assert_allclose(slope, slopes, rtol=tolerance, atol=tolerance / 10)
    dropped = told["dropped"][acted]
    assert 0 < dropped.sum() < dropped.size and np.abs(slopes).max() > 1e-3
    assert len(set(np.round(np.asarray(advantage)[acted], 9))) > 6  # not the verdicts' alone


def test_the_unit_vector_of_the_specification():
    batch = one_group([1, 1, 0], grade=[1, 0.5, 1])
    np.testing.assert_allclose(advantage_of(batch), [4 / 9, 2 / 9, -2 / 3], rtol=1e-6)


@pytest.mark.parametrize("grading", ["product", "redistribution"])
def test_an_exploit_is_a_failure_before_any_statistic(grading):
    cheat = one_group([1, 1, 1, 0], grade=[1, 0.5, 1, 1], exploit=[0, 0, 1, 0])
    failed = one_group([1, 1, 0, 0], grade=[1, 0.5, 1, 1])
    got = advantage_of(cheat, grading=grading)
    np.testing.assert_array_equal(got, advantage_of(failed, grading=grading))
    assert got[2] == got[3] < 0


def test_no_grade_no_change():
    lacking = one_group([1, 1, 0], grade=[1, 0.5, 1], graded=[1, 0, 1])
    np.testing.assert_allclose(advantage_of(lacking), [1 / 3, 1 / 3, -2 / 3], rtol=1e-6)


@pytest.mark.parametrize(("cap", "penalty"), [(1.0, 0.9), (1.5, 0.0), (1e9, 0.9)])
def test_no_advantage_changes_sign_whatever_grades_lengths_and_caps(cap, penalty):
    rng = np.random.default_rng(0)
    groups, size = 12, 8
    reward = rng.random((groups, size)) < 0.7
    reward[:, 0], reward[:, 1] = True, False
    lengths = rng.integers(1, 9, groups * size)
    batch = batch_of(lengths, reward.ravel(), np.arange(groups).repeat(size))
    grade = rng.choice([0.05, 0.5, 1.0], groups * size)
    honest = {"exploit": [0] * groups * size, "graded": [1] * groups * size}
    batch = graded(batch, reward=reward.ravel(), grade=grade, **honest)
    length = LENGTH | {"penalty": penalty, "pass_rate": 0.2}
    got = advantage_of(batch, cap=cap, length=length).reshape(groups, size)
    np.testing.assert_array_equal(np.sign(got), 2.0 * reward - 1)
    np.testing.assert_allclose(got.sum(-1), 0, atol=1e-12)


def test_a_failed_rollouts_reward_stays_0_whatever_its_grade():
    a = one_group([1, 1, 0], grade=[1, 0.5, 1.0])
    b = one_group([1, 1, 0], grade=[1, 0.5, 0.1], graded=[1, 1, 0])
    for grading in ("product", "redistribution"):
        np.testing.assert_array_equal(
            advantage_of(a, grading=grading), advantage_of(b, grading=grading)
        )


def test_a_product_with_little_spread_counts_passes_alone():
    batch = one_group([1, 1, 0], grade=[0.93, 0.92, 1])
    np.testing.assert_allclose(
        advantage_of(batch, grading="product"), [1 / 3, 1 / 3, -2 / 3], rtol=1e-6
    )


def test_the_length_penalty_is_the_reports_for_a_full_mark():
    # passes of 2, 2, 8 tokens: l* = 2 (place .6), excess 3 - .2 over 1.8 is 1, so R = 1, 1, .8, 0
    batch = one_group([1, 1, 1, 0], [2, 2, 8, 8])
    got = advantage_of(batch, grading="product", length=LENGTH | {"penalty": 0.2})
    np.testing.assert_allclose(got, np.array([1, 1, 0.8, 0]) - 0.7, rtol=1e-6)


@pytest.mark.parametrize("grade", [1.0, 0.93])
def test_a_small_length_penalty_is_not_taken_for_the_graders_noise(grade):
    # one pass of eight loses .1: a std of .033, below the floor of the rubrics' product
    batch = one_group([1, 1, 1, 1, 1, 1, 1, 0], [2] * 6 + [8, 8], grade=[grade] * 8)
    got = advantage_of(batch, grading="product", length=LENGTH | {"penalty": 0.1})
    reward = np.array([1, 1, 1, 1, 1, 1, 0.9, 0])
    np.testing.assert_allclose(got, reward - reward.mean(), rtol=1e-6)


def test_each_prompt_has_the_same_weight_whatever_its_lengths():
    weight = np.asarray(credit_of(mixed()).weight).sum(-1)  # of tokens 10; 5, 9
    np.testing.assert_allclose(
        [weight[:6].sum(), weight[6:9].sum(), weight[9:].sum()], [1, 0.5, 0.5], rtol=1e-12
    )


def test_inside_of_the_band_the_slope_is_minus_r_a_and_dropped_tokens_stay_counted():
    batch = one_group([1.0, 0.0])
    ratio = np.array([[0.1, 2.0], [2.0, 6.0]])  # the first and the last are outside
    logp = np.array(batch.sampler_logp)
    logp[:2, 2:4] += np.log(ratio)
    _, slope, told = update(make(), batch, logp, {}, micro=9)
    # A = 1/2, -1/2; weight 1/4 for each of four tokens, dropped ones included
    np.testing.assert_allclose(slope[:2, 2:4], [[0, -0.25], [0.25, 0]], rtol=1e-6)
    np.testing.assert_array_equal(told["dropped"][:2, 2:4], [[1, 0], [0, 1]])


@pytest.mark.parametrize("name", ["positive_low", "positive_high"])
def test_bounds_for_good_rollouts_do_not_touch_bad_ones(name):
    batch = mixed()
    logp = logps(batch, 1)
    bad = np.asarray(credit_of(batch).advantage) < 0
    a = update(make(), batch, logp, {}, micro=12)[1]
    b = update(make(band=BAND | {name: 1.0}), batch, logp, {}, micro=12)[1]
    np.testing.assert_array_equal(a[bad], b[bad])
    assert (a[~bad] != b[~bad]).any()


def test_segments_conserve_what_both_signs_weigh():
    flagged = np.zeros((4, 10))
    flagged[:, 2] = 1  # the first action token of each
    batch = one_group([1, 1, 0, 0], [4, 5, 4, 6], token_flagged=flagged)
    plain = credit_of(batch)
    scaled = credit_of(batch, segments=SEGMENTS | {"use": True})
    np.testing.assert_array_equal(np.sign(scaled.advantage[2:]), np.sign(plain.advantage[2:]))
    np.testing.assert_array_equal(scaled.advantage[:2, 2], 0)
    assert (scaled.advantage[:2, 3] > plain.advantage[:2, 3]).all()
    for rows in (slice(0, 2), slice(2, 4)):
        a, b = ((c.advantage * c.weight)[rows].sum() for c in (plain, scaled))
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_facts_are_asked_for_as_they_are_used():
    assert make().needs == ("grade", "exploit", "graded")
    assert make(segments=SEGMENTS | {"use": True}).needs[-1] == "token_flagged"


def told(**facts):
    known = {"exploit": [0, 0, 0], "grade": [1.0, 1.0, 1.0], "graded": [1, 1, 1]} | facts
    return np.asarray([1.0, 1.0, 1.0]), known


@pytest.mark.parametrize("grading", ["product", "redistribution"])
def test_dynamic_sampling_refuses_groups_without_an_advantage(grading):
    algorithm = make(grading=grading)
    rewards, facts = told()
    assert not algorithm.keep(rewards, facts) and not algorithm.keep(0 * rewards, facts)
    assert algorithm.keep(np.asarray([1.0, 0.0, 1.0]), facts)
    assert algorithm.keep(*told(exploit=[0, 1, 0]))  # one of the passes is none
    # among passes alone a product of different qualities tells something, a redistribution does not
    apart = told(grade=[1.0, 0.5, 0.2])
    assert algorithm.keep(*apart) == (grading == "product")
    lacking = told(grade=[1.0, 0.5, 0.2], graded=[1, 0, 1])
    assert not algorithm.keep(*lacking)
    assert make(grading=grading, dynamic_sampling=False).keep(rewards, facts)


@pytest.mark.parametrize("grading", ["product", "redistribution"])
def test_a_rollout_without_a_reward_is_no_failure_that_keeps_a_group(grading):
    rewards, facts = np.asarray([1.0, 1.0, np.nan]), told()[1]
    assert not make(grading=grading).keep(rewards, facts)  # all that count pass: no advantage
    batch = dataclasses.replace(one_group([1, 1, 1]), valid=np.arange(9) < 2)
    assert not np.asarray(credit_of(batch, grading=grading).advantage).any()
    mixed = np.asarray([1.0, 0.0, np.nan])
    assert make(grading=grading).keep(mixed, told(exploit=[0, 0, None], grade=[1, 1, None])[1])


def test_one_take_through_the_whole_step_moves_towards_the_better_pass():
    facts = [
        {"grade": f, "exploit": e, "graded": 1}
        for f, e in ((1.0, 0), (0.25, 0), (1.0, 1), (1.0, 0))
    ]
    rollouts = [toy.rollout(9, i, [1, 2], [3 + i], float(i < 3), facts=facts[i]) for i in range(4)]
    algorithm, tx = make(), optax.sgd(1.0)
    assert algorithm.keep(np.asarray([1.0, 1, 1, 0]), {k: [f[k] for f in facts] for k in facts[0]})
    batch, _ = collate(
        [toy.group(9, rollouts)],
        token_buckets=(8,),
        groups_per_step=1,
        rollouts_per_group=4,
        minibatches=1,
        needs=algorithm.needs,
        algorithm="mimo",
    )
    with jax.enable_x64(False):  # as a run does
        state = toy.state_of(algorithm, tx)
        before = jax.device_get(state.roles["student"].all)
        after, metrics = toy.step_of(algorithm, tx, micro=2, size=4)(state, batch)
    assert float(metrics["optim/updates"]) == 1
    # passes 1 and .25: A = 1/2, lam 1.6 held at 1.5, see tests/kernels; the exploit is a failure
    advantage = np.array([0.765625, 0.203125, -0.484375, -0.484375])
    x = before["embed"][2] * before["scale"]
    p = np.exp(x @ before["head"]) / np.exp(x @ before["head"]).sum()
    ratio = p[3:7] * toy.VOCAB  # the sampler was uniform
    kept = (ratio >= 0.2) & (ratio <= 5)
    assert 0 < kept.sum() < 4
    advantage = kept * advantage
    pull = np.zeros(toy.VOCAB)
    pull[3:7] = ratio * advantage / 4
    move = np.outer(x, pull - p * pull.sum())  # along r A grad log p, in the head
    got = jax.device_get(after.roles["student"].all)["head"] - before["head"]
    np.testing.assert_allclose(got, move, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grading": "sum"}, "algorithm.grading='sum'"),
        ({"cap": 0.9}, "algorithm.cap=0.9"),
        ({"least_spread": -0.1}, "algorithm.least_spread=-0.1"),
        ({"band": BAND | {"positive_low": 1.1}}, "band.positive_low=1.1"),
        ({"band": BAND | {"negative_high": 0.9}}, "band.negative_high=0.9"),
        ({"length": LENGTH | {"penalty": 1.0}}, "length.penalty=1.0"),
        ({"length": LENGTH | {"full": 0.2}}, "length.full=0.2"),
        ({"length": LENGTH | {"power": math.nan}}, "length.power=nan"),
        ({"segments": SEGMENTS | {"harsher": 0.5}}, "segments.harsher=0.5"),
    ],
)
def test_a_bad_field_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        make(**change)
