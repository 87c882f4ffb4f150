"""One record for an agent's episode, whatever harness it ran under.

A trajectory is a row of segments; of them only those that the model wrote are ever trained on. What
a grader, a check and a trainer need is read from the same segments: ``shown`` is what a grader
sees, ``calls`` what a check runs again, ``columns`` what a rollout of the pool holds.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.agents.journal import Json
from jaxrl.pool.rollout import ACTION, FEEDBACK, INJECTED, PROMPT

Kind = Literal["system", "user", "model", "tool", "env", "harness"]

# Kind of a segment -> kind of its tokens in a rollout.
TOKEN_KINDS: Mapping[str, int] = {
    "system": PROMPT,
    "user": PROMPT,
    "model": ACTION,
    "tool": FEEDBACK,
    "env": FEEDBACK,
    "harness": INJECTED,
}
STOPS = ("answered", "steps", "malformed", "environment")


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of text and who wrote it; ``call`` is what the harness understood of a model's."""

    kind: Kind
    text: str
    call: Json = None  # {"tool": name, "arguments": [...]}, {"answer": text}, or nothing

    @property
    def loss_eligible(self) -> bool:
        """Only what the model wrote is trained on."""
        return self.kind == "model"


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """An episode under a harness; ``stop`` is one of STOPS."""

    harness: str
    segments: Sequence[Segment]
    answer: str
    stop: str

    @classmethod
    def of(cls, record: Json) -> "Trajectory":
        """From ``record``. ValueError for a kind or a stop that is none."""
        segments = [Segment(**one) for one in record["segments"]]
        unknown = {one.kind for one in segments} - set(TOKEN_KINDS)
        if unknown or record["stop"] not in STOPS:
            found = f"kinds {sorted(unknown)}, stop={record['stop']!r}"
            raise ValueError(f"{found}; allowed: {sorted(TOKEN_KINDS)}, {STOPS}")
        return cls(record["harness"], segments, record["answer"], record["stop"])

    @property
    def record(self) -> Json:
        """As JSON."""
        segments = [{"kind": s.kind, "text": s.text, "call": s.call} for s in self.segments]
        about = {"harness": self.harness, "answer": self.answer, "stop": self.stop}
        return {**about, "segments": segments}

    @property
    def calls(self) -> list[Json]:
        """What tools were asked for, in order."""
        found = [one.call for one in self.segments if one.kind == "model" and one.call]
        return [call for call in found if "tool" in call]

    @property
    def written(self) -> int:
        """Characters that the model wrote."""
        return sum(len(one.text) for one in self.segments if one.loss_eligible)

    def shown(self) -> list[list[str]]:
        """What a grader reads: kinds and texts after the instructions; no verdict."""
        kept = [one for one in self.segments if one.kind not in ("system", "user")]
        return [[one.kind, one.text] for one in kept]

    def columns(self, encode: Callable[[str], Sequence[int]]) -> dict[str, np.ndarray]:
        """Arrays of a rollout (jaxrl.pool.rollout): ``tokens``, ``kind``, ``step`` (of the model's
        own segments, -1 elsewhere)."""
        tokens: list[int] = []
        kinds: list[int] = []
        steps: list[int] = []
        step = 0
        for one in self.segments:
            ids = list(encode(one.text))
            tokens += ids
            kinds += [TOKEN_KINDS[one.kind]] * len(ids)
            steps += [step if one.loss_eligible else -1] * len(ids)
            step += one.loss_eligible
        return {
            "tokens": np.array(tokens, np.uint32),
            "kind": np.array(kinds, np.uint8),
            "step": np.array(steps, np.int32),
        }


@dataclasses.dataclass(frozen=True)
class Penalty:
    """Something that is wrong with a rollout: what is done about it follows from whose fault it is.

    ``mask`` takes it out of the group and of the loss; ``zero`` makes its reward 0 before any
    statistic. ValueError for an environment's fault that is not masked: it may not be punished.
    """

    cause: str  # exploit | environment
    action: str  # zero | mask
    source: str  # the check or the harness that says so

    def __post_init__(self) -> None:
        allowed = {"exploit": "zero", "environment": "mask"}
        if allowed.get(self.cause) != self.action:
            raise ValueError(
                f"cause={self.cause!r} with action={self.action!r}; allowed: {allowed}"
            )


def facts(grading: Json) -> dict[str, Any]:
    """What the algorithm ``mimo`` asks of each rollout (its ``needs``), from what is recorded of
    its grading."""
    return {
        "grade": float(grading["grade"]),
        "exploit": int(grading["exploit"]),
        "graded": int(grading["graded"]),
    }
