"""X9: does a frozen router keep sending tokens to the same experts?

python -m experiments.claims.x09_frozen_routes --workdir /tmp/claims

The runs of `x08_router_load` (32 experts, 2 a token, 200 takes of GRPO from the same supervised
starts) at equal learning rates instead of each arm's best: a share of changed routes says little
where one arm was merely trained faster. A frozen router is the same bits to the end; the states
that it reads are not.

Look at: over all problems, both layers and all inputs, the share of tokens whose set of two experts
is another than at the start (flipped), and of routes that go elsewhere (moved); within a take, the
share of routes that the moving trainer would choose otherwise than the sampler did (drift); how far
the router's weights went; CV of the loads and the solve rate, here at equal rates.
Expect: a third or more of the tokens change their experts though the router is frozen, more at the
higher rate, and more again if it is free. Replaying routes takes away drift in what is computed,
not in what the router would choose.
Result: as expected (6 seeds, commit 4a9f646, 2026-11-30; means with 95 % t intervals):

    rate  router   flipped             drift in a take        cv                  solved
    3e-4  free     .432 [.408, .456]   .0129 [.0123, .0136]   .476 [.401, .551]   .971 [.963, .980]
          frozen   .363 [.337, .389]   .0134 [.0124, .0144]   .408 [.327, .490]   .967 [.955, .979]
          replayed .418 [.401, .434]   .0102 [.0095, .0109]   .488 [.409, .567]   .970 [.958, .983]
    1e-3  free     .628 [.613, .643]   .0152 [.0134, .0169]   .644 [.592, .697]   .959 [.936, .982]
          frozen   .540 [.524, .556]   .0165 [.0155, .0174]   .498 [.438, .558]   .963 [.935, .992]
          replayed .626 [.583, .670]   .0130 [.0119, .0141]   .642 [.523, .761]   .949 [.923, .975]
    3e-3  free     .870 [.845, .895]   .0226 [.0214, .0238]   1.17 [.993, 1.35]   .894 [.785, 1.00]
          frozen   .741 [.710, .772]   .0259 [.0236, .0281]   .812 [.633, .991]   .917 [.879, .955]
          replayed .867 [.843, .892]   .0207 [.0193, .0222]   1.24 [1.06, 1.42]   .945 [.899, .992]

A frozen router's weights moved by exactly 0, a free one's by .037, .096 and .264 of their norm. So
most flips need no moving router (at 1e-3: frozen less free, paired, -.088 [-.109, -.066]). Freezing
evens the loads (-.147 [-.192, -.101] of CV) and does not lessen the drift within a take, which at
the two higher rates is even larger (+.0013 [.0003, .0023] at 1e-3); replaying lessens it. What is
solved does not differ at equal rates.
"""

from experiments.claims.protocol import Claim, Outcome, main
from experiments.claims.x08_router_load import ARMS, STRETCH, outcome

KINDS = ("free", "frozen", "replayed")
ARMS_AT = {f"{kind}, {rate:g}": (kind, rate) for rate in (3e-4, 1e-3, 3e-3) for kind in KINDS}


def claim(quick: bool) -> Claim:
    """What becomes of the routes."""
    takes = STRETCH if quick else 200

    def run(arm: str, rate: float, seed: int) -> Outcome:
        del rate  # the arm says it
        kind, own = ARMS_AT[arm]
        return outcome(takes, ARMS[kind], own, seed)

    return Claim(
        name="x09_frozen_routes",
        arms=("frozen, 0.003",) if quick else tuple(ARMS_AT),
        run=run,
        rates=(0.0,),
        choose="solved",
        larger=True,
        shown=("flipped", "moved", "drift in a take", "router moved", "cv", "solved"),
        drawn=("flipped over takes", "solved over takes"),
        against="" if quick else "free, 0.001",
        seeds=2 if quick else 6,
    )


if __name__ == "__main__":
    main(claim, __doc__)
