"""X13: how well does each kind of tournament rank sixteen players, and what does it cost?

python -m experiments.claims.x13_tournaments --workdir /tmp/x13

200 tournaments a seed among 16 players of distinct qualities, by ``jaxrl/tasks/arena.py``; places
become rewards by ``kernels/tournaments.py``. The judge is asked in both orders. It sees both
qualities rightly, or with probability .2 one in the place of the other (``erring``); its scores are
the qualities that it sees, or only who is better (``blunt``). Control: Swiss as public code credits
it, by the place in a list that is shuffled anew each round while pairs carry ids.

Look at: mean rank correlation of reward and quality, how often the best wins (alone at the top),
calls of the judge.
Expect: with a perfect judge every champion is the best, round robin orders all, Swiss correlates
above .8, the control not at all; an erring judge costs cheap topologies most.
Result: as expected. 10 seeds of 200 tournaments, means with 95 % t intervals, 2 to 8 s a run;
commit a184832, 2026-11-29. Correlation under a judge whose scores are qualities, perfect and
erring: anchor 1 and .617 [.606, .627] (30 calls), Swiss .934 [.932, .937] and .764 [.759, .768]
(64), single elimination 1 and .700 [.690, .711] (60), double 1 and .714 [.706, .722] (91), round
robin 1 and .934 [.932, .936] (240). Under one that only says who is better: anchor .734 and .471,
single .836 and .568, double .930 and .663, Swiss and round robin as before. A perfect judge's best
always wins, but at a blunt anchor alone in 12 % only; an erring judge's in 40 % (single) to 53 %
(anchor), if it is blunt in 3 % (anchor) to 50 % (double). The control: -.001 [-.014, .011] under a
perfect judge, and the best wins in 3 %: by position Swiss is noise.
"""

import random

import jax.numpy as jnp
import numpy as np

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.tournaments import rank_reward, tournament_rank
from jaxrl.tasks.arena import TOPOLOGIES, hold
from jaxrl.tasks.judged import ScriptedJudge

PLAYERS, ROUNDS = 16, 4
JUDGES = {
    "perfect": (1.0, False),
    "erring": (0.8, False),
    "perfect_blunt": (1.0, True),
    "erring_blunt": (0.8, True),
}
BY_POSITION = "swiss, by position"


def by_position(judge: ScriptedJudge, seed: int) -> tuple[list[float], int]:
    """Points and calls of the control."""
    draw, listed, points = random.Random(seed), list(range(PLAYERS)), [0.0] * PLAYERS
    for depth in range(ROUNDS):
        draw.shuffle(listed)
        for place in range(0, PLAYERS, 2):
            first, second = listed[place : place + 2]
            there = judge.compare(first, second, depth).scores
            back = judge.compare(second, first, depth).scores
            better = there[0] + back[1] >= there[1] + back[0]
            points[place if better else place + 1] += 1
    return points, ROUNDS * PLAYERS


def held(arm: str, judge: ScriptedJudge, seed: int) -> tuple[list[float], int]:
    """Points of each player, more being better, and calls of the judge."""
    if arm == BY_POSITION:
        return by_position(judge, seed)
    valid = dict.fromkeys(range(PLAYERS), True)
    outcome = hold(judge, valid, topology=arm, swiss_rounds=ROUNDS, seed=seed, replays=0)
    return [-outcome.rank[player] for player in range(PLAYERS)], outcome.calls


def told(quality: np.ndarray, points: np.ndarray) -> tuple[float, float]:
    """Mean rank correlation of reward and quality, share of tournaments that the best wins alone;
    both [tournament player]."""
    group = jnp.arange(quality.size) // PLAYERS
    everyone = jnp.ones(quality.size, bool)
    reward = np.asarray(rank_reward(jnp.asarray(points.ravel()), group, everyone))
    true = np.asarray(tournament_rank(jnp.asarray(quality.ravel()), group, everyone))
    reward, true = reward.reshape(quality.shape), -true.reshape(quality.shape)
    pairs = zip(reward, true, strict=True)
    found = [np.corrcoef(x, y)[0, 1] if np.ptp(x) else 0.0 for x, y in pairs]
    first = points == points.max(-1, keepdims=True)
    alone = first & (first.sum(-1, keepdims=True) == 1)
    return float(np.mean(found)), float((alone & (true == 0)).any(-1).mean())


def claim(quick: bool) -> Claim:
    """Topologies under four judges."""
    tournaments = 10 if quick else 200

    def run(arm: str, rate: float, seed: int) -> Outcome:
        draw = np.random.default_rng(seed)
        quality = np.stack([draw.permutation(PLAYERS) / PLAYERS for _ in range(tournaments)])
        found = {}
        for name, (accuracy, blunt) in JUDGES.items():
            points, calls = np.zeros(quality.shape), []
            for number, players in enumerate(quality):
                judge = ScriptedJudge(
                    dict(enumerate(players.tolist())),
                    dict.fromkeys(range(PLAYERS), ()),
                    accuracy,
                    0.0,
                    blunt,
                    f"{name}/{seed}/{number}",
                )
                points[number], asked = held(arm, judge, seed * tournaments + number)
                calls.append(asked)
            found[name], found[f"{name}_wins"] = told(quality, points)
            found[f"{name}_calls"] = float(np.mean(calls))
        return found

    return Claim(
        name="x13_tournaments",
        arms=(*TOPOLOGIES, BY_POSITION),
        run=run,
        rates=(0.0,),
        choose="perfect",
        larger=True,
        shown=(*(f"{name}{what}" for name in JUDGES for what in ("", "_wins")), "erring_calls"),
        drawn=("perfect", "erring"),
        against="",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
