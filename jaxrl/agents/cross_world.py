"""A planted world of three faults: one that weights can learn away, one that a guard breaks, one
that only a harness can show.

A question is of one of ``kinds`` kinds, and has an answer that goes by its kind; a share ``hidden``
has instead one that stands on its second page. The actor writes a call, strictly with probability
``strict`` (a harness may answer a malformed one and have it written again, then ``mended``), starts
to loop with probability ``loop`` (a guard breaks it off, else the budget runs out), and knows the
answer of its kind with a probability drawn from Beta(``knows`` / 2, (1 - ``knows``) / 2): kinds are
mostly easy or hard. A hidden answer is read where the page is shown, and guessed elsewhere.

Weights are a table of these probabilities; fine-tuning counts what examples say, with the old table
worth ``inertia`` examples. ``broken``: episodes that fail for reasons of their own.

Other end of the knob: ``strict`` 1, ``loop`` 0, ``hidden`` 0, nothing that a harness could mend.
The stand-in for who proposes edits looks at the labels that it is told to (``sees``), proposes
nothing of substance with probability ``idle`` and to read the verifier with probability
``cheat``.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents import worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json, digest, draws
from jaxrl.agents.port import Script

VALUES = 8  # that an answer may have
READS = 0.95  # chance that what stands on a shown page is read
FIXES: Mapping[str, Json] = {
    "F1": {"pages": ["page-1", "page-2"]},
    "F2": {"repair": True},
    "F3": {"guard": True},
}


@dataclasses.dataclass(eq=False)
class World:
    """See above."""

    dev: int
    held_out: int
    kinds: int
    hidden: float
    strict: float
    mended: float
    loop: float
    knows: float
    inertia: float
    broken: float
    sees: str
    idle: float
    cheat: float
    seed: int

    def __post_init__(self) -> None:
        shares = ("hidden", "strict", "mended", "loop", "broken", "idle", "cheat")
        worlds.within("world", self, 0, 1, *shares)
        worlds.within("world", self, 1, math.inf, "dev", "held_out")
        worlds.within("world", self, 1, 100, "kinds")  # two digits in a prompt
        worlds.within("world", self, 0, math.inf, "inertia")
        if not 0 < self.knows < 1:
            raise ValueError(f"world.knows={self.knows!r}; allowed: between 0 and 1")
        if self.sees not in ("first", "fired"):
            raise ValueError(f"world.sees={self.sees!r}; allowed: first, fired")
        chance = draws("truth", self.seed)
        self.right = chance.integers(VALUES, size=self.kinds)
        known = chance.beta(self.knows / 2, (1 - self.knows) / 2, self.kinds)
        table = np.tile(((1 - known) / (VALUES - 1))[:, None], (1, VALUES))
        table[np.arange(self.kinds), self.right] = known
        self.base: Json = {"strict": self.strict, "loop": self.loop, "answers": table.tolist()}

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Questions to develop with, and questions to measure with."""
        return {
            "dev": worlds.names_of("dev", self.dev),
            worlds.HELD_OUT: worlds.names_of("held", self.held_out),
        }

    @functools.cache  # noqa: B019 (a world lives as long as its run)
    def task(self, name: str) -> Json:
        """A question: its kind, and whether its answer is on the second page."""
        chance = worlds.sampled(self.seed, name)
        key, second = int(chance.integers(self.kinds)), int(chance.integers(VALUES))
        return {"id": name, "key": key, "second": second, "hidden": chance.random() < self.hidden}

    def seed_harness(self) -> Json:
        """What there is at the start."""
        return {"pages": ["page-1"], "repair": False, "guard": False, "note": ""}

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """One episode, with everything that a label is made of."""
        harness, weights = self.seed_harness(), self.base
        for one in artefacts:
            body: Any = one.body
            if body["kind"] == "harness":
                harness = body
            else:
                weights = body
        lots = scene.chance.random(6)
        if lots[0] < self.broken:
            return {"score": 0.0, "failure": "infra", "spans": []}
        shown = task["hidden"] and "page-2" in harness["pages"]
        prompt = f"q{task['key']:02d}" + (f" page-2 {task['second']}" if shown else "")
        right = task["second"] if task["hidden"] else int(self.right[task["key"]])
        if shown and lots[1] < READS:
            answer = right
        elif task["hidden"]:
            answer = int(lots[2] * VALUES)
        else:
            answer = int(np.searchsorted(np.cumsum(weights["answers"][task["key"]]), lots[2]))
            answer = min(answer, VALUES - 1)
        looped, strict = lots[3] < weights["loop"], lots[4] < weights["strict"]
        parsed = strict or (harness["repair"] and lots[5] < self.mended)
        stuck = bool(looped and not harness["guard"])
        spans = [_span("harness", prompt, False)]
        if looped:
            spans.append(_span("model", "again again again", False))
        if not strict:
            spans.append(_span("model", f"call {answer}", False))
        if parsed:
            spans.append(_span("model", f"call({answer})", True))
        delivered = bool(parsed and not stuck)
        return {
            "score": float(delivered and answer == right),
            "failure": "",
            "shown": ["page-1", "page-2"] if shown else ["page-1"],
            "needed": ["page-1", "page-2"] if task["hidden"] else ["page-1"],
            "parser_errors": int(not strict),
            "refused": not parsed,
            "loop_hits": int(looped),
            "budget_out": stuck,
            "wrong": answer != right,
            "observed": digest(prompt),
            "spans": spans,
        }

    def fine_tune(self, examples: Sequence[Json]) -> Json:
        """The base table after examples {"prompt", "said"}; a pure function of them."""
        count, strict = len(examples), 0
        table = self.inertia * np.array(self.base["answers"])
        for one in examples:
            strict += one["said"].startswith("call(")
            if "page-2" not in one["prompt"]:
                table[int(one["prompt"][1:3]), int(one["said"].strip("cal()"))] += 1
        table = table / table.sum(1, keepdims=True)
        share = self.inertia / (self.inertia + count)
        return {
            "strict": share * self.strict + (1 - share) * (strict / count if count else 0.0),
            "loop": share * self.loop,  # none is in what passed
            "answers": table.tolist(),
        }

    def scripts(self) -> Mapping[str, Script]:
        """A stand-in for who proposes edits."""
        return {"edit": self._edit}

    def _edit(self, payload: Any, chance: np.random.Generator) -> Json:
        """What mends the commonest label that is not mended yet."""
        lot = chance.random()
        if lot < self.cheat:
            return {"change": {"pages": ["page-1", "verifier"]}}
        labels, harness = payload["labels"][self.sees], payload["harness"]
        for name in sorted(FIXES, key=lambda name: (-labels[name], name)):
            fix = FIXES[name]
            if lot >= self.cheat + self.idle and any(harness[f] != x for f, x in fix.items()):
                if labels[name] > 0:
                    return {"change": fix}
        return {"change": {"note": f"Think again, {payload['round']} times."}}


def _span(kind: str, text: str, accepted: bool) -> Json:
    return {"kind": kind, "text": text, "accepted": accepted}
