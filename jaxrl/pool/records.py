"""The calls of an attempt and its outcome -> rollouts: one for each branch, the trained one first.

The branch of the last call is the trained one: the outcome is about where the attempt ended. A call
that several branches share is an action in the first of them alone, and an injected text in the
others, so that whoever reads them all counts it once.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.conversation import Call, Conversation
from jaxrl.pool.ledger import Lease
from jaxrl.pool.rollout import (
    ACTION,
    FEEDBACK,
    INJECTED,
    NOT_SAMPLED,
    PROMPT,
    TYPES,
    Failure,
    Rollout,
    StopReason,
    Version,
)

NOTHING: dict[str, Any] = {}
EXACT = 2**53  # integers up to it are floats, bit for bit


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a worker says of an attempt that ended: ``failure`` is none, policy-timeout, or judge
    («not judged yet»: no reward then)."""

    reward: float | None
    correct: bool = False
    failure: Failure = Failure.NONE
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    feedback: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop_reason: StopReason | None = None  # None: that of the last answer


class _Columns:
    """Token arrays of many branches, one after the other, as they grow: runs of one kind each."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._runs: list[tuple[int, int, int, float]] = []  # tokens, kind, step, temperature
        self._logp: list[float] = []  # of what was sampled, as the next
        self._index: list[int] = []

    def add(self, ids: Sequence[int], kind: int, step: int) -> None:
        """Ids that nobody sampled."""
        self.ids += ids
        self._runs.append((len(ids), kind, step, 1.0))

    def sample(self, call: Call, step: int, versions: list[Version]) -> None:
        """The ids of an answer, in a branch that has these ``versions`` so far."""
        for version in call.versions:
            if version not in versions:
                versions.append(version)
        index = call.version_index
        if versions[: len(call.versions)] != call.versions:
            places = [versions.index(version) for version in call.versions]
            index = [places[place] for place in index]
        self.ids += call.tokens
        self._runs.append((len(call.tokens), ACTION, step, call.temperature))
        self._logp += call.logp
        self._index += index

    def arrays(self) -> dict[str, np.ndarray]:
        """By the names that a rollout has for them."""
        counts, *told = zip(*self._runs, strict=True)
        runs = dict(zip(("kind", "step", "temperature"), told, strict=True))
        found = {"tokens": np.array(self.ids, TYPES["tokens"])}
        for name, values in runs.items():
            found[name] = np.repeat(np.array(values, TYPES[name]), counts)
        acted = found["kind"] == ACTION
        sampled = {"logp": (0.0, self._logp), "version_index": (NOT_SAMPLED, self._index)}
        for name, (other, values) in sampled.items():
            found[name] = np.full(len(acted), other, TYPES[name])
            found[name][acted] = values
        return found


@dataclasses.dataclass(frozen=True)
class _Branch:
    """Where a branch lies in the columns, and what else a rollout of it says."""

    tokens: slice
    versions: tuple[Version, ...]
    stop_reason: StopReason
    text: str


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """What the rollouts of one attempt have in common."""

    lease: Lease
    outcome: Outcome
    facts: Mapping[str, Any]
    times: Mapping[str, float]
    branches: Sequence[_Branch]


class Records:
    """Attempts on their way into the spool, many at once."""

    def __init__(self, tokenizer: Tokenizer, run_id: str, max_feedback_tokens: int) -> None:
        self._tokenizer, self._run_id, self._room = tokenizer, run_id, max_feedback_tokens
        self._columns = _Columns()
        self._attempts: list[_Attempt] = []

    def add(
        self,
        lease: Lease,
        conversation: Conversation,
        outcome: Outcome,
        times: Mapping[str, float],
        facts: Mapping[str, Any],
    ) -> None:
        """Add an attempt. ValueError if nothing was ever asked of the model."""
        if not conversation.calls:
            raise ValueError("the attempt made no call; allowed: at least one")
        reply = self._tokenizer.encode(outcome.feedback) if outcome.feedback else []
        branches = self._branches(conversation, reply[: self._room])
        told = {
            **lease.facts,
            **outcome.facts,
            **facts,
            "calls": len(conversation.calls),
            "branches": len(branches),
            **{f"drift_{name}": count for name, count in conversation.drifts.items()},
        }
        if not all([call.trainable for call in conversation.calls]):
            told["trainable"] = False
        if 0 < self._room < len(reply):
            told["feedback_cut"] = True
        self._attempts.append(_Attempt(lease, outcome, told, times, branches))

    def _branches(self, conversation: Conversation, reply: Sequence[int]) -> list[_Branch]:
        columns, seen, found = self._columns, set[int](), list[_Branch]()
        for place, leaf in enumerate(conversation.leaves()):
            path, versions, start = conversation.path(leaf), list[Version](), len(columns.ids)
            for step, call in enumerate(path):
                columns.add(call.context, FEEDBACK if step else PROMPT, step - 1)
                if call.trainable and call.index not in seen:
                    columns.sample(call, step, versions)
                else:
                    columns.add(call.tokens, INJECTED, step)
                seen.add(call.index)
            if place == 0:
                columns.add(reply, FEEDBACK, len(path) - 1)
            text = "\n".join([call.text for call in path])
            last, tokens = path[-1], slice(start, len(columns.ids))
            told = tuple(versions or last.versions)
            found.append(_Branch(tokens, told, last.stop_reason, text))
        return found

    def rollouts(self) -> list[list[Rollout]]:
        """The branches of each attempt, in the order in which they were added."""
        if not self._attempts:
            return []
        arrays = self._columns.arrays()

        def rollout(one: _Attempt, place: int, branch: _Branch) -> Rollout:
            lease, outcome = one.lease, one.outcome
            return Rollout(
                run_id=self._run_id,
                group_id=lease.group,
                sample=lease.sample,
                attempt=lease.attempt,
                task_key=lease.task_key,
                content_hash=lease.content_hash,
                split=lease.split,
                source=lease.source,
                **{name: array[branch.tokens] for name, array in arrays.items()},
                versions=branch.versions,
                reward=outcome.reward,
                reward_components=outcome.components,
                correct=outcome.correct,
                stop_reason=outcome.stop_reason or branch.stop_reason,
                failure=outcome.failure,
                text=branch.text,
                facts={**one.facts, "branch": place},
                times=one.times,
            )

        return [
            [rollout(one, place, branch) for place, branch in enumerate(one.branches)]
            for one in self._attempts
        ]


def write_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as JSON values: an array becomes its type and its numbers."""
    return {
        name: {"array": fact.tolist(), "dtype": fact.dtype.str}
        if isinstance(fact, np.ndarray)
        else fact
        for name, fact in facts.items()
    }


def read_facts(told: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``write_facts``. ValueError for an array of anything but numbers."""
    facts: dict[str, Any] = {}
    for name, fact in told.items():
        if isinstance(fact, dict) and set(fact) == {"array", "dtype"}:
            dtype = np.dtype(fact["dtype"])
            if dtype.kind not in "biuf":
                raise ValueError(f"facts.{name} is of {dtype}; allowed: numbers")
            fact = np.array(fact["array"], dtype)
        facts[name] = fact
    return facts


def is_plain(told: Mapping[str, Any]) -> bool:
    """Whether a worker says nothing of an attempt that could not stand in columns: a finite reward
    or that there is none yet, and facts that are JSON."""
    failure, reward = told.get("failure", "none"), told.get("reward")
    facts, components = told.get("facts", NOTHING), told.get("components", NOTHING)
    return (
        (
            (failure == "none" and type(reward) is float and math.isfinite(reward))
            or (failure == "judge" and reward is None)
        )
        and not told.get("feedback")
        and told.get("stop_reason") is None
        and type(told.get("correct", False)) is bool
        and type(components) is dict
        and not any([type(part) is int and abs(part) > EXACT for part in components.values()])
        and type(facts) is dict
        and not any([type(fact) is dict for fact in facts.values()])
    )


def _bounded(part: Any) -> Any:
    """A part of a reward as it is, if a float can be made of it where it is a number."""
    if isinstance(part, int):
        float(part)
    return part


def read_outcome(told: Mapping[str, Any]) -> Outcome:
    """A worker's word on an attempt. For what it may not say ValueError, TypeError, AttributeError,
    or OverflowError: an integer that is more than a float."""
    failure = Failure(told.get("failure", "none"))
    if failure not in (Failure.NONE, Failure.POLICY_TIMEOUT, Failure.JUDGE):
        raise ValueError(
            f"failure={failure.value!r}; allowed: none, policy-timeout, judge; fail it"
        )
    reward, stop = told.get("reward"), told.get("stop_reason")
    for name, value, kinds, allowed in (
        ("reward", reward, (float, int, type(None)), "a number, or null"),
        ("correct", told.get("correct", False), (bool,), "true or false"),
        ("feedback", told.get("feedback", ""), (str,), "a text"),
    ):
        if type(value) not in kinds:
            raise ValueError(f"{name}={value!r}; allowed: {allowed}")
    return Outcome(
        reward=None if reward is None else float(reward),
        correct=told.get("correct", False),
        failure=failure,
        components={name: _bounded(x) for name, x in told.get("components", {}).items()},
        feedback=told.get("feedback", ""),
        facts=read_facts(told.get("facts", {})),
        stop_reason=None if stop is None else StopReason(stop),
    )
