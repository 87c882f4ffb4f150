"""Tournaments among the responses to one prompt: who meets whom, who won, which steps decided.

A judge sees two players at a time, in both orders, and its scores are summed, so that a liking for
the first place cancels. Everything is kept by the player's id, never by a place in a list that
somebody sorts. A judge that fails is asked again; if it goes on failing, a coin decides whose seed
stands in the match's record. Nobody wins by being listed first.

Places come out as facts of the rollouts; no advantage is computed here.
"""

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

SEEDING = -1  # round of the comparisons that only seed a bracket; they credit no steps


class JudgeError(Exception):
    """The judge gave no usable opinion."""


@dataclasses.dataclass(frozen=True)
class Opinion:
    """Scores of the two players in the order they were shown; the steps of the better that decided.

    Scores are finite numbers on one scale, higher is better.
    """

    scores: tuple[float, float]
    pivotal: Sequence[int]


class Judge(Protocol):
    """Compares two players."""

    def compare(self, first: int, second: int, attempt: int) -> Opinion:
        """An opinion on two players by id; ``attempt`` counts the replays of this question.
        JudgeError if there is none."""
        ...


@dataclasses.dataclass(frozen=True)
class Match:
    """What is recorded of two players who met."""

    round: int  # 0 the first, SEEDING before it
    players: tuple[int, int]
    scores: tuple[float, float]  # summed over both orders; 0 where the judge failed
    judged: bool  # false: the judge failed, in one order at least
    winner: int | None  # None: a tie
    pivotal: tuple[int, ...]  # steps of the winner, by opinions that prefer it
    coin: int | None  # seed of the coin that decided
    calls: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Places by player id, 0 the best; players who are level share the mean of their places."""

    rank: Mapping[int, float]
    champion: int | None  # a valid player, alone at the top; None if several are
    matches: tuple[Match, ...]

    @property
    def calls(self) -> int:
        """How often the judge was asked."""
        return sum(match.calls for match in self.matches)

    def named(self, player: int, rounds: int, steps: int) -> np.ndarray:
        """int32 [round, step]: in how many matches of a round that the player won its step was
        named. Steps that do not exist are ignored."""
        counts = np.zeros((rounds, steps), np.int32)
        for match in self.matches:
            if match.winner == player and match.round != SEEDING:
                for step in match.pivotal:
                    if 0 <= step < steps:
                        counts[match.round, step] += 1
        return counts


def _better(first: int, second: int, scores: tuple[float, float]) -> int | None:
    """Who has the higher score; None if they are equal."""
    return None if scores[0] == scores[1] else (first if scores[0] > scores[1] else second)


class _Table:
    """Where players meet: asks the judge, flips the coins, keeps the records."""

    def __init__(self, judge: Judge, seed: int, replays: int) -> None:
        self.judge, self.seed, self.replays = judge, seed, replays
        self.matches: list[Match] = []

    def meet(self, a: int, b: int, depth: int, *, decisive: bool) -> Match:
        """One match; a decisive one has a winner, if need be by a coin."""
        a, b = sorted((a, b))
        there, calls = self._ask(a, b)
        back, more = self._ask(b, a)
        scores, winner, pivotal, coin = (0.0, 0.0), None, (), None
        judged = there is not None and back is not None
        if there is not None and back is not None:
            scores = (there.scores[0] + back.scores[1], there.scores[1] + back.scores[0])
            winner = _better(a, b, scores)
            # Steps that an opinion for the loser names are the loser's.
            agree = [there] if _better(a, b, there.scores) == winner else []
            agree += [back] if _better(b, a, back.scores) == winner else []
            named = {step for opinion in agree for step in opinion.pivotal}
            pivotal = tuple(sorted(named)) if winner is not None else ()
        if winner is None and (decisive or not judged):
            coin = self._coin(depth, a, b)
            winner = random.Random(coin).choice((a, b))
        self.matches.append(
            Match(depth, (a, b), scores, judged, winner, pivotal, coin, calls + more)
        )
        return self.matches[-1]

    def _ask(self, first: int, second: int) -> tuple[Opinion | None, int]:
        for attempt in range(1 + self.replays):
            try:
                opinion = self.judge.compare(first, second, attempt)
            except JudgeError:
                continue
            if all(math.isfinite(score) for score in opinion.scores):
                return opinion, attempt + 1
        return None, 1 + self.replays

    def _coin(self, depth: int, a: int, b: int) -> int:
        """The same for a match whoever is asked about first."""
        name = f"{self.seed}/{depth}/{a}/{b}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")

    def mean_score(self, player: int) -> float:
        """Of one opinion on the player, over all matches in which the judge did not fail."""
        found = [
            match.scores[match.players.index(player)] / 2
            for match in self.matches
            if player in match.players and match.judged
        ]
        return sum(found) / len(found) if found else 0.0


# What a topology finds: a key for each player; the largest is the best, equal keys are level.
Keys = Mapping[int, tuple[float, ...]]


def _margins(table: _Table, players: Sequence[int], depth: int) -> dict[int, tuple[float, float]]:
    """Everybody meets the player with the lowest id: by how much each was better, 0 for itself. Who
    a coin decided about stands right beside it."""
    anchor = min(players)
    found = {anchor: (0.0, 0.0)}
    for player in players:
        if player != anchor:
            match = table.meet(anchor, player, depth, decisive=False)
            side = 0.0 if match.judged else (1.0 if match.winner == player else -1.0)
            found[player] = (match.scores[1] - match.scores[0], side)
    return found


def _anchor(table: _Table, players: Sequence[int], rounds: int) -> Keys:
    return _margins(table, players, 0)


def _round_robin(table: _Table, players: Sequence[int], rounds: int) -> Keys:
    points = dict.fromkeys(players, 0.0)
    for place, one in enumerate(players):
        for other in players[place + 1 :]:
            _score(points, table.meet(one, other, 0, decisive=False))
    return {player: (won,) for player, won in points.items()}


def _score(points: dict[int, float], match: Match) -> None:
    """A point for the winner, half a point each for a tie."""
    for player in match.players:
        points[player] += 0.5 if match.winner is None else float(match.winner == player)


def _swiss(table: _Table, players: Sequence[int], rounds: int) -> Keys:
    """Who has equally many points meets, if they have not met. Level players are told apart by the
    points of those they met."""
    points, met = dict.fromkeys(players, 0.0), {player: set() for player in players}
    rested: set[int] = set()
    for depth in range(rounds):
        waiting = sorted(players, key=lambda player: -points[player])  # stable: else by lot
        if len(waiting) % 2:
            lone = next((p for p in reversed(waiting) if p not in rested), waiting[-1])
            waiting.remove(lone)
            rested.add(lone)
            points[lone] += 1
        while waiting:
            one = waiting.pop(0)
            other = next((p for p in waiting if p not in met[one]), waiting[0])
            waiting.remove(other)
            met[one].add(other)
            met[other].add(one)
            _score(points, table.meet(one, other, depth, decisive=False))
    return {p: (points[p], sum(points[other] for other in sorted(met[p]))) for p in players}


def _seeds(table: _Table, players: Sequence[int]) -> list[int]:
    """The best first, after one comparison each with the same player; level ones by lot."""
    margin = _margins(table, players, SEEDING)
    return sorted(players, key=lambda player: margin[player], reverse=True)


def _byes(players: int) -> int:
    """How many must rest for a power of two to be left after the first round."""
    return 2 ** math.ceil(math.log2(players)) - players


def _knock_out(table: _Table, playing: Sequence[int], depth: int) -> list[int]:
    """The first seed meets the last, the second the last but one; who lost, an odd one rests."""
    pairs = [(playing[i], playing[-1 - i]) for i in range(len(playing) // 2)]
    losers = []
    for one, other in pairs:
        winner = table.meet(one, other, depth, decisive=True).winner
        losers.append(other if winner == one else one)
    return losers


def _single_elimination(table: _Table, players: Sequence[int], rounds: int) -> Keys:
    """Champion, then losers, those of the last round first; inside a round by mean score."""
    alive, out, depth = _seeds(table, players), {}, 0
    rest = _byes(len(alive))
    while len(alive) > 1:
        losers = _knock_out(table, alive[rest:], depth)
        out |= dict.fromkeys(losers, depth)
        alive = [player for player in alive if player not in losers]
        depth, rest = depth + 1, 0
    return {player: (out.get(player, depth), table.mean_score(player)) for player in players}


def _double_elimination(table: _Table, players: Sequence[int], rounds: int) -> Keys:
    """Out after two losses; losers of the upper bracket go on in the lower one.

    An odd number in the lower bracket gives its top seed a rest. If the lower bracket's winner
    wins the final, both have lost once, and they meet again.
    """
    upper, out, depth = _seeds(table, players), {}, 0
    seeds, lower, rest = list(upper), [], _byes(len(upper))
    while len(upper) > 1 or len(lower) > 1:
        fallen = _knock_out(table, upper[rest:], depth)
        beaten = _knock_out(table, lower[len(lower) % 2 :], depth)
        out |= dict.fromkeys(beaten, depth)
        upper = [player for player in upper if player not in fallen]
        lower = [p for p in seeds if p in fallen or (p in lower and p not in beaten)]
        depth, rest = depth + 1, 0
    if lower:
        final = table.meet(upper[0], lower[0], depth, decisive=True)
        if final.winner == lower[0]:
            depth += 1
            final = table.meet(upper[0], lower[0], depth, decisive=True)
        out[lower[0] if final.winner == upper[0] else upper[0]] = depth
    return {player: (out.get(player, depth + 1), table.mean_score(player)) for player in players}


TOPOLOGIES: Mapping[str, Callable[[_Table, Sequence[int], int], Keys]] = {
    "anchor": _anchor,
    "round_robin": _round_robin,
    "swiss": _swiss,
    "single_elimination": _single_elimination,
    "double_elimination": _double_elimination,
}


def most_rounds(topology: str, players: int, swiss_rounds: int) -> int:
    """Rounds that a tournament of at most so many players can have."""
    halvings = math.ceil(math.log2(max(players, 2)))
    # Double elimination: the lower bracket needs as many rounds again, then up to two finals.
    most = {"single_elimination": halvings, "double_elimination": 2 * halvings + 2}
    return most.get(topology, swiss_rounds if topology == "swiss" else 1)


def places(keys: Keys, start: int) -> dict[int, float]:
    """Rank by key from ``start`` on, the largest first; equal keys share the mean place."""
    ordered = sorted(keys, key=lambda player: keys[player], reverse=True)
    taken: dict[tuple[float, ...], list[int]] = {}
    for place, player in enumerate(ordered, start):
        taken.setdefault(keys[player], []).append(place)
    return {player: sum(taken[keys[player]]) / len(taken[keys[player]]) for player in keys}


def hold(
    judge: Judge,
    valid: Mapping[int, bool],
    *,
    topology: str,
    swiss_rounds: int,
    seed: int,
    replays: int,
) -> Outcome:
    """A tournament among the valid players; ids are any integers.

    Invalid players meet nobody, share the last places and cannot be champion. What is not decided
    by the judge (lots among equals, coins) comes from ``seed`` and the ids. ``replays``: how often
    a failed question is asked again. ValueError for an unknown topology.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology={topology!r}; allowed: {', '.join(TOPOLOGIES)}")
    players = sorted(player for player, fine in valid.items() if fine)
    random.Random(seed).shuffle(players)
    table = _Table(judge, seed, replays)
    keys: Keys = dict.fromkeys(players, (0.0,))
    if len(players) > 1:
        keys = TOPOLOGIES[topology](table, players, swiss_rounds)
    unfit: Keys = {player: (0.0,) for player, fine in valid.items() if not fine}
    rank = places(keys, 0) | places(unfit, len(players))
    top = [player for player in players if rank[player] == 0]
    return Outcome(rank, top[0] if top else None, tuple(table.matches))
