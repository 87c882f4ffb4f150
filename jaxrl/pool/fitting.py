"""Sealed groups as the trainer may have them: read, judged where nobody did, filtered.

What is refused is void, with its reason; a damaged sample is sampled anew.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxrl.pool.contract import Keep, Question, Questions, Tokenizer
from jaxrl.pool.deadline import within
from jaxrl.pool.ledger import Ledger, Live, Member
from jaxrl.pool.rollout import Failure, Rollout, judged
from jaxrl.pool.segments import Spool
from jaxrl.pool.spool import RecordError
from jaxrl.pool.verdicts import with_verdicts
from jaxrl.pool.waiting import Waiting


class Fitting:
    """Looks at each READY group once, and keeps those that fit until they are taken."""

    def __init__(
        self,
        ledger: Ledger,
        waiting: Waiting,
        spool: Spool,
        source: Questions,
        tokenizer: Tokenizer,
        tasks: Mapping[str, Question],
        *,
        keep: Keep | None,
        reward: Literal["exact", "score"],
        max_feedback_tokens: int,
        judge_attempts: int,
        watchdog_s: float,
    ) -> None:
        self._ledger, self._waiting, self._spool = ledger, waiting, spool
        self._source, self._tokenizer, self._tasks = source, tokenizer, tasks
        self._keep, self._max_feedback_tokens = keep, max_feedback_tokens
        self._reward: Literal["exact", "score"] = reward
        self._judge_attempts, self._watchdog_s = judge_attempts, watchdog_s
        self._fit: dict[int, Sequence[Rollout]] = {}

    def fits(self, group: Live, counts: Counter[str]) -> bool:
        """Whether a READY group may be handed over; it is void, or open again, if not, or waits for
        a permit to be judged."""
        if group.id in self._fit:
            return True
        members = self._ledger.members(group.id)
        asks = any(member.sealed.failure is Failure.JUDGE for member in members)
        if asks and not self._waiting.may_judge(self._watchdog_s * self._judge_attempts):
            return False
        try:
            return self._looked_at(group, members, counts)
        finally:
            if asks:
                self._waiting.judged()

    def _looked_at(self, group: Live, members: Sequence[Member], counts: Counter[str]) -> bool:
        rollouts: list[Rollout] = []
        whole = True
        for member in members:
            try:
                rollouts.append(self._fetched(group, member))
            except RecordError as error:
                counts["damaged"] += 1
                self._ledger.reopen(group.id, member.sample, str(error))
                whole = False
        if not whole:
            return False
        counts["sampled_tokens"] += sum(member.sealed.tokens for member in members)
        if not all(rollout.facts.get("trainable", True) for rollout in rollouts):
            self._ledger.void(group.id, "untrainable")
            return False
        rollouts = self._judged(rollouts, counts)
        unjudged = sum(rollout.reward is None for rollout in rollouts)
        if unjudged:
            counts["failed"] += unjudged
            self._ledger.void(group.id, "judge")
        elif self._keep is not None and not self._keep(*judged(rollouts)):
            self._ledger.void(group.id, "filtered")
        else:
            self._fit[group.id] = rollouts
            return True
        return False

    def take(self, group: int) -> Sequence[Rollout]:
        """The rollouts of a group that fits."""
        return self._fit.pop(group)

    def forget(self, group: int) -> None:
        """It was voided, or is sampled anew."""
        self._fit.pop(group, None)

    def _fetched(self, group: Live, member: Member) -> Rollout:
        """The trained branch of a sample. RecordError if it is not what the ledger says it is."""
        sealed = member.sealed
        rollout = self._spool.fetch(sealed)[0]
        found = (rollout.group_id, rollout.sample, rollout.content_hash)
        wanted = (group.id, member.sample, group.content_hash)
        if found != wanted:
            raise RecordError(f"{sealed.segment} is of {found}; sealed for {wanted}")
        if rollout.task_key not in self._tasks:
            raise RecordError(f"{sealed.segment}: no task has the key {rollout.task_key!r}")
        return rollout

    def _judged(self, rollouts: Sequence[Rollout], counts: Counter[str]) -> list[Rollout]:
        """The rollouts with their rewards: what was sealed without is judged here, again if the
        judge fails."""
        told = list(rollouts)
        for _ in range(self._judge_attempts):
            if all(rollout.failure is not Failure.JUDGE for rollout in told):
                break
            told, cut = within(
                self._watchdog_s,
                functools.partial(self._verdicts, told),
                f"judging group {told[0].group_id}",
            )
            counts["feedback_cut"] += cut
        return told

    def _verdicts(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], int]:
        return with_verdicts(
            self._source,
            self._tasks[rollouts[0].task_key],
            rollouts,
            self._reward,
            self._tokenizer,
            self._max_feedback_tokens,
        )
