"""Tournaments: the best wins, credit goes to ids, and nothing hangs on who is listed first.

A2 ... A6: ArenaFlow's own checks; A1 and A5 are in tests/algorithms and tests/kernels.
"""

import collections
import math
import random

import numpy as np
import pytest

from jaxrl.tasks.arena import (
    SEEDING,
    TOPOLOGIES,
    JudgeError,
    Match,
    Opinion,
    Outcome,
    hold,
    most_rounds,
    places,
)
from jaxrl.tasks.judged import ScriptedJudge

every_topology = pytest.mark.parametrize("topology", TOPOLOGIES)


def perfect(quality, pivotal=None, blunt=False):
    players = quality if isinstance(quality, dict) else dict(enumerate(quality))
    named = pivotal or dict.fromkeys(players, ())
    return ScriptedJudge(players, named, 1.0, 0.0, blunt, "perfect")


def held(judge, players, topology="round_robin", seed=0, replays=0, invalid=()):
    valid = {player: player not in invalid for player in players}
    return hold(judge, valid, topology=topology, swiss_rounds=4, seed=seed, replays=replays)


def correlation(outcome, quality):
    """Spearman's: of places by the tournament and by true quality (no two alike)."""
    true = places({i: (q,) for i, q in enumerate(quality)}, 0)
    found = [outcome.rank[i] for i in true]
    return float(np.corrcoef(found, list(true.values()))[0, 1])


def qualities(players, seed):
    return np.random.default_rng(seed).permutation(players) / players


@every_topology
@pytest.mark.parametrize("players", [2, 3, 5, 7, 8, 11, 16])
def test_a3_with_a_perfect_judge_the_best_is_champion(topology, players):
    for seed in range(3):
        quality = qualities(players, seed)
        outcome = held(perfect(quality), range(players), topology, seed)
        if topology == "swiss" and players > 2:  # an odd one's rest is a point nobody fought for
            assert outcome.rank[int(quality.argmax())] < 1
        else:
            assert outcome.champion == quality.argmax()
        assert math.isclose(sum(outcome.rank.values()), players * (players - 1) / 2)
        assert max(match.round for match in outcome.matches) < most_rounds(topology, players, 4)


def test_a2_a_perfect_judge_and_round_robin_find_the_order():
    quality = qualities(16, 3)
    assert correlation(held(perfect(quality, blunt=True), range(16)), quality) == pytest.approx(1)


def swiss_by_list_position(judge, players, rounds, seed):
    """What went wrong elsewhere: pairs carry ids, a shuffled list is credited by position."""
    shuffled, points = list(range(players)), [0.0] * players
    for _ in range(rounds):
        random.Random(seed).shuffle(shuffled)
        for place in range(0, players, 2):
            scores = judge.compare(shuffled[place], shuffled[place + 1], 0).scores
            points[place + (scores[1] > scores[0])] += 1
        seed += 1
    return Outcome(places({i: (p,) for i, p in enumerate(points)}, 0), None, ())


def test_a4_swiss_ranks_by_id_and_the_fault_of_public_code_would_show():
    ours, theirs = [], []
    for seed in range(60):
        quality = qualities(16, seed)
        judge = perfect(quality, blunt=True)
        ours.append(correlation(held(judge, range(16), "swiss", seed), quality))
        theirs.append(correlation(swiss_by_list_position(judge, 16, 4, seed), quality))
    assert min(ours) > 0.8 and np.mean(ours) > 0.9
    assert abs(np.mean(theirs)) < 0.2


@every_topology
def test_results_belong_to_ids(topology):
    """The same players under other names, listed in another order: the same places."""
    quality = qualities(8, 5)
    plain = held(perfect(quality), range(8), topology)
    for seed in range(3):
        names = np.random.default_rng(seed).permutation(100)[:8]
        names.sort()  # lots and coins come from the order of the ids
        listed = np.random.default_rng(seed).permutation(8)
        renamed = {int(names[i]): quality[i] for i in listed}
        outcome = held(perfect(renamed), renamed, topology)
        assert {i: outcome.rank[int(names[i])] for i in range(8)} == plain.rank


@every_topology
def test_a6_the_order_in_which_a_judge_sees_players_changes_nothing(topology):
    quality = qualities(8, 1)

    class Swapped(ScriptedJudge):
        """Asked about (a, b), it hears (b, a)."""

        def compare(self, first, second, attempt):
            opinion = super().compare(second, first, attempt)
            return Opinion((opinion.scores[1], opinion.scores[0]), opinion.pivotal)

    fields = (dict(enumerate(quality)), dict.fromkeys(range(8), (0,)), 0.8, 0.0, False, "noisy")
    plain = held(ScriptedJudge(*fields), range(8), topology)
    assert held(Swapped(*fields), range(8), topology) == plain


class First:
    """Likes whom it sees first, and names a step."""

    def compare(self, first, second, attempt):
        return Opinion((1.0, 0.0), (0,))


@every_topology
def test_a_liking_for_the_first_place_wins_nothing(topology):
    winners = collections.Counter()
    for seed in range(80):
        outcome = held(First(), range(4), topology, seed)
        assert all(not match.pivotal for match in outcome.matches)
        if topology in ("anchor", "round_robin"):
            assert set(outcome.rank.values()) == {1.5} and outcome.champion is None
        winners[outcome.champion] += 1
        if "elimination" in topology:  # somebody must win: by coins, whose seeds are kept
            assert all(match.coin for match in outcome.matches if match.round != SEEDING)
    if "elimination" in topology:
        assert set(winners) == {0, 1, 2, 3} and max(winners.values()) < 40


class Failing:
    """Fails on the first attempts."""

    def __init__(self, quality, fails):
        self.judge, self.fails = perfect(quality), fails

    def compare(self, first, second, attempt):
        if attempt < self.fails:
            raise JudgeError("no answer")
        return self.judge.compare(first, second, attempt)


def test_a_failed_judge_is_asked_again():
    quality = qualities(6, 0)
    outcome = held(Failing(quality, 2), range(6), replays=2)
    assert outcome.rank == held(perfect(quality), range(6)).rank
    assert outcome.calls == 3 * 2 * 15 and all(match.judged for match in outcome.matches)


@every_topology
def test_a_judge_that_goes_on_failing_leaves_it_to_coins_with_a_seed(topology):
    quality = [float(i) for i in range(8)]
    firsts, coins = 0, 0
    for seed in range(40):
        outcome = held(Failing(quality, 9), range(8), topology, seed, replays=1)
        assert outcome == held(Failing(quality, 9), range(8), topology, seed, replays=1)
        for match in outcome.matches:
            if match.coin is None:  # only where nobody needs to win
                assert match.round == SEEDING and match.winner is None
                continue
            assert match.winner == random.Random(match.coin).choice(match.players)
            assert not match.judged and match.calls == 4 and not match.pivotal
            firsts, coins = firsts + (match.winner == match.players[0]), coins + 1
    assert 0.35 < firsts / coins < 0.65  # being listed first is no advantage


def test_scores_that_are_no_numbers_are_no_opinion():
    class Confused:
        def compare(self, first, second, attempt):
            return Opinion((math.nan, 1.0), ())

    (match,) = held(Confused(), range(2)).matches
    assert not match.judged and match.coin is not None


@every_topology
def test_who_is_invalid_meets_nobody_and_shares_the_last_places(topology):
    quality = [0.9, 0.1, 1.0, 0.5, 0.3]
    outcome = held(perfect(quality), range(5), topology, invalid={2, 4})
    assert outcome.rank[2] == outcome.rank[4] == 3.5
    assert outcome.champion == 0 or topology == "swiss"
    assert not any({2, 4} & set(match.players) for match in outcome.matches)


@every_topology
def test_one_player_and_none(topology):
    alone = held(perfect([1.0, 2.0]), range(2), topology, invalid={1})
    assert alone.rank == {0: 0, 1: 1} and alone.champion == 0 and not alone.matches
    nobody = held(perfect([1.0, 2.0]), range(2), topology, invalid={0, 1})
    assert nobody.rank == {0: 0.5, 1: 0.5} and nobody.champion is None


@pytest.mark.parametrize(
    ("topology", "matches"),
    [
        ("anchor", 15),
        ("round_robin", 120),
        ("swiss", 4 * 8),
        ("single_elimination", 15 + 15),
        ("double_elimination", 15 + 30),
    ],
)
def test_how_often_sixteen_players_meet(topology, matches):
    outcome = held(perfect(qualities(16, 0)), range(16), topology)
    assert len(outcome.matches) == matches and outcome.calls == 2 * matches


def test_byes_go_to_the_top_seeds():
    # five players, eight places: seeds 1 to 3 rest, 4 meets 5; then 1 the winner, and 2 meets 3
    outcome = held(perfect([0.5, 0.9, 0.7, 0.3, 0.1]), range(5), "single_elimination")
    bracket = [(match.round, match.players) for match in outcome.matches if match.round >= 0]
    assert bracket == [(0, (3, 4)), (1, (1, 3)), (1, (0, 2)), (2, (1, 2))]
    assert [outcome.rank[i] for i in range(5)] == [2, 0, 1, 3, 4]


def test_losers_of_later_rounds_stand_higher_whatever_their_scores():
    # 1 and 2 meet in round 0 because a blunt judge's seeding cannot tell them apart
    outcome = held(perfect([0.4, 0.9, 0.8, 0.1], blunt=True), range(4), "single_elimination", 3)
    first = next(match for match in outcome.matches if match.round == 0)
    for match in outcome.matches:
        if match.round == 0:
            loser = next(player for player in match.players if player != match.winner)
            assert outcome.rank[loser] >= 2
    assert first.winner is not None


class Moody:
    """Better is the lower id; names step 5 of it, and step 7 of whom it sees second."""

    def compare(self, first, second, attempt):
        if {first, second} == {0, 1} and first == 0:  # one order speaks for the loser
            return Opinion((0.0, 1.0), (7,))
        lower = first < second
        return Opinion((3.0, 0.0) if lower else (0.0, 3.0), (5,))


def test_steps_are_the_winners_by_opinions_that_prefer_it():
    outcome = held(Moody(), range(3))
    match = next(match for match in outcome.matches if match.players == (0, 1))
    assert match.scores == (3.0, 1.0) and match.winner == 0 and match.pivotal == (5,)
    np.testing.assert_array_equal(outcome.named(0, 1, 6), [[0, 0, 0, 0, 0, 2]])
    np.testing.assert_array_equal(outcome.named(2, 1, 6), 0)  # it won nothing
    np.testing.assert_array_equal(outcome.named(0, 1, 3), 0)  # step 5 does not exist there


def test_depth_grows_with_the_rounds_and_seeding_has_none():
    quality = [0.1, 0.4, 0.2, 0.9, 0.3, 0.5, 0.6, 0.7]
    outcome = held(perfect(quality, dict.fromkeys(range(8), (2,))), range(8), "single_elimination")
    np.testing.assert_array_equal(outcome.named(3, 3, 4), [[0, 0, 1, 0]] * 3)
    assert sum(outcome.named(i, 3, 4).sum() for i in range(8)) == 7  # not the seeding's


def test_a_loser_of_the_final_may_come_back_in_double_elimination():
    # 0 is the best, and the judge errs on it and 1 until both orders were asked once in the bracket
    class Once:
        asked = 0

        def compare(self, first, second, attempt):
            scores = (float(-first), float(-second))
            if {first, second} == {0, 1}:
                self.asked += 1
                if 2 < self.asked <= 4:  # seeding asked twice before
                    scores = (scores[1], scores[0])
            return Opinion(scores, ())

    outcome = held(Once(), range(4), "double_elimination")
    met = [match for match in outcome.matches if match.players == (0, 1) and match.round >= 0]
    assert outcome.champion == 0 and [match.winner for match in met] == [1, 0, 0]


def test_an_unknown_topology_is_named():
    with pytest.raises(ValueError, match="topology='ladder'; allowed: anchor, round_robin, swiss"):
        held(perfect([1.0]), range(1), "ladder")


def test_a_match_is_a_record_that_can_be_written():
    (match,) = held(perfect([1.0, 0.5], {0: (3,), 1: ()}), range(2)).matches
    assert match == Match(0, (0, 1), (2.0, 1.0), True, 0, (3,), None, 2)
