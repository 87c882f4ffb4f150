"""What becomes of GVPO if the implicit reward takes means over tokens instead of sums?

python -m experiments.claims.x02_token_means --workdir /tmp/claims

The bandit of `x01_frozen_behaviour` with an easier target: 8 positions, 8 rollouts a prompt, beta
0.1. Means over T tokens are GVPO with beta / T: the anchor holds T times less.

Look at: KL(policy, pi*) beside the mean reward.
Expect: with means the policy ends far from pi*, at a reward above pi*'s, which is why the mistake
survives a look at reward curves. Importance sampling works here, the clip stalls, no correction
collapses.
Result: as expected. Rates are chosen by reward, as one would without knowing pi*. 10 seeds, means
with 95 % t intervals, a second a run; commit 1a8fc3c, 2026-11-29. KL to pi*: GVPO 4e-7, with token
means 4.51 [3.40, 5.62], sequence IS 0, clip 0.035 [0.025, 0.045], no correction 7.71 [6.20, 9.22].
Reward less pi*'s: 0, +0.178 [0.145, 0.212], 0, -0.017 [-0.021, -0.013], +0.183 [0.144, 0.221]. The
rate of 32 is the edge of the grid for means, IS and no correction; the first and the last reward
still more there than at 8.
"""

import functools

from experiments.claims.protocol import Claim, main
from experiments.claims.x01_frozen_behaviour import Bandit, outcome


def claim(quick: bool) -> Claim:
    """The mistake beside the method, and the others for comparison."""
    steps = 80 if quick else 2000
    bandit = Bandit(positions=8, prompts=8, samples=8, beta=0.1, steps=steps)
    return Claim(
        name="x02_token_means",
        arms=("GVPO", "GVPO with token means", "sequence IS", "clip", "no correction"),
        run=functools.partial(outcome, bandit),
        rates=(0.5,) if quick else (0.125, 0.5, 2.0, 8.0, 32.0),
        choose="reward",  # by what is looked at in practice
        larger=True,
        shown=("KL to the optimum", "far off", "reward over pi*'s", "largest gradient"),
        drawn=("log10 KL",),
        against="GVPO",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
