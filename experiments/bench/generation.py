"""Tokens a second that are generated: ours, and by those that a user would take instead.

    PYTHON -m experiments.bench.generation --peers tunix=... torch=... [--case sampled cache]

    sampled   8 prompts of 64 tokens, 256 new ones each, over the whole vocabulary of 32,000
    greedy    the same, the likeliest token; who says how the work is to be done says the same ids
    cache     sampled, in a cache of 2048 places, of which 320 are filled: our time a token, and
              Tunix', over that with a cache of 320
    mixed     --count sequences with prompts of 8 to 64 and 32 to 256 new tokens, compilation
              counted: --slots side by side, which our sampler refills; others in batches of so many

Nobody stops early. versus.py says how turns are taken and how the peers' environments are made.
"""

from collections.abc import Iterable

from experiments.bench import versus
from experiments.bench.versus import Party, Row

SHAPE = ("--prompt", "64", "--new", "256")


def batch(given: versus.Given, case: str) -> Iterable[Row]:
    """Everybody on one batch."""
    how = ("generation", *SHAPE, *(["--greedy"] if case == "greedy" else []))
    with Party(given, "generation", case) as party:
        party.sit("jaxrl", "jaxrl", *how)
        if case == "sampled":
            party.sit("jaxrl greedy", "jaxrl", *how, "--greedy")
        party.sit("plain jax", "plain", *how)
        party.sit("tunix", "tunix", *how)
        party.sit("transformers", "torch", *how)
        if case == "greedy":
            yield party.agree("hash", 0.0)
        party.play()
        yield from party.rows(8 * 256, "tokens", "jaxrl")


def cache(given: versus.Given) -> Iterable[Row]:
    """What a long cache costs that is hardly filled."""
    how, long = ("generation", *SHAPE), ("--places", "2048")
    with Party(given, "generation", "cache") as party:
        for who in ("jaxrl", "tunix"):
            party.sit(who, who, *how)
            party.sit(f"{who} 2048", who, *how, *long)
        party.play()
        for who in ("jaxrl", "tunix"):
            yield party.row(f"{who} 2048", party.ratio(f"{who} 2048", who), "x the time", who)


def mixed(given: versus.Given) -> Iterable[Row]:
    """The first run, all that it compiles included."""
    slots, count = str(given.slots), str(given.count)
    how = ("mixed", *SHAPE, "--rows", slots, "--slots", slots, "--count", count)
    with Party(given, "generation", f"mixed {count}") as party:
        names = {"jaxrl": "jaxrl", "tunix": "tunix", "transformers": "torch"}
        for name, who in names.items():
            party.sit(name, who, *how)
        for name, seat in party.seats.items():
            yield party.row(name, seat.first[party.unit], f"{party.unit} s, first run")
            if name != "jaxrl":
                value = seat.first[party.unit] / party.seats["jaxrl"].first[party.unit]
                yield party.row("jaxrl", value, "x as fast, first run", name)


def main() -> None:
    """Measure the cases asked for."""
    parser = versus.asked(__doc__)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--count", type=int, default=512)
    given = parser.parse_args()
    cases = {
        "sampled": lambda: batch(given, "sampled"),
        "greedy": lambda: batch(given, "greedy"),
        "cache": lambda: cache(given),
        "mixed": lambda: mixed(given),
    }
    versus.told(given, cases)


if __name__ == "__main__":
    main()
