"""How long a train step takes, and how much memory: ours, and by those that a user would take
instead, on one group of eight rollouts (work.py) under GRPO with AdamW.

    PYTHON -m experiments.bench.step --peers tunix=... torch=... [--case 32k lean --turns 3]

    32k, 152k   every layer's values kept for the backward pass, and our logits, of four or two
                rollouts at a time, at 8 x 512 and 2 x 512 tokens; TRL as its trainer is by default
    lean        the same work as 32k with what takes least memory: our micro-batch a rollout, its
                layers' inputs kept; Tunix with remat in its decoder
    ragged      32k with prompts of 32 to 128 and answers of 48 to 384 tokens
    two_models  residual advantages from a teacher of the student's form, over the step without

All have the same weights and tokens, and one update a take; that the loss' gradient has the same
norm (and, where it is told, the policy the same entropy) is asked of all before a number is shown.
The floor is the useful FLOPs of a step (work.py) at the rate of float32 matrix products, measured
in the same turns. versus.py says how turns are taken and how the peers' environments are made.
"""

from collections.abc import Iterable

from experiments.bench import versus, work
from experiments.bench.versus import Party, Row

LEAN = ("--micro", "1", "--chunk", "192", "--remat", "full")


def ours(rows: int) -> tuple[str, ...]:
    """Logits are kept, in micro-batches of four rollouts and half of their answers at a time, or of
    two and a third."""
    return ("--micro", str(min(4, rows)), "--chunk", "768" if rows > 2 else "256", "--keep")


def compared(
    given: versus.Given, case: str, size: str, rows: int, *more: str, lean: bool = False
) -> Iterable[Row]:
    """Everybody's step on one size of the work."""
    tokens, prompt = 512, 128
    shape = ("--size", size, "--rows", str(rows), *more)
    with Party(given, "step", case) as party:
        party.sit("floor", "floor", "floor")
        party.sit("jaxrl", "jaxrl", "step", *shape, *(LEAN if lean else ours(rows)))
        party.sit("plain jax", "plain", "step", *shape)
        party.sit("tunix", "tunix", "step", *shape, *(["--lean"] if lean else []))
        party.sit("trl", "trl", "step", *shape)
        if not lean:
            party.sit("torch", "torch", "step", *shape)
        yield party.agree("grad_norm", 1e-3)
        yield party.agree("entropy", 1e-4)
        party.play()
        yield from party.rows(rows * tokens, "tokens", "jaxrl")
        useful = 3 * rows * work.SIZES[size].forward(tokens, tokens - prompt)
        products = 2.0 * work.GEMMS * work.GEMM**3
        yield party.row("formula", useful / 1e9, "GFLOP a step")
        if "--ragged" not in more:
            for who in [name for name in party.seats if name != "floor"]:
                share = party.ratio("floor", who)
                assert share is not None
                yield party.row(who, share * useful / products, "of the floor", "floor")


def two_models(given: versus.Given) -> Iterable[Row]:
    """Our step with a teacher, over the step without."""
    with Party(given, "step", "two_models") as party:
        party.sit("jaxrl", "jaxrl", "step", *ours(8))
        party.sit("residual", "residual", "step", *ours(8))
        party.play()
        yield party.row("residual", party.ratio("residual", "jaxrl"), "x the time", "jaxrl")
        for name, seat in party.seats.items():
            yield party.row(name, seat.peak, "MiB, peak")


def main() -> None:
    """Measure the cases asked for."""
    given = versus.asked(__doc__).parse_args()
    cases = {
        "32k": lambda: compared(given, "32k", "32k", 8),
        "152k": lambda: compared(given, "152k", "152k", 2),
        "lean": lambda: compared(given, "lean", "32k", 8, lean=True),
        "ragged": lambda: compared(given, "ragged", "32k", 8, "--ragged"),
        "two_models": lambda: two_models(given),
    }
    versus.told(given, cases)


if __name__ == "__main__":
    main()
