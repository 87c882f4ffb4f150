"""What our step costs as the work grows: time against tokens, and memory against the vocabulary.

PYTHON -m experiments.bench.growth [--case time memory --plot growth.png --turns 3]

time     rollouts of 512 tokens, 4 to 64 of them, four a micro-batch, vocabulary 512: seconds a
         token over those of the smallest take
memory   what the compiler sets aside for the log-probs of 2048 tokens and their gradient beside
         arguments and results, chunk times vocabulary held at 2**22 logits; and the same less
         the head's own gradient, which is as large as the head. A chunk's logits are 16 MiB
         whatever the vocabulary
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

from experiments.bench import versus, work
from experiments.bench.versus import Party, Row

ROLLOUTS = (4, 8, 16, 32, 64)
VOCABULARIES = (4096, 16_384, 65_536, 131_072)
LOGITS = 2**22


def time(given: versus.Given) -> Iterable[Row]:
    """Linear in tokens, if the ratios are 1."""
    with Party(given, "growth", "time") as party:
        for rows in ROLLOUTS:
            shape = ("--rows", str(rows), "--micro", "4", "--size", "512", "--chunk", "2048")
            party.sit(str(512 * rows), "jaxrl", "step", *shape)
        party.play()
        least = str(512 * ROLLOUTS[0])
        for name in party.seats:
            ratio = party.ratio(name, least)
            assert ratio is not None
            value = ratio * int(least) / int(name)
            yield party.row(f"{name} tokens", value, "x the time a token", f"{least} tokens")


def memory(given: versus.Given) -> Iterable[Row]:
    """Of the policy's score, as it is compiled for training."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl.kernels.readings import taken_logp
    from jaxrl.mesh import Rules
    from jaxrl.model.form import qwen3
    from jaxrl.model.policy import build

    party, size = Party(given, "growth", "memory"), work.SIZES["512"]
    for vocab in VOCABULARIES:
        form = qwen3(
            vocab_size=vocab,
            rope_theta=work.THETA,
            norm_epsilon=work.EPSILON,
            tied_head=True,
            dtype="float32",
            param_dtype="float32",
            remat="none",
            score_chunk_positions=LOGITS // vocab,
            **{k: v for k, v in dataclasses.asdict(size).items() if k not in ("vocab", "layers")},
            layers=1,
        )
        policy = build(form, None, Rules(), answers_only=True)
        ones = jnp.ones((4, 512))
        table = jax.ShapeDtypeStruct((vocab, size.width), np.float32)
        hidden = jax.ShapeDtypeStruct((4, 512, size.width), np.float32)

        def total(hidden: jax.Array, table: jax.Array, policy=policy, ones=ones) -> jax.Array:
            heads = {"student": lambda x, _, whole: x @ whole["embedding"].T}
            rows = (ones.astype(int), ones, ones > 0)
            read = lambda logits, taken: {"logp": taken_logp(logits["student"], taken)}  # noqa: E731
            known, whole = {"student": hidden}, {"student": {"embedding": table}}
            return policy.walk(known, whole, heads, *rows, read)["logp"].sum()

        compiled = jax.jit(jax.grad(total, (0, 1))).lower(hidden, table).compile()
        found = compiled.memory_analysis()
        assert found is not None
        aside = found.temp_size_in_bytes / 2**20
        head = 4 * vocab * size.width / 2**20
        yield party.row(f"vocabulary {vocab}", aside, "MiB set aside")
        yield party.row(f"vocabulary {vocab}", aside - head, "MiB less the head's gradient")


def draw(rows: Sequence[Row], path: str | pathlib.Path) -> None:
    """Both curves beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    found = [row for row in rows if row["case"] == "time"]
    left.plot([int(r["who"].split()[0]) for r in found], [r["value"] for r in found], "o-")
    left.set(
        xscale="log", xlabel="tokens a step", ylabel="time a token / that of 2048", ylim=(0, 1.5)
    )
    for unit in ("MiB set aside", "MiB less the head's gradient"):
        found = [row for row in rows if row["unit"] == unit]
        right.plot(
            [int(r["who"].split()[1]) for r in found], [r["value"] for r in found], "o-", label=unit
        )
    right.set(xscale="log", xlabel="vocabulary", ylim=(0, None))
    right.legend()
    figure.savefig(path)


def main() -> None:
    """Measure the cases asked for, and draw them."""
    parser = versus.asked(__doc__)
    parser.add_argument("--plot", default="", help="a picture's path; none if empty")
    given = parser.parse_args()
    rows = versus.told(given, {"time": lambda: time(given), "memory": lambda: memory(given)})
    if given.plot:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
