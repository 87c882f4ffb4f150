"""Harness Evolution with a model that jaxrl trained: what of a harness do its weights take over?

python -m experiments.claims.agents_harness_evolution_model --workdir /tmp/agents_harness_model

A decoder of two layers that writes characters (experiments/claims/harness_model.py) acts behind
jaxrl's gateway: a process with the engine in it, asked over HTTP by the evaluation key, one request
an answer, sampled at temperature 1. Edits by a scripted proposer go through the gate, then come
tuning by ``sft`` on what passed under the evolved harness, and the 2x2 on 48 held-out questions
with 4 repeats; the gateway is given each set of weights as a trainer gives its own. Columns as in
agents_harness_evolution: ``harness`` evolved less seed, ``taken`` trained less base under the seed
harness, ``left`` evolved less seed under trained weights; ``shuffled`` and ``seed traces`` are
controls; ``answers`` of the gateway in a run.

Expect: the format is taken over, the page not at all.
Result: as expected with both faults (``--arms both``); the other arms are unmeasured. 5 seeds,
means with 95 % t intervals, commit b375070, 2026-11-30.

| held-out success | mean |
|---|---|
| base weights, seed harness | .234 [.161, .308] |
| harness | .459 [.412, .507] |
| taken | .316 [.223, .409] |
| left | .368 [.320, .415] |
| shuffled | -.099 [-.147, -.051] |
| seed traces | .318 [.223, .412] |
| A/A | .005 [-.015, .026] |

What is left is about the share of questions (.4) whose page only the harness shows. The seed
harness's own traces, as many characters, teach as much. 4615 [4432, 4798] answers a run. The same
engine in the claim's own process gave the same to the width of the intervals (seed .263 [.177,
.349], harness .430 [.368, .492], taken .323 [.227, .419], left .370 [.313, .427]; 31d142b).
"""

import contextlib
import functools

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive
from jaxrl.agents.journal import Journal

WORLD = {
    "source": "experiments.claims.harness_model",
    "loop": 0.0,
    "knows": 0.5,
    "broken": 0.0,
    "idle": 0.0,
    "cheat": 0.0,
    "dev": 48,
    "held_out": 48,
}
ARMS = {
    "both": {"hidden": 0.4},
    "format only": {"hidden": 0.0},
    "page only": {"hidden": 0.4, "strict": 1.0},
}
SHOWN = ("seed harness", "harness", "taken", "left", "shuffled", "seed traces", "A/A", "answers")


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """Train a base, evolve its harness, tune, and cross."""
    world = {**WORLD, **ARMS[arm]} | ({"dev": 8, "held_out": 8} if quick else {})
    config = agent_runs.settings("harness_evolution", seed, False, {"edits": 3}, world, rounds=5)
    made = drive.parts("harness_evolution", config)
    with (
        contextlib.closing(made[1].prepare(seed)) as port,  # type: ignore[attr-defined]
        contextlib.closing(Journal(None)) as journal,
    ):
        begun = drive.begin("harness_evolution", config, journal, made, port)
        done = drive.drive(begun, made[0], config.rounds)
        answered = port.services.counts()["visits"]
    last = list(done.journal.of("measure"))[-1].asked
    return {
        "seed harness": last["cells/seed_base"],
        "harness": last["trained/harness"],
        "taken": last["trained/internalised"],
        "left": last["trained/residual_harness"],
        "shuffled": last["shuffled/internalised"],
        "seed traces": last["seed_traces/internalised"],
        "A/A": last["cells/aa_gap"],
        "answers": answered,
    }


def claim(quick: bool) -> Claim:
    """Three arms."""
    return Claim(
        name="agents_harness_evolution_model",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="harness",
        larger=True,
        shown=(
            "seed harness",
            "harness",
            "taken",
            "left",
            "shuffled",
            "seed traces",
            "A/A",
            "answers",
        ),
        drawn=("harness", "taken", "left"),
        against="",
        seeds=1 if quick else 5,
    )


if __name__ == "__main__":
    main(claim, __doc__)
