"""The README's table of speed, from the lines that the benches printed.

    PYTHON -m experiments.bench.page step.json generation.json logp.json growth.json

Keeps them as results/speed.json with the commit, the date and the versions of those who took part
(of this environment; others' are in versus.py), draws those of growth.py beside it, and writes the
table between the README's two marks. A bar for which there is no line says «unmeasured».
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench import growth, work

HERE = pathlib.Path(__file__).parent
RESULTS, README = HERE / "results" / "speed.json", HERE.parents[1] / "README.md"
MARKS = "<!-- speed -->", "<!-- /speed -->"
FASTER = "x as fast"


@dataclasses.dataclass(frozen=True)
class Bar:
    """A number of a bench, and what is asked of it."""

    what: str
    bench: str
    case: str
    who: str
    unit: str
    to: str
    asked: str

    def found(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The value of the last line that says it."""
        key = (self.bench, self.case, self.who, self.unit, self.to)
        names = ("bench", "case", "who", "unit", "ratio_to")
        values = [row["value"] for row in rows if tuple(row[name] for name in names) == key]
        return "unmeasured" if not values or values[-1] is None else f"{values[-1]:.4g}"


def _faster(what: str, bench: str, case: str, **asked: str) -> list[Bar]:
    """Of jaxrl over others, named with _ for a blank."""
    names = {to.replace("_", " "): bar for to, bar in asked.items()}
    return [
        Bar(f"{what}, times as fast as {to}", bench, case, "jaxrl", FASTER, to, bar)
        for to, bar in names.items()
    ]


def _memory(what: str, bench: str, case: str, **asked: str) -> list[Bar]:
    """Peak of processes."""
    return [
        Bar(f"{what}: {who}, MiB", bench, case, who, "MiB, peak", "", bar)
        for who, bar in asked.items()
    ]


STEP, WIDE = "Train step, 8 x 512 tokens", "Train step, 2 x 512 tokens, vocabulary 151,936"
LEAN, GRADIENT = "With the least memory", "3072 log-probs and their gradient"
OURS = {"tunix": "1.5", "trl": "2.5", "plain_jax": "", "torch": ""}
LONG = "A token in a cache of 2048 places, 320 of them filled, over one of 320"
MANY, RATE = "512 sequences of mixed length, compilation counted", "x the time"
FIRST, HEAD = f"{FASTER}, first run", "The head's memory, vocabulary"
TOKENS, LESS = "x the time a token", "MiB less the head's gradient"
BARS = [
    *_faster(STEP, "step", "32k", **OURS),
    Bar(f"{STEP}, share of the floor", "step", "32k", "jaxrl", "of the floor", "floor", "0.35"),
    *_memory(STEP, "step", "32k", jaxrl="", tunix="", trl=""),
    *_faster(WIDE, "step", "152k", **OURS),
    *_faster(LEAN, "step", "lean", plain_jax="1"),
    *_memory(LEAN, "step", "lean", jaxrl="a third of tunix above", tunix="", trl=""),
    Bar("The step with a teacher", "step", "two_models", "residual", RATE, "jaxrl", "below 2.2"),
    *_faster("8 x 256 tokens sampled", "generation", "sampled", tunix="1.7", transformers="2.5"),
    *_faster("8 x 256 tokens sampled", "generation", "sampled", plain_jax="", jaxrl_greedy="0.87"),
    *(
        Bar(f"{LONG}: {who}", "generation", "cache", f"{who} 2048", RATE, who, asked)
        for who, asked in (("jaxrl", "1"), ("tunix", ""))
    ),
    *(
        Bar(f"{MANY}, times as fast as {to}", "generation", "mixed 512", "jaxrl", FIRST, to, "1")
        for to in ("tunix", "transformers")
    ),
    *_faster("3072 log-probs", "logp", "forward", plain_jax="1"),
    *_faster(GRADIENT, "logp", "gradient", plain_jax="1.1", tunix="", torch=""),
    *_memory(GRADIENT, "logp", "gradient", jaxrl="620"),
    Bar("32,768 tokens", "growth", "time", "32768 tokens", TOKENS, "2048 tokens", "0.9 to 1.1"),
    *(
        Bar(f"{HEAD} {size}", "growth", "memory", f"vocabulary {size}", LESS, "", "flat")
        for size in (4096, 131_072)
    ),
]


def table(kept: Mapping[str, Any]) -> str:
    """What stands between the marks."""
    lines = ["| | measured | asked |", "|---|--:|--:|"]
    lines += [f"| {bar.what} | {bar.found(kept['rows'])} | {bar.asked} |" for bar in BARS]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    lines += [
        "",
        f"{kept['date']}, {kept['commit']}, {kept['seeds']} seed, {versions}; {kept['note']}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Keep the lines, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lines", nargs="+", type=pathlib.Path)
    parser.add_argument("--commit", default="", help="that the lines are of; else the present one")
    parser.add_argument("--note", default="", help="how it was measured")
    given = parser.parse_args()
    rows = [
        json.loads(line)
        for path in given.lines
        for line in path.read_text().splitlines()
        if line.startswith("{")
    ]
    commit = ["git", "rev-parse", "--short", given.commit or "HEAD"]
    kept = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "seeds": 1,
        "versions": work.versions("jax", "optax", "flax"),
        "note": given.note,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    growth.draw([row for row in rows if row["bench"] == "growth"], RESULTS.with_name("growth.png"))
    before, _, rest = README.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    README.write_text(f"{before}{MARKS[0]}\n{table(kept)}{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
