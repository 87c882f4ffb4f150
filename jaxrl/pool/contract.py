"""What the trainer asks of a pool, and what a pool asks of a generator. No jax: both sides may live
elsewhere."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl.pool.rollout import Rollout, StopReason, Version

# keep(rewards [rollout], facts: each a list [rollout]): dynamic sampling; see
# jaxrl.pool.rollout.judged
Keep = Callable[[np.ndarray, Mapping[str, Any]], bool]

# annotate(rollouts of a group) -> more facts for each, from something that only the trainer has
# (another model's log-probs)
Annotate = Callable[[Sequence[Rollout]], Sequence[Mapping[str, Any]]]


class PoolError(RuntimeError):
    """The pool cannot go on; the message holds the root cause."""


class PoolEnd(Exception):
    """There is nothing left to take: an explicit end, never a wait."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The rollouts of one prompt instance."""

    id: int
    content_hash: str
    rollouts: Sequence[Rollout]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What one step consumed: goes into the checkpoint, so that nothing is trained twice or
    lost."""

    step: int
    groups: Sequence[tuple[int, str]]  # (group id, content hash of the group's rollouts)
    counts: Mapping[str, int]  # filtered, refilled, rejected_ragged, rejected_long, failed, ...
    # what else is measured: staleness, what dropping shifts; not the same when a step runs again
    readings: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)


class Request(NamedTuple):
    """One answer to generate. Its key is fold_in(seed, group, sample, token): no slot, no
    attempt. Later calls of a conversation fold in their number as well; an answer that is gone on
    with, its beginning at the prompt's end, keeps the keys of its tokens."""

    prompt: Sequence[int]
    group: int
    sample: int
    temperature: float  # 0 is greedy and allowed for evaluation only
    max_new_tokens: int
    stop_ids: frozenset[int]
    call: int = 0  # number of the call in its conversation
    first: int = 0  # index of the first new token in the answer


@dataclasses.dataclass(frozen=True)
class Completion:
    """Sampled ids with the sampled terminator kept; log-probs under the sampling temperature, full
    vocabulary."""

    tokens: np.ndarray  # int32 [new]
    logp: np.ndarray  # float32 [new]
    version: Version
    stop_reason: StopReason  # STOP or LENGTH
    # int16 [prompt and new, layer, k]: the experts that each token went through as an input, -1
    # where none was (the last token); None of a model without experts, or if not recorded
    routes: np.ndarray | None = None


class Generator(Protocol):
    """A generation engine: ids in, ids and log-probs out."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion for each request, in the order of the requests."""
        ...

    def load(self, version: Version, path: str) -> None:
        """Take new weights from a published directory; refuses a digest that does not match."""
        ...


class Tokenizer(Protocol):
    """Text <-> ids, as a pool uses it."""

    @property
    def eos_id(self) -> int:
        """Ends a response."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a response."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without eos."""
        ...

    def prompt(self, text: str) -> list[int]:
        """Ids that ask a question, with all that the model expects around it; [] for no text."""
        ...

    def question(self, ids: Iterable[int]) -> str:
        """The text that a prompt asks."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, for people and verifiers; it is never encoded again."""
        ...


class Question(Protocol):
    """A task as a pool sees it (jaxrl.tasks.contract.Task)."""

    @property
    def key(self) -> str:
        """Names the task in its source."""
        ...

    @property
    def source(self) -> str:
        """Names the source."""
        ...

    @property
    def split(self) -> str:
        """train or held_out."""
        ...

    @property
    def prompt(self) -> str:
        """The text that is asked."""
        ...

    @property
    def answer(self) -> str:
        """A right answer, "" where the source states none."""
        ...

    @property
    def content_hash(self) -> str:
        """Of the prompt's text."""
        ...


class Mark(Protocol):
    """A verdict as a pool sees it (jaxrl.tasks.contract.Verdict)."""

    @property
    def score(self) -> float:
        """As the verifier gives it."""
        ...

    @property
    def correct(self) -> bool:
        """The full mark."""
        ...

    @property
    def components(self) -> Mapping[str, float]:
        """Parts of the score, by name."""
        ...

    @property
    def feedback(self) -> str:
        """What the environment answers, "" for nothing."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Whatever else was observed, by name: JSON values, or arrays of numbers with one axis."""
        ...


class Questions(Protocol):
    """A task source as a pool sees it (jaxrl.tasks.contract.TaskSource)."""

    def tasks(self, split: Any) -> Sequence[Question]:
        """Distinct questions of a split, always in the same order."""
        ...

    def verify(self, task: Any, response: str) -> Mark:
        """Score a response's text. What it raises is a fault of the data."""
        ...

    @property
    def grouped(self) -> bool:
        """Whether a group's responses are judged together, by ``verify_group``."""
        ...

    @property
    def needs(self) -> Collection[str]:
        """What a verdict takes one of: "judge_calls" (it asks something that costs), "sandboxes"
        (it runs programs), or nothing; see ``jaxrl.pool.permits``."""
        ...

    def prompts(self, task: Any, samples: int) -> Sequence[str]:
        """The prompt of each sample of a group."""
        ...

    def verify_group(self, task: Any, responses: Sequence[str]) -> Sequence[Mark]:
        """Score a group's responses together. What it raises is a fault of the data."""
        ...


class RolloutPool(Protocol):
    """The pool as the trainer sees it."""

    def take(self, n: int, step: int) -> tuple[list[Group], Manifest]:
        """At most n finished groups for this step; fewer only when refills or data ran out. Raises
        PoolEnd, PoolError."""
        ...

    def commit(self, step: int) -> None:
        """The step's checkpoint is complete (or the step is covered by policy): its groups are
        never handed out again."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able state for the checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Groups taken for steps that the checkpoint does not cover are handed
        out again."""
        ...

    def publish(self, version: Version, path: str) -> None:
        """New weights are at path."""
        ...

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """Draw tasks of each source with these probabilities from the next take on, and record them
        as the fact ``task_probability``. ValueError from a pool that cannot choose, and for
        probabilities that do not fit its tasks."""
        ...

    def close(self) -> None:
        """Free what the pool holds. Nothing that was committed is lost without it."""
        ...
