"""What a step's time is spent on: one step traced, each operation's own time, in groups.

    PYTHON -m experiments.bench.spent [--size 152k --rows 2 --micro 2 --chunk 256]

The step is that of step.py (the case 32k if nothing is said) with logits kept, and runs once more
after two that are not traced. Groups are told by the names that operations have in the compiled
program: what stands under a condition is the head, which alone has them; products are dots; what is
neither the forward nor the backward pass is the update. JSON lines on stdout.
"""

import collections
import gzip
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping

import jax

from experiments.bench import ours, work
from jaxrl.train import heap

NAMED = re.compile(r'^\s*(?:ROOT )?%([\w.\-]+) = [^\n]*?op_name="([^"]*)"', re.MULTILINE)


def group_of(name: str, path: str) -> str:
    """Of an operation's name and of its path in the program."""
    product = name.startswith("dot") or path.endswith("dot_general")
    if "/cond/" in path:
        return "head: products" if product else "head: passes over the vocabulary"
    if "jvp()" in path:
        return "trunk: products" if product else "trunk: what is elementwise, softmax, moves"
    return "update, norms, the rest"


def own_times(events: Iterable[Mapping]) -> collections.Counter[str]:
    """Microseconds of each name, less what ran inside it."""
    lanes = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            lanes[event["pid"], event["tid"]].append(event)
    spent: collections.Counter[str] = collections.Counter()
    for lane in lanes.values():
        open_events: list[Mapping] = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            while open_events and _end(open_events[-1]) <= event["ts"]:
                open_events.pop()
            spent[event["name"]] += event["dur"]
            if open_events:
                spent[open_events[-1]["name"]] -= event["dur"]
            open_events.append(event)
    return spent


def _end(event: Mapping) -> float:
    return event["ts"] + event["dur"]


def main() -> None:
    """Trace, group, print."""
    parser = work.parser()
    parser.set_defaults(micro=4, chunk=768, keep=True)
    given = parser.parse_args(["step", "jaxrl", *sys.argv[1:]])
    heap.keep()
    with tempfile.TemporaryDirectory() as folder:
        run = ours.step(given, program := pathlib.Path(folder) / "program.txt")
        for _ in range(2):
            run()
        with jax.profiler.trace(folder):
            run()
        trace = next(pathlib.Path(folder).rglob("*.trace.json.gz"))
        spent = own_times(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
        paths = dict(NAMED.findall(program.read_text()))
    groups: collections.Counter[str] = collections.Counter()
    for name, microseconds in spent.items():
        if name in paths:
            groups[group_of(name, paths[name])] += microseconds
    whole = sum(groups.values())
    for name, microseconds in groups.most_common():
        row = {"bench": "spent", "case": given.size, "who": name, "ratio_to": ""}
        print(json.dumps(row | {"value": round(microseconds / whole, 3), "unit": "of the step"}))
    row = {"bench": "spent", "case": given.size, "who": "all", "ratio_to": ""}
    print(json.dumps(row | {"value": round(whole / 1e6, 3), "unit": "s"}))


if __name__ == "__main__":
    main()
