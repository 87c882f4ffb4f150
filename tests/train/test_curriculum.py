"""The sampler and the archive that move beside the learner, on rollouts written by hand."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from jaxrl.algorithms import contract as algorithms
from jaxrl.pool.contract import RolloutPool
from jaxrl.train.curriculum import RULES, Curriculum, CurriculumConfig, Steered, build
from tests.papers import praxis as paper
from tests.pool.scripted import Scripted, answer_of, local_pool
from tests.pool.test_draws import Parities
from tests.train.toy import group, rollout

PACE: dict[str, Any] = {
    "move": "bounded",
    "signal": "loss",
    "stay": 1.0,
    "home": 0.1,
    "kappa": 0.02,
    "rules": ("majority", "likeliest", "longest"),
    "archive_rate": 0.5,
    "sharpness": 1.0,
    "harm": 1.0,
}
TASKS = {"easy": 10, "hard": 30, "idle": 5}


def pace(**change: Any) -> CurriculumConfig:
    return CurriculumConfig(**(PACE | change))


def make(lam=0.2, **change) -> Curriculum:
    return Curriculum(pace(**change), TASKS, consistency_weight=lam, consistency_cap=5.0)


def answers(universe, number, said):
    """A group: (text, log-prob of the response, tokens, reward) of each rollout."""
    made = [
        dataclasses.replace(
            rollout(number, i, [1], [2] * length, reward, logp=[logp / length] * length),
            text=text,
            source=universe,
        )
        for i, (text, logp, length, reward) in enumerate(said)
    ]
    return group(number, made)


WRONG_LONG = [("a", -1.0, 1, 1.0), ("a", -1.2, 1, 1.0), ("b", -0.5, 1, 0.0), ("c", -9.0, 3, 0.0)]
ALL_WRONG = [("a", -1.0, 1, 0.0), ("b", -2.0, 2, 0.0), ("c", -3.0, 3, 0.0), ("d", -4.0, 3, 0.0)]
ALL_RIGHT = [("a", -0.1, 1, 1.0)] * 4


def take(number=0):
    return [
        answers("easy", 3 * number, ALL_RIGHT),
        answers("hard", 3 * number + 1, ALL_WRONG),
        answers("hard", 3 * number + 2, WRONG_LONG),
    ]


def test_rules_pick_without_seeing_a_reward():
    members = answers("hard", 0, WRONG_LONG).rollouts
    picks = {name: rule(members) for name, rule in RULES.items()}
    assert picks == {
        "likeliest": 2,
        "majority": 0,
        "rarest": 2,
        "shortest": 2,
        "longest": 3,
        "unlikeliest": 3,
    }
    blind = [dataclasses.replace(r, reward=0.0, correct=False) for r in members]
    assert picks == {name: rule(blind) for name, rule in RULES.items()}


def test_q_moves_to_what_is_lost_by_at_most_kappa():
    made = make()
    before = np.array(list(made.probabilities.values()))
    told = made.learn(take())
    after = made.probabilities
    assert after["hard"] > after["idle"] > after["easy"]  # idle was not seen: between the two
    q = np.array(list(after.values()))
    assert 0 < paper.divergence(q, before) <= 0.02 + 1e-6
    np.testing.assert_allclose(q.sum(), 1, rtol=1e-6)
    assert told["curriculum.kl"] == pytest.approx(paper.divergence(q, before), abs=1e-6)


def test_a_take_by_hand():
    """Losses: easy 0, hard (1 + .5) / 2; D of the picked answers, -log p / 5 and at most 1."""
    made = make(kappa=10.0, lam=0.2)
    made.learn(take())
    # majority: right on 2 of 3; likeliest: on 1 of 3, the model's own; longest: on 1 of 3
    utility = [2 / 3, 1 / 3, 1 / 3]
    weight = paper.archive([0.5 * u for u in utility], 1.0)
    np.testing.assert_allclose(np.asarray(made.weights), weight, rtol=1e-6)
    easy = [0.02, 0.02, 0.02]
    hard = [(0.2 + 0.2) / 2, (0.2 + 0.1) / 2, (0.6 + 1.0) / 2]
    gain = [0.2 * np.dot(weight, easy), 0.75 + 0.2 * np.dot(weight, hard)]
    gain = [*gain, sum([0.75 / 2, 0.2 * np.dot(weight, np.mean([easy, hard], 0))])]
    expected = paper.tilt([1 / 3] * 3, [1 / 3] * 3, gain, 1.0, 0.1)
    np.testing.assert_allclose(list(made.probabilities.values()), expected, rtol=1e-5)


def test_the_bound_holds_and_is_written_down():
    made, rng = make(kappa=0.5, archive_rate=3.0), np.random.default_rng(0)
    for number in range(30):
        groups = [
            answers(
                rng.choice(list(TASKS)),
                8 * number + i,
                [
                    (rng.choice(["a", "b"]), -rng.exponential(3), int(rng.integers(1, 4)), reward)
                    for reward in rng.integers(0, 2, 4).astype(float)
                ],
            )
            for i in range(4)
        ]
        told = made.learn(groups)
        assert told["curriculum.drift"] <= told["curriculum.tight_bound"] + 1e-6
        assert told["curriculum.tight_bound"] <= told["curriculum.bound"] / 2 + 1e-6
        assert told["curriculum.kl"] <= 0.5 + 1e-6
    assert made.ledger["moves"] == 30 and made.ledger["broken"] == 0
    assert made.ledger["drift"] > 0.01


def test_a_rule_that_keeps_breaking_what_is_right_loses_its_weight():
    made = make(rules=("majority", "longest"))
    lost = [("a", -1.0, 1, 1.0), ("a", -1.2, 1, 1.0), ("b", -2.0, 3, 0.0)]
    logs = []
    for number in range(6):
        made.learn([answers("easy", number, lost)])
        weight = np.asarray(made.weights, float)
        logs.append(np.log(weight[1] / weight[0]))
    np.testing.assert_allclose(np.diff(logs), -0.5 * 2.0, rtol=1e-5)  # F - B: 1 against -1
    frozen = make(rules=("majority", "longest"), archive_rate=0.0)
    frozen.learn([answers("easy", 0, lost)])
    np.testing.assert_allclose(np.asarray(frozen.weights), 0.5)


def test_annotations_by_hand():
    made = make()
    made.learn(take())
    weight = np.asarray(made.weights, float)
    facts = made.annotate(answers("hard", 0, WRONG_LONG).rollouts)
    picks = [0, 2, 3]  # majority, likeliest, longest
    expected = paper.endorsements(picks, weight, [1] * 3, 4)
    np.testing.assert_allclose([fact["endorsement"] for fact in facts], expected, rtol=1e-6)
    assert np.mean([fact["endorsement"] for fact in facts]) == pytest.approx(1)
    assert {fact["base_probability"] for fact in facts} == {1 / (3 * 30)}
    without = make(rules=()).annotate(answers("hard", 0, WRONG_LONG).rollouts)
    assert [fact["endorsement"] for fact in without] == [0.0] * 4


def test_progress_is_what_was_gained_since_it_was_last_seen():
    made = make(signal="progress", lam=0.0, kappa=10.0, home=0.0)
    made.learn([answers("easy", 0, WRONG_LONG), answers("hard", 1, ALL_WRONG)])
    assert len({round(p, 6) for p in made.probabilities.values()}) == 1  # nothing to compare yet
    made.learn([answers("easy", 2, ALL_RIGHT), answers("hard", 3, ALL_WRONG)])
    assert made.probabilities["easy"] > made.probabilities["idle"] > made.probabilities["hard"]


def test_a_fixed_sampler_stays_and_an_empty_take_moves_nothing():
    made = make(move="fixed")
    made.learn(take())
    np.testing.assert_allclose(list(made.probabilities.values()), 1 / 3, rtol=1e-6)
    moving = make()
    state = moving.state()
    moving.learn([])
    assert moving.state() == state


def test_a_restored_curriculum_goes_on_bit_for_bit():
    unbroken, broken = make(), make()
    for number in range(4):
        unbroken.learn(take(number)[number % 2 :])
    for number in range(2):
        broken.learn(take(number)[number % 2 :])
    resumed = make()
    resumed.restore(json.loads(json.dumps(broken.state())))
    assert resumed.probabilities == broken.probabilities
    for number in range(2, 4):
        resumed.learn(take(number)[number % 2 :])
    assert json.dumps(resumed.state()) == json.dumps(unbroken.state())
    with pytest.raises(ValueError, match="curriculum state has rules=.*allowed: "):
        make(rules=("rarest",)).restore(broken.state())


def steered() -> RolloutPool:
    """A pool of sums whose generator is right where the first number is even."""

    def respond(request):
        answer = answer_of(request)
        return answer if int(answer) % 2 else "no"

    config = pace(kappa=0.1)
    tasks = {"even": 5, "odd": 4}
    moving = Curriculum(config, tasks, consistency_weight=0.2, consistency_cap=5.0)
    pool = local_pool(Scripted(respond), Parities(9), annotate=moving.annotate)
    return Steered(pool, moving)


def walk(pool, steps):
    """Draws, facts and counts of some takes."""
    found = []
    for step in steps:
        groups, manifest = pool.take(6, step)
        pool.commit(step)
        found.append(
            (
                [(group.id, group.rollouts[0].task_key) for group in groups],
                [dict(rollout.facts) for group in groups for rollout in group.rollouts],
                dict(manifest.counts),
            )
        )
    return found


def test_a_steered_pool_draws_what_is_lost_and_resumes_bit_for_bit():
    unbroken, first = steered(), steered()
    found = walk(unbroken, range(6))
    counts = [one[2] for one in found]
    assert counts[-1]["curriculum.q.odd"] > counts[0]["curriculum.q.odd"] > 0.5
    assert counts[-1]["curriculum.lost.odd"] == 1 and counts[-1]["curriculum.lost.even"] == 0
    for fact in found[-1][1]:
        assert {"task_probability", "base_probability", "endorsement"} <= set(fact)
    assert walk(first, range(3)) == found[:3]
    second = steered()
    second.restore(json.loads(json.dumps(first.state())))
    assert walk(second, range(3, 6)) == found[3:]
    assert json.dumps(second.state()) == json.dumps(unbroken.state())
    with pytest.raises(ValueError, match="allowed: those of the curriculum"):
        second.weigh({"even": 0.5, "odd": 0.5})


def test_it_is_built_as_the_algorithm_and_the_tasks_say():
    tasks = Parities(9).tasks("train")
    sft = algorithms.load("sft")
    assert build(pace(move="off"), tasks, sft) is None
    plain = build(pace(), tasks, sft)
    assert plain is not None and plain.universes == ["even", "odd"]
    plain.learn([answers("even", 0, ALL_WRONG)])
    assert plain.ledger["broken"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("move", "free"),
        ("signal", "reward"),
        ("stay", 0.0),
        ("kappa", -1.0),
        ("rules", ("majority", "majority")),
        ("rules", ("wisest",)),
        ("harm", float("inf")),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"train.curriculum.{field}="):
        make(**{field: value})
