"""What a task source is: prompts, a verifier, and splits by content hash."""

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

Split = Literal["train", "held_out"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One question. ``content_hash`` is of the prompt's text, and alone decides the split."""

    key: str
    source: str
    split: Split
    prompt: str
    answer: str  # a right answer, for supervised warm starts
    content_hash: str
    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``score`` as the verifier gives it; ``correct`` is score >= 1, which is what accuracy
    counts. ``feedback`` is what the environment answers, "" for nothing: it follows the response in
    the rollout. ``facts`` are what a method may ask for: JSON values (lists of lists for a table),
    or numpy arrays of numbers with one axis.
    """

    score: float
    correct: bool
    components: Mapping[str, float]
    feedback: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TaskSource(Protocol):
    """Prompts with their verifier."""

    @property
    def grouped(self) -> bool:
        """Whether the responses of a group are judged together (tournaments, outcome matrices)."""
        ...

    @property
    def needs(self) -> Collection[str]:
        """What a verdict takes one of: "judge_calls" (it asks something that costs), "sandboxes"
        (it runs programs), or nothing. A run may limit how many there are at once."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]:
        """Distinct questions of a split, always in the same order."""
        ...

    def verify(self, task: Task, response: str) -> Verdict:
        """Score a response's text. What it raises is a fault of the data, never of the policy."""
        ...

    def prompts(self, task: Task, samples: int) -> Sequence[str]:
        """The prompt of each sample of a group: the task's, or one for each role."""
        ...

    def verify_group(self, task: Task, responses: Sequence[str]) -> Sequence[Verdict]:
        """Score the responses of a group together, in their order; asked if ``grouped``."""
        ...


def content_hash(text: str) -> str:
    """Hex digest (16 characters) of a prompt's text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def split_of(digest: str, held_out_fraction: float) -> Split:
    """The split that a content hash falls into: the same for every seed, order and size of the data
    set."""
    return "held_out" if int(digest, 16) < held_out_fraction * 2**64 else "train"
