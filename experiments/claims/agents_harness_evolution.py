"""Harness Evolution: do gated edits mend what a harness can, and what of it can weights take over?

python -m experiments.claims.agents_harness_evolution --workdir /tmp/agents_harness_evolution

A planted world (jaxrl/agents/cross_world.py) with faults of the format, of loops and of a page that
is not shown; a scripted proposer, of whose proposals a fifth changes nothing and a tenth reads the
verifier; 72 questions, 4 repeats; at last weights tuned on what passed, and the 2x2 on 72 held-out
questions. ``harness``: evolved less seed, base weights; ``taken``: trained less base under the seed
harness; ``left``: evolved less seed, trained weights; ``both``: the interaction. ``shuffled`` and
``seed traces``: as ``taken``, for the two controls. ``A/A``: the seed's cell measured again, less
itself; ``outside``: whether that is more than the calibrated noise. ``shipped``: accepted share of
the edits that were tried; ``noops``: edits shipped that change nothing but the note. ``F4 first``
and ``F4 fired``: change of the share of episodes with that label, from before the first edit to
after the last.

Arms: all faults; one at a time, where every answer is known but for the fault; none; a proposer of
nothing, with the gate and without; one that goes by first labels.

Expect: the format is taken over as a whole, the page not at all; where nothing is wrong, no effect
of the harness; no-ops ship in 2.5 % of cases; F4 grows as a first label although no answer got
worse; A/A stays inside the noise. Shuffled answers do not pass the base where content is all there
is to learn.
Result: as expected but for the shuffled control, and the seed's own traces teach as much. 20 seeds,
means with 95 % t intervals, commit 51c269e, 2026-11-30.

| arm | harness | taken | left | shuffled | seed traces |
|---|---|---|---|---|---|
| all faults | .514 [.473, .554] | .323 [.306, .341] | .258 [.220, .296] | .098 | .313 |
| no page | .366 [.334, .398] | .442 [.414, .471] | .027 [.014, .039] | .097 | .433 |
| by first labels | .527 [.497, .557] | .324 [.307, .342] | .272 [.245, .298] | .097 | .314 |
| format only | .467 [.456, .479] | .477 [.464, .489] | .020 [.016, .024] | -.052 | .477 |
| loops only | .293 [.280, .305] | .286 [.273, .299] | .011 [.007, .015] | -.256 | .287 |
| page only | .264 [.241, .287] | .006 [-.001, .012] | .258 [.235, .282] | -.337 | -.018 |
| no fault | -.006 [-.017, .005] | .089 [.072, .105] | -.005 [-.016, .007] | -.278 | .086 |
| proposes nothing | -.002 [-.015, .010] | .242 [.223, .261] | -.007 [-.019, .004] | .139 | .238 |

A/A differs from 0 by at most .004 in every arm, and lies outside the noise in 5 of 180 runs. No-ops
ship in .008 [-.009, .026] of cases, without the gate always. With no page, F4 as a first label
grows by .254 [.224, .283] while it fires as often as before: .001 [-.007, .009]. Shuffled answers
still show the format and no loops: where these can be learnt they pass the base (.098 [.082, .114]
with all faults), so they are no placebo for them. What is taken over beyond the harness's own
effect is content.
"""

import functools

import numpy as np

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive

SOUND = {"strict": 1.0, "loop": 0.0, "hidden": 0.0}
KNOWN = {**SOUND, "knows": 0.99}
IDLE = {"idle": 1.0, "cheat": 0.0}
ARMS = {  # system, world
    "all faults": ({}, {}),
    "all faults, no page": ({}, {"hidden": 0.0}),
    "all faults, by first labels": ({}, {"sees": "first"}),
    "format only": ({}, {**KNOWN, "strict": 0.5}),
    "loops only": ({}, {**KNOWN, "loop": 0.3}),
    "page only": ({}, {**KNOWN, "hidden": 0.3}),
    "no fault": ({}, SOUND),
    "proposes nothing": ({}, IDLE),
    "proposes nothing, no gate": ({"gated": False}, IDLE),
}
SHOWN = ("harness", "taken", "left", "both", "shuffled", "seed traces", "A/A", "outside")
SHOWN += ("shipped", "noops", "F4 first", "F4 fired")


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """Edits, training, and the 2x2."""
    system, world = ARMS[arm]
    config = agent_runs.settings("harness_evolution", seed, quick, system, world)
    done = drive.run("harness_evolution", config, None)
    told = [line.asked for line in done.journal.of("measure")]
    gates = [line.asked for line in done.journal.of("gate")]
    last, before, after = told[-1], told[0], told[-2]
    pins = [("harness", int(gate["candidate"][-4:])) for gate in gates]
    bodies = [(done.shelf.get(pin), done.shelf.get(done.shelf.get(pin).parents[0])) for pin in pins]
    empty = [
        all(new.body[f] == old.body[f] for f in ("pages", "repair", "guard")) for new, old in bodies
    ]
    shipped = [gate["accepted"] for gate in gates]
    return {
        "harness": last["trained/harness"],
        "taken": last["trained/internalised"],
        "left": last["trained/residual_harness"],
        "both": last["trained/interaction"],
        "shuffled": last["shuffled/internalised"],
        "seed traces": last["seed_traces/internalised"],
        "A/A": last["cells/aa_gap"],
        "outside": float(abs(last["cells/aa_gap"]) > last["dev/noise"]),
        "shipped": float(np.mean(shipped)) if shipped else 0.0,
        "noops": float(sum(a and e for a, e in zip(shipped, empty, strict=True))),
        "F4 first": after["first/F4"] - before["first/F4"],
        "F4 fired": after["fired/F4"] - before["fired/F4"],
    }


def claim(quick: bool) -> Claim:
    """Nine arms."""
    return Claim(
        name="agents_harness_evolution",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="harness",
        larger=True,
        shown=SHOWN,
        drawn=("harness", "taken", "left"),
        against="",
        seeds=2 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
