"""Does the residual advantage still help where the verifier already speaks?

python -m experiments.claims.x05_residual_dense --workdir /tmp/claims

The task of `x04_residual_sparse` from later moments of the same supervised run: the student solves
30 % of the problems, the teacher 54 %, so the student soon passes it. 200 takes of two updates.
`x05_residual_weak` starts where the student solves 2 %.

Look at: the solve rate at the end, and its mean over the run, beside GRPO's.
Expect: the residual advantage is not better than GRPO, and worse the more it counts: it holds the
student to a teacher that it has passed, the more so once all rewards of a group are equal.
Result: as expected. 10 seeds, means with 95 % t intervals, commit 6cd1f6b, 2026-11-30. Solved: GRPO
.966 [.947, .985]; RA with lambda 1 .968 [.950, .987] and 3 .975 [.957, .994] are level with it
(differences .002 [-.021, .026], .009 [-.022, .041]), with 10 it is worse by .099 [.055, .143]; OPD
.592 [.565, .619]. Mean over the run: .821, .845, .776, .683, .533. The rate of lambda 3 is the edge
of the grid.
"""

import functools

from experiments.claims.protocol import Claim, main
from experiments.claims.x04_residual_sparse import SHOWN, Start, outcome


def claim(quick: bool) -> Claim:
    """A student that solves some, under a middling teacher."""
    start = Start(0.0, 0.3, 0.54, takes=20 if quick else 200)
    return Claim(
        name="x05_residual_dense",
        arms=("GRPO", "RA 1", "RA 3", "RA 10", "OPD"),
        run=functools.partial(outcome, start),
        rates=(2e-3,) if quick else (1e-3, 2e-3, 4e-3, 8e-3),
        choose="solved",
        larger=True,
        shown=SHOWN,
        drawn=("solve rate",),
        against="GRPO",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
