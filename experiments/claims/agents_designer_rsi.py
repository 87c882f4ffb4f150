"""Designer-RSI: do widening and deepening add up, and what do its gate and its successes buy?

python -m experiments.claims.agents_designer_rsi --workdir /tmp/agents_designer_rsi

24 sub-tasks with Zipf traffic, two contexts, three steps; five rounds of 300 requests, a scripted
author that spoils a step of 35 % of its candidates and overlooks the context in 30 % of its edits
(jaxrl/agents/skills_world.py). ``end`` is the chance that a request is met, by the truth of the
world; ``lost``: whether a round lost more than .01; ``harmful``: share of shipped changes that made
the library worse. ``sound`` arms have an author without errors: the gate can buy nothing there.

Expect: both > either > cold; the gate removes lost rounds, successes in it the rest; sound arms
are level.
Result: as expected. 40 seeds, means with 95 % t intervals, about 2.5 s a run; commit 02a43a1,
2026-11-30. (In brackets what notes on an earlier toy say, whose world is another one; there the
start is .411.)

| arm | start | end | lost | shipped | by chance | harmful |
|---|---|---|---|---|---|---|
| both | .404 [.380, .427] | .915 [.910, .920] (.887) | 0 (0) | .381 | .142 | .005 [.001, .009] |
| cold | .404 | .404 (.411) | 0 (0) | - | - | - |
| widen only | .404 | .585 [.562, .607] (.626) | 0 (0) | .676 | .209 | .006 [-.001, .013] |
| deepen only | .404 | .699 [.696, .701] (.583) | 0 (.05) | .333 | .121 | .002 [-.002, .005] |
| no successes | .404 | .903 [.892, .913] (.875) | .05 (.08) | .410 | .180 | .007 [.002, .012] |
| no gate | .404 | .788 [.756, .819] (.788) | .825 [.702, .948] (.48) | 1 | 1 | .151 [.138, .165] |
| two won | .404 | .905 [.895, .915] | 0 | .324 | .076 | .001 [-.001, .004] |
| both, sound | .404 | .927 [.927, .927] | 0 | .435 | .118 | 0 |
| no gate, sound | .404 | .927 [.927, .927] | 0 | 1 | 1 | 0 |

The gate's own rate of chance, on the evidence that it saw, is 14 %: 38 % of the candidates ship.
Successes in the gate are worth .012 [.001, .023]; asking for two wins halves the rate of chance and
costs .010 [.001, .019]. Without a gate more rounds lose here than in the notes: every change is
shipped, and up to 24 skills are changed a round.
"""

import functools

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents.run import Run

ARMS = {
    "both": {},
    "cold": {"widen": False, "deepen": False},
    "widen only": {"deepen": False},
    "deepen only": {"widen": False},
    "no success replay": {"successes": 0},
    "no gate": {"gated": False},
    "two won": {"min_won": 2},
    "both, sound": {},
    "no gate, sound": {"gated": False},
}
SOUND = {"corruption": 0.0, "careless": 0.0, "flip": 0.0, "tie": 0.0}


def truth(run: Run) -> float:
    """Chance that a request is met under the active skills."""
    bodies = [run.shelf.get(pin).body for pin in run.shelf.active().items()]
    return run.world.value({body["label"]: body for body in bodies})


def harmful(run: Run, start: float) -> float:
    """Share of shipped changes after which the truth was lower than before; 0 if none shipped."""
    bodies, now, worse, shipped = {}, start, 0, 0
    for line in run.journal.of("status"):
        if line.asked["status"] != "active":
            continue
        body = run.shelf.get(tuple(line.asked["artefact"])).body
        bodies[body["label"]] = body
        if line.asked["why"] != "documented":
            value = run.world.value(bodies)
            worse, shipped, now = worse + (value < now - 1e-9), shipped + 1, value
    return worse / max(shipped, 1)


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One library, from its documented skills on."""
    world = SOUND if arm.endswith("sound") else {}
    config = agent_runs.settings("designer_rsi", seed, quick, ARMS[arm], world, null_draws=50)
    done, told = agent_runs.followed("designer_rsi", config, truth)
    first = done.world.documented()
    start = done.world.value({one["label"]: one["body"] for one in first})
    curve = [start, *told]
    gates = [line.asked for line in done.journal.of("gate")]
    rates = [gate["null"]["rate"] for gate in gates]
    return {
        "start": start,
        "end": curve[-1],
        "lost": float(any(b < a - 0.01 for a, b in zip(curve, curve[1:], strict=False))),
        "shipped": sum(gate["accepted"] for gate in gates) / max(len(gates), 1),
        "by chance": sum(rates) / max(len(rates), 1),
        "harmful": harmful(done, start),
        "success": curve,
    }


def claim(quick: bool) -> Claim:
    """Nine arms."""
    return Claim(
        name="agents_designer_rsi",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="end",
        larger=True,
        shown=("start", "end", "lost", "shipped", "by chance", "harmful"),
        drawn=("success",),
        against="both",
        seeds=2 if quick else 40,
    )


if __name__ == "__main__":
    main(claim, __doc__)
