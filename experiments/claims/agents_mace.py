"""MACE: is it worth learning pairs of (combination, form) rather than the best of each?

python -m experiments.claims.agents_mace --workdir /tmp/agents_mace

Two stages, two combinations and three forms with a planted reversal (jaxrl/agents/mace_world.py);
n tasks, each under every pair, then the choice of each coupler; numbers are the chosen pairs'
expected score by the truth of the world. ``joint``, ``fixed`` and ``separate`` learn from each
stage's own return, ``common`` jointly from the trace's, as published. ``claimed``: whether the last
trial of 400 fresh tasks says that joint beats separate. ``no interaction``: the same averages, no
reversal.

Expect: joint > fixed > separate, the more so the more tasks; without the interaction joint ties
with separate, and no win is claimed there.
Result: as expected. 40 seeds, means with 95 % t intervals; commit f010102, 2026-11-30. (In brackets
what notes on an earlier toy say.)

| tasks a pair | joint | fixed | separate | common | claimed |
|---|---|---|---|---|---|
| 12 | .784 [.772, .797] (.789) | .777 (.776) | .764 [.751, .778] (.764) | .779 | .35 |
| 48 | .803 [.797, .808] (.800) | .785 (.788) | .772 [.767, .778] (.767) | .789 | .35 |
| 192 | .811 [.806, .816] (.811) | .790 (.790) | .765 [.761, .768] (.761) | .805 | .65 |
| 48, no interaction | .795 [.788, .803] | .785 | .797 [.791, .803] | .775 | .125 [.018, .232] |
| 192, no interaction | .807 [.804, .810] | .790 | .809 [.807, .811] | .797 | .025 |

Joint less separate: .020 [.004, .036], .031, .047 [.041, .052], and -.002 [-.010, .007] and -.002
[-.006, .002] without the interaction. The common return, which mixes in the other stage, costs as
much as most of the tasks. A trial of 400 tasks is too small to see a gain of .03 more often than
not.
"""

import functools
from typing import Any

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive
from jaxrl.agents.journal import Journal

ARMS = {
    "n = 12": (12, 1.0),
    "n = 48": (48, 1.0),
    "n = 192": (192, 1.0),
    "n = 48, no interaction": (48, 0.0),
    "n = 192, no interaction": (192, 0.0),
}


def calibrated(
    quick: bool, tasks: int, interaction: float, returns: str, seed: int, **more: Any
) -> Any:
    """(run, system, world) after one round in which every pair is tried."""
    system = {"calibration": 4 if quick else tasks, "extracted": 0, "returns": returns, **more}
    world = {"interaction": interaction}
    config = agent_runs.settings("mace", seed, quick, system, world, rounds=1)
    made: Any = drive.parts("mace", config)
    run = drive.begin("mace", config, Journal(None), made)
    drive.drive(run, made[0], 1)
    return run, *made


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """All couplers on one calibration."""
    tasks, interaction = ARMS[arm]
    found: dict[str, float] = {}
    for returns in ("stage", "common"):
        more = {} if returns == "stage" else {"trial": 0}
        run, system, world = calibrated(quick, tasks, interaction, returns, seed, **more)
        operations = world.operations(world.task(run.splits["train"][0]))
        for coupler in ("joint", "fixed", "separate") if returns == "stage" else ("joint",):
            name = coupler if returns == "stage" else "common"
            found[name] = world.value(system.choose(run, operations, coupler, 0.0))
        if returns == "stage":
            (line,) = (x for x in run.journal.of("gate") if x.asked["operator"] == "trial")
            found["claimed"] = float(line.asked["accepted"])
    found["joint - separate"] = found["joint"] - found["separate"]
    return found


def claim(quick: bool) -> Claim:
    """Five arms."""
    return Claim(
        name="agents_mace",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="joint",
        larger=True,
        shown=("joint", "fixed", "separate", "common", "joint - separate", "claimed"),
        drawn=("joint", "joint - separate"),
        against="",
        seeds=2 if quick else 40,
    )


if __name__ == "__main__":
    main(claim, __doc__)
