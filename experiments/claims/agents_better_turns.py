"""Better Turns with scripted policies: what teacher forcing says, and what a conversation takes.

python -m experiments.claims.agents_better_turns --workdir /tmp/agents_better_turns

Policies whose texts are always right and whose calls are right in 38.9 % (early) and 93.3 % (late)
of their decisions; half of the wrong calls are answered ERR and tried again, twice at most; 200
held-out conversations of three look-ups, or of one. ``within``: of calls on own history, right in
the end; ``bound``: q^steps, q = p (1 + v + v^2) the chance within three tries, v = (1 - p) / 2.
``gap`` is L2 - L4. "always right" and "one look-up" are the ends at which it goes away.

Expect: L2 .69 early at L4 near .16; L4 = bound up to chance; L5 below L4; no gap for calls that are
always right, and L4 above L3 for one look-up (retries).
Result: as expected. 20 seeds, means with 95 % t intervals, 0.5 to 1.8 s a run; commit 69f0b72,
2026-11-30. Early: L1 1, L2 .696 [.691, .702], L3 .392 [.382, .403], L4 .156 [.142, .169] (bound
.161), L5 .063 [.053, .072]; late: .965, .930, .900 [.890, .909] (bound .900), .813 [.802, .825].
Always right: 1 on every layer. One look-up: early L4 .557 [.544, .570] above its L3 .387, late
.965 and no gap (-.001 [-.008, .007]). The notes' MLP had .050 and .745 in closed loop at the same
two accuracies of calls; ours has retries, independent errors and half of them told of, and without
a retry the cubes are .059 and .812.
"""

import functools

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive
from jaxrl.agents.layers import LAYERS

ARMS = {  # right calls, look-ups
    "early": (0.389, 3),
    "late": (0.933, 3),
    "always right": (1.0, 3),
    "early, one look-up": (0.389, 1),
    "late, one look-up": (0.933, 1),
}
SILENT = 0.5


def bound(right: float, steps: int) -> float:
    """Chance that all calls are right, each within three tries."""
    seen = (1 - right) * (1 - SILENT)
    return (right * (1 + seen + seen**2)) ** steps


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One policy."""
    right, steps = ARMS[arm]
    world = {"steps": steps, "policies": ((arm, 1.0, right, SILENT),)}
    config = agent_runs.settings("better_turns", seed, quick, {}, world, rounds=1)
    done = drive.run("better_turns", config, None)
    (table,) = (done.records[name] for name in done.records if name.endswith("layers.json"))
    means = {name: table[name]["mean"] for name in (*LAYERS, "within")}
    return {**means, "bound": bound(right, steps), "gap": means["L2"] - means["L4"]}


def claim(quick: bool) -> Claim:
    """Five arms."""
    return Claim(
        name="agents_better_turns",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="L4",
        larger=True,
        shown=(*LAYERS, "within", "bound", "gap"),
        drawn=("L2", "L4"),
        against="early",
        seeds=2 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
