"""How often does each gate let in a candidate that is no better than what stands?

python -m experiments.claims.agents_null_rates --workdir /tmp/agents_null_rates

Candidate and incumbent are drawn alike, 500 decisions a seed (jaxrl/agents/gates.py). ``rate`` is
the share that is accepted; ``beside``: the mean of what a run writes beside such decisions, from
exchanged labels on the evidence itself, which should be the same number. Tasks succeed with
probabilities that are uniform in .2 to .8; ties are drawn as named.

Expect: the paired gate ships a no-op in .124, .031, .004 of the cases (3, 5, 8 prompts, a judge
that always decides) and .277, .276, .207 (half of the contexts tied); strict improvement in just
under half; survival of 4 in 8 in just under half; a noise band of 1.645 spreads in 5 %; the trust
gate in 5 % of its looks but in 27 % of runs of 120 looks at least once.
Result: as expected, and both columns agree. 20 seeds of 500 decisions, means; intervals are at most
.011 to either side; commit 34ed4ce, 2026-11-30.

| gate | rate | beside |
|---|---|---|
| paired, 3, 5, 8 prompts, judge always decides | .121, .030, .004 | .123, .032, .004 |
| the same, half of the contexts tied | .280, .281, .201 | .276, .282, .213 |
| the same, half tied, two wins asked for | .057, .104, .119 | .050, .098, .117 |
| strict improvement, 18 and 200 tasks | .433, .485 | .430, .477 |
| survival of 4 in 8, 18 and 200 tasks | .416, .470 | .419, .471 |
| noise band, 40 and 200 tasks | .062, .050 | .062, .048 |
| trust, one look at 30 dates | .051 | .047 |
| trust, ever in 120 looks | .246 [.202, .290] | - |
| prune where U < 0, 10 readings | .501 | .501 |
| prune where U + 1.645 errors < 0 | .072 | .067 |

Strict improvement lets in almost half of the no-ops: it only refuses ties and losses. Asking the
paired gate for two wins helps least where there are most prompts. The bound's .072 is above .05
because ten readings have a t and not a normal distribution.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import gates
from jaxrl.agents.journal import Json, draws

Sample = Callable[[np.random.Generator], Json]
LOOKS, DATES = 120, 10


def members(count: int, tasks: int) -> Sample:
    """Equal members of a population on the same tasks; parents come first."""

    def sample(chance: np.random.Generator) -> Json:
        lots = chance.random((count, tasks)) < chance.uniform(0.2, 0.8, tasks)
        order = [f"m{i}" for i in range(count)]
        scores = dict(zip(order, lots.astype(float).tolist(), strict=True))
        return {"order": order, "scores": scores, "candidate": order[-1]}

    return sample


def pair(tasks: int) -> Sample:
    """Old and new on the same tasks."""

    def sample(chance: np.random.Generator) -> Json:
        old, new = members(2, tasks)(chance)["scores"].values()
        return {"old": old, "new": new}

    return sample


def dates(count: int) -> Sample:
    """Predictions for four memories that tell nothing of what comes."""

    def sample(chance: np.random.Generator) -> Json:
        both = chance.normal(size=(count, 2, 4)).tolist()
        return {"dates": [{"predicted": p, "realised": r} for p, r in both], "gain": 1.0}

    return sample


def readings(count: int) -> Sample:
    """Of a version that is like the others."""
    return lambda chance: {"readings": chance.normal(size=count).tolist(), "prior": [0, 0.0]}


# The spread of a mean of n differences is sqrt(2 x .22 / n): p (1 - p) is .22 on average.
NOISE = {n: 1.645 * (2 * 0.22 / n) ** 0.5 for n in (40, 200)}
TRUST: Json = {"min_dates": DATES, "level": 0.05}
ARMS: dict[str, tuple[str, Sample, Json]] = {
    f"paired, {prompts} prompts{tied}": (
        "paired_sign",
        gates.judged_contexts(prompts, 3, win, win),
        {"min_won": won},
    )
    for tied, win, won in ((", decided", 0.5, 1), (", half tied", 0.25, 1), (", two won", 0.25, 2))
    for prompts in (3, 5, 8)
} | {
    "strict, 18 tasks": ("strict_improvement", pair(18), {}),
    "strict, 200 tasks": ("strict_improvement", pair(200), {}),
    "survival of 4 in 8, 18 tasks": ("survival", members(8, 18), {"keep": 4}),
    "survival of 4 in 8, 200 tasks": ("survival", members(8, 200), {"keep": 4}),
    "noise band, 40 tasks": ("calibrated_mean", pair(40), {"noise": NOISE[40]}),
    "noise band, 200 tasks": ("calibrated_mean", pair(200), {"noise": NOISE[200]}),
    "trust, 30 dates": ("predictive_t", dates(30), TRUST),
    "prune below 0, 10 readings": ("below_zero", readings(10), {"margin": 0.0}),
    "prune by a bound, 10 readings": ("below_zero", readings(10), {"margin": 1.645}),
}
EVER = "trust, ever in 120 looks"


def opened(chance: np.random.Generator) -> bool:
    """Does a trust gate that tells nothing open at one of its looks?"""
    every = dates(LOOKS)(chance)
    return any(
        gates.decide("predictive_t", {**every, "dates": every["dates"][:n]}, TRUST).accepted
        for n in range(DATES, LOOKS + 1)
    )


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """Decisions on evidence in which nothing differs."""
    chance, count = draws("null rates", arm, seed), 20 if quick else 500
    if arm == EVER:
        ever = [opened(chance) for _ in range(count // 20)]
        return {"rate": float(np.mean(ever)), "beside": float("nan")}
    gate, sample, parameters = ARMS[arm]
    accepted, beside = [], []
    for number in range(count):
        evidence = sample(chance)
        accepted.append(gates.decide(gate, evidence, parameters).accepted)
        if number < count // 10:
            beside.append(gates.null_rate(gate, evidence, parameters, 20))
    return {"rate": float(np.mean(accepted)), "beside": float(np.mean(beside))}


def claim(quick: bool) -> Claim:
    """One arm a gate and size of evidence."""
    names: Any = (*ARMS, EVER)
    return Claim(
        name="agents_null_rates",
        arms=names,
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="rate",
        larger=False,
        shown=("rate", "beside"),
        drawn=("rate",),
        against="",
        seeds=2 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
