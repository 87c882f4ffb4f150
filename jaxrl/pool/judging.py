"""Responses -> outcomes: what a task source says of a group's texts, and whose fault it is if it
cannot."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.pool.contract import Mark, Question, Questions
from jaxrl.pool.rollout import Failure


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a rollout carries of a verdict. No reward, and a failure of the data, without one."""

    reward: float | None
    reward_components: Mapping[str, float]
    correct: bool
    failure: Failure
    facts: Mapping[str, Any]
    feedback: str


def judge(
    source: Questions, task: Question, texts: Sequence[str], reward: Literal["exact", "score"]
) -> list[Outcome]:
    """One outcome for each text, in order.

    A grouped source is asked once, and what it raises is a fault of the whole group; others are
    asked for each text. A score that is not finite gives no reward, nor does a fact that cannot be
    recorded, and no failure becomes a reward of 0.
    """
    # A right answer is recorded with the facts: privileged contexts may show it to a teacher.
    known = {"solution": task.answer} if task.answer else {}
    if not source.grouped:
        return [_outcome(_asked(source, task, text), reward, known) for text in texts]
    try:
        marks: Sequence[Mark | str] = source.verify_group(task, texts)
        if len(marks) != len(texts):
            raise ValueError(f"{len(marks)} verdicts for {len(texts)} responses")
    except Exception as error:  # whatever a verifier raises, the policy is not to blame
        marks = [f"{type(error).__name__}: {error}"] * len(texts)
    return [_outcome(mark, reward, known) for mark in marks]


def _asked(source: Questions, task: Question, text: str) -> Mark | str:
    try:
        return source.verify(task, text)
    except Exception as error:  # whatever a verifier raises, the policy is not to blame
        return f"{type(error).__name__}: {error}"


def _outcome(mark: Mark | str, reward: str, known: Mapping[str, Any]) -> Outcome:
    """A verdict, or the text of an error, as an outcome."""
    if not isinstance(mark, str):
        mark = _flaw(mark) or mark
    if isinstance(mark, str):
        return Outcome(None, {}, False, Failure.DATA, {**known, "error": mark}, "")
    return Outcome(
        reward=float(mark.correct) if reward == "exact" else float(mark.score),
        reward_components={name: _plain(part) for name, part in mark.components.items()},
        correct=bool(mark.correct),
        failure=Failure.NONE,
        facts={**known, **{name: _plain(fact) for name, fact in mark.facts.items()}},
        feedback=mark.feedback,
    )


def _plain(fact: Any) -> Any:
    """A numpy number as Python's; anything else as it is."""
    return fact.item() if isinstance(fact, np.generic) else fact


def _flaw(mark: Mark) -> str:
    """What keeps a verdict from being a reward and a record; "" for nothing."""
    if not math.isfinite(mark.score):
        return f"the verifier's score is {mark.score}"
    for name, fact in {**mark.components, **mark.facts}.items():
        if isinstance(fact, np.ndarray):
            if fact.ndim != 1 or fact.dtype.kind not in "biuf":
                return f"the verifier's {name!r} is {fact.dtype}{list(fact.shape)}, not a column"
            if not np.isfinite(fact).all():
                return f"the verifier's {name!r} has a number that is not finite"
            continue
        try:
            json.dumps(_plain(fact), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"the verifier's {name!r} cannot be recorded: {error}"
    return ""
