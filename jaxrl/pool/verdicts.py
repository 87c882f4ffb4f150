"""Verdicts on rollouts that were sealed without one: the judge is asked (again), the trajectory
stays."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxrl.pool.contract import Question, Questions, Tokenizer
from jaxrl.pool.judging import Outcome, judge
from jaxrl.pool.rollout import ACTION, FEEDBACK, NOT_SAMPLED, Failure, Rollout


def with_verdicts(
    source: Questions,
    task: Question,
    rollouts: Sequence[Rollout],
    reward: Literal["exact", "score"],
    tokenizer: Tokenizer,
    max_feedback_tokens: int,
) -> tuple[list[Rollout], int]:
    """The rollouts of a group, those that wait for a judge with its outcome, and how many of them
    had their feedback cut. Where the judge fails they go on waiting (failure "judge"), without a
    reward. A grouped source judges all of them together."""
    waiting = [
        place
        for place, rollout in enumerate(rollouts)
        if source.grouped or rollout.failure is Failure.JUDGE
    ]
    outcomes = judge(source, task, [rollouts[place].text for place in waiting], reward)
    judged, cut = list(rollouts), 0
    for place, outcome in zip(waiting, outcomes, strict=True):
        if outcome.reward is None:
            error = {"error": outcome.facts["error"]}
            facts = {**rollouts[place].facts, **error}
            judged[place] = dataclasses.replace(rollouts[place], facts=facts)
            continue
        reply = tokenizer.encode(outcome.feedback) if outcome.feedback else []
        cut += 0 < max_feedback_tokens < len(reply)
        judged[place] = _decided(rollouts[place], outcome, reply[:max_feedback_tokens])
    return judged, cut


def _decided(rollout: Rollout, outcome: Outcome, reply: Sequence[int]) -> Rollout:
    """A rollout with an outcome, and what the environment answered behind it."""
    added = len(reply)
    acted = rollout.step[rollout.kind == ACTION]
    last = int(acted[-1]) if acted.size else -1

    def longer(values: np.ndarray, value: float) -> np.ndarray:
        return np.concatenate([values, np.full(added, value, values.dtype)])

    facts = {
        name: longer(fact, -1) if name.startswith("token_") and added and fact.ndim == 1 else fact
        for name, fact in rollout.facts.items()
    }
    return dataclasses.replace(
        rollout,
        tokens=np.concatenate([rollout.tokens, np.array(reply, np.uint32)]),
        kind=longer(rollout.kind, FEEDBACK),
        step=longer(rollout.step, last),
        logp=longer(rollout.logp, 0),
        version_index=longer(rollout.version_index, NOT_SAMPLED),
        temperature=longer(rollout.temperature, 1),
        reward=outcome.reward,
        reward_components=outcome.reward_components,
        correct=outcome.correct,
        failure=outcome.failure,
        facts={**facts, **outcome.facts},
    )
