"""Draws by universe: as often as asked for, functions of their number, recorded with their odds."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from jaxrl.pool.draws import Draws
from tests.pool.scripted import Scripted, Sums, answer_of, local_pool

PROBABILITIES = {"even": 0.7, "odd": 0.3}


class Parities(Sums):
    """Sums whose source says whether the first number is even."""

    def tasks(self, split):
        parity = ("even", "odd")
        return [
            dataclasses.replace(task, source=parity[int(task.key.split("/")[1]) % 2])
            for task in super().tasks(split)
        ]


def draws(seed: int = 0, weights: dict[str, float] | None = None) -> Draws:
    made = Draws(Parities(9).tasks("train"), seed)
    if weights:
        made.weigh(weights)
    return made


def test_universes_come_as_often_as_asked_for_and_their_tasks_equally():
    made = draws(0, PROBABILITIES)
    counts = Counter(made.task(number).key for number in range(4000))
    universes = {key: ("even", "odd")[int(key.split("/")[1]) % 2] for key in counts}
    assert len(counts) == 9  # 5 even, 4 odd
    for key, count in counts.items():
        share = {"even": 0.7 / 5, "odd": 0.3 / 4}[universes[key]]
        assert abs(count / 4000 - share) < 4 * np.sqrt(share / 4000)


def test_a_draw_is_a_function_of_seed_number_and_probabilities():
    first, again = draws(0, PROBABILITIES), draws(0, {"odd": 0.3, "even": 0.7})
    keys = [first.task(number).key for number in range(50)]
    assert keys == [again.task(number).key for number in range(50)]
    assert keys[7] == draws(0, PROBABILITIES).task(7).key  # none before it is needed
    assert keys != [draws(1, PROBABILITIES).task(number).key for number in range(50)]


def test_a_universe_of_probability_zero_is_not_drawn():
    made = draws(0, {"even": 0.0, "odd": 1.0})
    assert {made.task(number).source for number in range(100)} == {"odd"}


def test_unweighed_draws_have_no_odds():
    made = draws()
    assert made.facts(made.task(0)) == {}
    made.weigh(PROBABILITIES)
    assert made.facts(Parities(9).tasks("train")[0]) == {"task_probability": 0.7 / 5}


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ({"even": 1.0}, r"probabilities of \['even'\]; allowed: of each"),
        ({"even": 0.7, "odd": 0.7}, "sum 1"),
        ({"even": 1.5, "odd": -0.5}, ">= 0"),
        ({"even": float("nan"), "odd": 0.5}, "sum 1"),
    ],
)
def test_probabilities_that_do_not_fit_are_refused(probabilities, message):
    with pytest.raises(ValueError, match=message):
        draws().weigh(probabilities)


def take(pool, step):
    pool.weigh(PROBABILITIES if step % 2 else {"even": 0.1, "odd": 0.9})
    groups, _ = pool.take(5, step)
    pool.commit(step)
    return [(group.id, group.rollouts[0].task_key) for group in groups], groups


def test_a_pool_records_the_odds_and_resumes_exactly():
    pool = local_pool(Scripted(answer_of), Parities(9))
    keys = [take(pool, step)[0] for step in range(4)]
    rollouts = [rollout for group in take(pool, 5)[1] for rollout in group.rollouts]
    share = {"even": 0.7 / 5, "odd": 0.3 / 4}
    assert all(r.facts["task_probability"] == share[r.source] for r in rollouts)
    early = local_pool(Scripted(answer_of), Parities(9))
    assert [take(early, step)[0] for step in range(2)] == keys[:2]
    late = local_pool(Scripted(answer_of), Parities(9))
    late.restore(early.state())
    assert [take(late, step)[0] for step in range(2, 4)] == keys[2:]
