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
Result: as expected, from the 6 seeds of `x08_router_load` at 3e-4 (commit 8aacaed, 2026-11-30;
means with 95 % t intervals): flipped .366 [.340, .391] frozen, .442 [.427, .456] free (paired -.076
[-.098, -.053]), .448 [.422, .475] replayed, .365 [.343, .386] both, .862 [.829, .895] free at 30
times; the frozen router's weights moved by exactly 0, the free one's by .040 of their norm. So most
flips need no moving router. Drift in a take: .0132 [.0121, .0142] frozen, .0128 [.0116, .0140]
free, .0107 [.0101, .0114] replayed. The higher rates, for which this script is, are open: of its
runs only five have ended, of one arm, so there is nothing to compare.
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
