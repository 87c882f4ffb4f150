"""Does the residual advantage still help where the verifier already speaks?

python -m experiments.claims.x05_residual_dense --workdir /tmp/claims

The task of `x04_residual_sparse` from later moments of the same supervised run: the student solves
2 % of the problems, the teacher only 54 %. 150 takes of two updates.

Look at: the solve rate at the end, and its mean over the run, beside GRPO's.
Expect: GRPO is not worse, and the stronger the residual the more it is held to a teacher that it has
passed: the residual advantage is for silent verifiers or good teachers, not for every run.
Result: open.
"""

import functools

from experiments.claims.protocol import Claim, main
from experiments.claims.x04_residual_sparse import SHOWN, Start, outcome


def claim(quick: bool) -> Claim:
    """A student that solves some, under a middling teacher."""
    start = Start(0.0, 0.02, 0.54, takes=20 if quick else 150)
    return Claim(
        name="x05_residual_dense",
        arms=("GRPO", "RA 1", "RA 3", "OPD"),
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
