"""Does plain GRPO win where the student solves 2 % and the teacher only 54 %?

python -m experiments.claims.x05_residual_weak --workdir /tmp/claims

The task of `x04_residual_sparse` from other moments of the same supervised run. This is the start
of a counter-result that others report, in which GRPO came first. 200 takes of two updates.

Look at: the solve rate at the end, and its mean over the run, beside GRPO's.
Expect: GRPO first, the residual advantage behind it, the more it counts the farther.
Result: the opposite. 10 seeds, means with 95 % t intervals, commit 6cd1f6b, 2026-11-30. Solved:
GRPO .359 [.135, .584], RA with lambda 1 .959 [.942, .977] (its rate is the edge of the grid) and 3
.964 [.941, .987]. GRPO has no difference in .788 of its groups: nothing here lets it be first.
"""

import functools

from experiments.claims.protocol import Claim, main
from experiments.claims.x04_residual_sparse import SHOWN, Start, outcome


def claim(quick: bool) -> Claim:
    """A student that solves few, under a middling teacher."""
    start = Start(0.0, 0.02, 0.54, takes=20 if quick else 200)
    return Claim(
        name="x05_residual_weak",
        arms=("GRPO", "RA 1", "RA 3"),
        run=functools.partial(outcome, start),
        rates=(2e-3,) if quick else (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        choose="solved",
        larger=True,
        shown=SHOWN,
        drawn=("solve rate",),
        against="GRPO",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
