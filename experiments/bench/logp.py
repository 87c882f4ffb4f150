"""Log-probs of 3072 tokens from states of 256 numbers over a vocabulary of 32,000: how long they
take, alone and with the gradient by states and table, and how much memory.

    PYTHON -m experiments.bench.logp --peers tunix=... torch=... [--case gradient --turns 5]

Ours is the walk of the policy (model/policy.py) with the reading of every algorithm. That all have
the same mean is asked before a number is shown. The floor is 1 or 3 products of 50 GFLOP at the
rate of float32 matrix products, measured in the same turns.
"""

from collections.abc import Iterable

from experiments.bench import versus, work
from experiments.bench.versus import Party, Row

POSITIONS = 3072


def compared(given: versus.Given, case: str) -> Iterable[Row]:
    """Everybody's head."""
    how = ("head", "--positions", str(POSITIONS), *(["--gradient"] if case == "gradient" else []))
    with Party(given, "logp", case) as party:
        party.sit("floor", "floor", "floor")
        for name, who in {"jaxrl": "jaxrl", "plain jax": "plain", "tunix": "tunix"}.items():
            party.sit(name, who, *how)
        party.sit("torch", "torch", *how)
        yield party.agree("mean", 1e-5)
        party.play()
        yield from party.rows(POSITIONS, "tokens", "jaxrl")
        size = work.SIZES["32k"]
        useful = 2.0 * size.width * size.vocab * POSITIONS * (3 if case == "gradient" else 1)
        products = 2.0 * work.GEMMS * work.GEMM**3
        for who in [name for name in party.seats if name != "floor"]:
            share = party.ratio("floor", who)
            assert share is not None
            yield party.row(who, share * useful / products, "of the floor", "floor")


def main() -> None:
    """Measure the cases asked for."""
    given = versus.asked(__doc__).parse_args()
    cases = ("forward", "gradient")
    versus.told(given, {case: lambda case=case: compared(given, case) for case in cases})


if __name__ == "__main__":
    main()
