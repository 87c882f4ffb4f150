"""DENSE: does feedback from one old attempt, whose outcome nobody tells, help the next attempt?

python -m experiments.claims.agents_dense --workdir /tmp/agents_dense

A planted terminal (jaxrl/agents/feedback_world.py): one of 3 routes makes the JSON file, one of 4
the plot, ``budget`` actions. 120 old attempts a seed, each with 3 receivers for every method, all
from the same fresh state. Numbers are shares of strict passes: without feedback, with the last 3
steps as they are, with a flat summary, with the true verdict, with DENSE, and with DENSE whose
parents are closed by a child (``no rule``). ``held out``: DENSE less nothing, on other tasks.
``lost``: old attempts that passed and receivers that failed, told the verdict and under DENSE.

By hand, without feedback and with DENSE: .25 and .75 at budget 3, .917 and 1 at 6.

Expect: DENSE > raw > flat; without the parent's rule receivers stop early (.25 at budget 3, the
share of old attempts that passed); at budget 7 everything passes that tries.
Result: as expected, except that raw is level with DENSE once actions are plenty, and ahead of it
with a credulous reader. 20 seeds, means with 95 % t intervals, commit fe2cbba, 2026-11-30. ``lost``
is 0 under DENSE with a sound reader.

| arm | none | raw | flat | verdict | DENSE | no rule | held out |
|---|---|---|---|---|---|---|---|
| budget 3 | .248 | .643 | 0 | .184 | .762 [.746, .777] | .258 | .509 [.490, .529] |
| 5 % misgrouped | .248 | .643 | 0 | .184 | .750 [.733, .768] | .258 | .499 [.478, .520] |
| half credulous | .248 | .643 | 0 | .184 | .601 [.578, .625] | .232 | .362 [.341, .382] |
| budget 4 | .497 | .961 | 0 | .243 | 1 | .507 | .490 [.478, .502] |
| budget 6 | .921 | 1 | 0 | .074 | 1 | .920 | .078 [.071, .084] |
| budget 7 | 1 | 1 | 0 | 0 | 1 | 1 | 0 |

DENSE - raw: .118 [.099, .137], .107 [.087, .127], -.042 [-.067, -.017], .039 [.037, .042], 0, 0.

A flat summary passes nowhere: the receiver believes that it is done and does nothing, though its
folder is fresh; so does one that is told that it passed (.258 of all attempts lost at budget 3).
"""

import functools

import numpy as np

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive

ARMS = {
    "budget 3": {"misgroup": 0.0},
    "budget 3, 5 % misgrouped": {},
    "budget 3, half credulous": {"credulous": 0.5},
    "budget 4": {"budget": 4, "misgroup": 0.0},
    "budget 6": {"budget": 6, "misgroup": 0.0},
    "budget 7": {"budget": 7, "misgroup": 0.0},
}
METHODS = {
    "none": "none",
    "raw": "raw",
    "flat": "flat",
    "verdict": "verdict",
    "DENSE": "dense",
    "no rule": "dense_no_parent_rule",
}


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One comparison of all methods."""
    config = agent_runs.settings("dense", seed, quick, {}, ARMS[arm])
    done = drive.run("dense", config, None)
    told = [line.asked for line in done.journal.of("measure")]

    def mean(name: str) -> float:
        return float(np.mean([one[name] for one in told]))

    passes = {shown: mean(f"pass/{method}") for shown, method in METHODS.items()}
    return {
        **passes,
        "DENSE - raw": passes["DENSE"] - passes["raw"],
        "held out": mean("held_out/dense") - mean("held_out/none"),
        "lost, verdict": mean("regressed/verdict"),
        "lost, DENSE": mean("regressed/dense"),
    }


def claim(quick: bool) -> Claim:
    """Six arms."""
    return Claim(
        name="agents_dense",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="DENSE",
        larger=True,
        shown=(*METHODS, "DENSE - raw", "held out", "lost, verdict", "lost, DENSE"),
        drawn=("none", "DENSE"),
        against="",
        seeds=2 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
