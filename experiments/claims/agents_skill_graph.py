"""GraphSkillEvo: does a population beat one climber at equal rollouts, and what is selection worth?

python -m experiments.claims.agents_skill_graph --workdir /tmp/agents_skill_graph

6 task types with workflows of 4 over 12 nodes (jaxrl/agents/graph_world.py); five generations of 4,
15 training tasks each, and V validation tasks. A writer repairs what failed in 80 % of its edits
and spoils something in 20 %. Each seed runs all methods from the same first document: the
population, one with mutations only, a strict-improvement climber on as many rollouts, and both
with 4 edits a child falling to 2 (SkillOpt's schedule). Numbers are the selected document's
worth by the truth of the world; ``bias`` is its validation score less that. ``nobody can repair``:
edits only spoil.

Expect: no method of populations beats the climber; the bias shrinks with V; where nobody can
repair, validation rises and worth does not.
Result: as expected, and more so. 40 seeds, means with 95 % t intervals; commit 0ef8391, 2026-11-30;
the first document is worth .323 [.298, .348].

| | V = 18 | V = 40 | V = 200 | 18, no repair | 200, no repair |
|---|---|---|---|---|---|
| population | .399 [.362, .435] | .424 | .476 [.441, .512] | .324 | .348 |
| mutations only | .394 | .431 | .487 | .326 | .346 |
| climber | .425 [.368, .483] | .539 | .820 [.742, .897] | .319 | .324 |
| population, 4-2 edits | .522 | .551 | .666 | .329 | .371 |
| climber, 4-2 edits | .802 [.740, .864] | .928 | .998 [.995, 1.001] | .317 | .335 |
| less climber | -.027 [-.072, .019] | -.115 [-.166, -.063] | -.343 [-.403, -.284] | .005 | .024 |
| the same, 4-2 | -.280 [-.350, -.210] | -.377 | -.332 [-.373, -.290] | .012 | .036 |
| bias, population | .171 [.142, .200] | .109 [.091, .127] | .024 [.012, .035] | .158 | .027 |
| bias, climber | .187 [.156, .218] | .110 | .016 [.006, .026] | .103 | .026 |
| rollouts | 597, 551 | 953, 930 | 3550, 3575 | 458, 402 | 1995, 1320 |

Notes on an earlier toy have -.004, -.022 and -.124 for the difference and .196, .115, .034 for the
bias: the same signs and sizes of the bias, a larger loss here, because a climber takes four times
as many steps one after the other on the same rollouts, and only half of a population's children may
touch nodes and workflows, where most faults are. Crossover adds nothing that can be seen. Where
nobody can repair, changes that are lucky are selected: .024 [.011, .037] more at V = 200.
"""

import functools
from typing import Any

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive
from jaxrl.agents.journal import Journal

MUTATIONS = ("mutate_other", "mutate_graph", "mutate_other", "mutate_graph")
ARMS: dict[str, tuple[int, dict[str, Any]]] = {
    "V = 18": (18, {}),
    "V = 40": (40, {}),
    "V = 200": (200, {}),
    "V = 18, nobody can repair": (18, {"fix": 0.0}),
    "V = 200, nobody can repair": (200, {"fix": 0.0}),
}
METHODS: dict[str, dict[str, Any]] = {
    "population": {},
    "mutations": {"operators": MUTATIONS},
    "climber": {"population": 1, "climber": True},
    "population 4-2": {"edits": 4, "least_edits": 2},
    "climber 4-2": {"population": 1, "climber": True, "edits": 4, "least_edits": 2},
}


def one(
    quick: bool, method: str, size: int, changes: dict[str, Any], seed: int
) -> dict[str, float]:
    """What one method selects, and what that is worth."""
    climbs = METHODS[method].get("climber", False)
    size = 6 if quick else size
    rounds = 2 if quick else (24 * size + 300 - size) // (size + 15) if climbs else 5
    world = {**changes, "validation": size, "held_out": 1}
    config = agent_runs.settings("skill_graph", seed, quick, METHODS[method], world, rounds=rounds)
    made: Any = drive.parts("skill_graph", config)
    run = drive.begin("skill_graph", config, Journal(None), made)
    drive.drive(run, made[0], config.rounds)
    best = made[0].best(run)
    worth = made[1].value(run.shelf.get(best).body)
    return {
        "start": made[1].value(made[1].first(1)[0]),
        "worth": worth,
        "bias": made[0]._hard(run, best) - worth,
        "rollouts": made[0].spent,
    }


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """All methods on one seed."""
    size, changes = ARMS[arm]
    found = {method: one(quick, method, size, changes, seed) for method in METHODS}
    base = found["climber"]["worth"]
    return {
        "start": found["population"]["start"],
        **{method: found[method]["worth"] for method in METHODS},
        "population - climber": found["population"]["worth"] - base,
        "the same, 4-2": found["population 4-2"]["worth"] - found["climber 4-2"]["worth"],
        "mutations - population": found["mutations"]["worth"] - found["population"]["worth"],
        "bias": found["population"]["bias"],
        "climber's bias": found["climber"]["bias"],
        "rollouts": found["population"]["rollouts"],
        "climber's rollouts": found["climber"]["rollouts"],
    }


SHOWN = ("start", *METHODS, "population - climber", "the same, 4-2", "mutations - population")


def claim(quick: bool) -> Claim:
    """Five arms."""
    return Claim(
        name="agents_skill_graph",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="population",
        larger=True,
        shown=(*SHOWN, "bias", "climber's bias", "rollouts", "climber's rollouts"),
        drawn=("population - climber", "bias"),
        against="",
        seeds=2 if quick else 40,
    )


if __name__ == "__main__":
    main(claim, __doc__)
