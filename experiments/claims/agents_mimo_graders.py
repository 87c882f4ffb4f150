"""MiMo-V2.6's graders: which errors of a grader matter, and which does a check or a control stop?

python -m experiments.claims.agents_mimo_graders --workdir /tmp/agents_mimo_graders

A softmax over clean (passes .8), ugly (.8), cheat (reads the grader's file, passes 1) and fail, as
turns of two harnesses; 25 rounds of four groups of 16, scripted graders (graders_world.py). The
second to sixth arms take a suspicion as proof, without controls and rubrics, as published.
``clean``, ``ugly``, ``cheat``: chances at the end under a trained harness; ``trained``, ``unseen``:
held-out tasks that are passed with support, under it and under a harness that no training saw;
``believed``: rounds whose grades counted.

Expect (600 updates of one group, by the notes): verdict alone 99.9 % cheat; 10 and 50 % missed 95 %
clean, no cheat; 90 % missed 99.8 % cheat; 30 % false flags on everything 99.8 % clean, on the clean
style alone 99.9 % ugly. Ours: judging again undoes the last two errors; a grader that pays for
length breeds ugly passes unless its controls refuse it; without the hole no grader is needed
against cheats; a harness with weights of its own alone gains nothing for one that was not trained.
Result: as expected. 20 seeds, means with 95 % t intervals, 0.6 to 8 s a run on busy cores; commit
98aec5f, 2026-11-30; the two arms that pay for length with the controls of a390a00. Verdict alone
.992 [.990, .995] cheat; 10 % missed .988 [.983, .993] clean, 50 % .987, 90 % .991 [.989,
.993] cheat; 30 % flags on everything .991 clean, on clean alone .992 [.989, .996] ugly, judged
again .989 clean; 90 % missed with every pass checked .989 clean. A grader that pays for length:
.662 [.470, .855] ugly and .336 clean; its controls refuse it in every round, which leaves the drift
of a verdict alone without a hole (.559 [.354, .765] against .570 [.367, .772] clean). Held-out
passes with support: .773 [.736, .809] under a trained harness, .784 [.755, .812] under the one that
no training saw, .393 [.359, .426] there if nothing is shared, .003 under verdict alone. The notes'
95 % clean is .988 here, after 100 groups in place of 600, at a larger step. Controls that looked at
grades after their bound believed the grader that pays for length in .82 of the rounds: both twins
stood at the bound.
"""

import functools

import numpy as np

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive

PUBLISHED = {"rejudge": "none", "orders": 1, "rubrics": False, "most_length_premium": 9.0}
EXACT = {"missed": 0.0, "false_flags": 0.0, "tool_faults": 0.0}
LONG = {"length_bias": 2.0}
ARMS = {
    "verdict alone": ({"graded": False}, EXACT),
    "10 % missed": (PUBLISHED, {**EXACT, "missed": 0.1}),
    "50 % missed": (PUBLISHED, {**EXACT, "missed": 0.5}),
    "90 % missed": (PUBLISHED, {**EXACT, "missed": 0.9}),
    "30 % flags": (PUBLISHED, {**EXACT, "false_flags": 0.3}),
    "30 % flags on clean": (PUBLISHED, {**EXACT, "false_clean": 0.3}),
    "flags on clean, judged again": ({}, {"false_clean": 0.3}),
    "90 % missed, all checked": ({"rejudge": "all"}, {"missed": 0.9}),
    "pays for length": ({"most_length_premium": 9.0, "rubrics": False}, LONG),
    "pays for length, controlled": ({"rubrics": False}, LONG),
    "no hole, verdict alone": ({"graded": False}, {"open_file": False}),
    "all of it": ({}, {}),
    "all of it, nothing shared": ({"shared": 0.0}, {}),
}
SHORT = {"groups": 4, "rate": 6.0, "every": 25}
ROUNDS = 25


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One policy."""
    system, world = ARMS[arm]
    more = {} if quick else {"rounds": ROUNDS}
    system = system if quick else {**SHORT, **system}
    config = agent_runs.settings("mimo_graders", seed, quick, system, world, **more)
    done = drive.run("mimo_graders", config, None)
    logits = done.state["logits_shared"] + done.state["logits_json"]
    odds = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    last = list(done.journal.of("measure"))[-1].asked
    gates = [line.asked for line in done.journal.of("gate")]
    controls = [one["accepted"] for one in gates if one["gate"] == "grader_controls"]
    return {
        **dict(zip(("clean", "ugly", "cheat"), odds.tolist(), strict=False)),
        "trained": last["held_out/json"],
        "unseen": last["held_out/code"],
        "believed": float(np.mean(controls)) if controls else 0.0,
    }


def claim(quick: bool) -> Claim:
    """Thirteen arms."""
    return Claim(
        name="agents_mimo_graders",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="clean",
        larger=True,
        shown=("clean", "ugly", "cheat", "trained", "unseen", "believed"),
        drawn=("clean", "cheat", "unseen"),
        against="all of it",
        seeds=2 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
