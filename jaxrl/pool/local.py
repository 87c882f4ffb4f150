"""The whole pool in this process: draw prompts, generate, verify, hand over whole groups.
Synchronous.

``take`` is to be read from top to bottom. The generator is handed in, so the same pool runs on a
real sampler and on a scripted one. A wait has a deadline, a failure has a cause, and nothing that
failed becomes a reward of 0.
"""

import dataclasses
import os
import pathlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.pool.completions import check_end, route_facts
from jaxrl.pool.contract import (
    Annotate,
    Completion,
    Generator,
    Group,
    Keep,
    Manifest,
    PoolEnd,
    PoolError,
    Question,
    Questions,
    Request,
    Tokenizer,
)
from jaxrl.pool.cursor import Cursor
from jaxrl.pool.deadline import within
from jaxrl.pool.draws import Draws
from jaxrl.pool.judging import Outcome, judge
from jaxrl.pool.prompts import prompt_ids, refusal
from jaxrl.pool.rollout import (
    ACTION,
    FEEDBACK,
    NOT_SAMPLED,
    PROMPT,
    Rollout,
    Version,
    digest_of,
    judged,
)
from jaxrl.pool.shards import of_shard
from jaxrl.pool.spool import SUFFIX, Writer

# Group ids from here on belong to evaluation: the same id would mean the same random keys.
MAX_GROUPS = 2**30

# A task whose verifier failed in this many of its groups is asked no more.
QUARANTINE_AFTER = 2

# Every count is in every manifest, so that a curve starts at 0 and not where trouble does.
COUNTS = (
    "filtered",  # groups that `keep` refused
    "refilled",  # groups drawn in the place of refused or voided ones
    "voided",  # groups with a rollout that could not be used
    "failed",  # rollouts whose verifier raised or gave no finite score
    "rejected_ragged",  # completions with ids and log-probs of different lengths
    "rejected_long",  # prompts over the limit
    "rejected_empty",  # prompts without a token: nothing would score the first response token
    "quarantined",  # draws of tasks whose verifier keeps failing
    "short",  # groups asked for and not delivered
    "sampled_tokens",  # of all completions, refused ones included
    "feedback_cut",  # rollouts whose feedback was longer than the limit
)


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """One prompt instance. Its number names the group, so the same task drawn twice is two
    groups."""

    number: int
    task: Question
    prompts: list[list[int]]  # of each sample


class LocalPool:
    """A RolloutPool without workers: ``rollouts_per_group`` samples of each of the next prompts,
    verified.

    Prompts of the ``shard`` (see ``of_shard``) come in an order given by (seed, epoch), each once
    an epoch; the position is all that resuming needs, and it is exact (see ``Cursor``). A prompt
    over ``max_prompt_tokens`` is passed over and counted, never cut. A group is handed over only if
    all its rollouts can be used and ``keep(rewards, facts)`` wants it; others are counted and
    refilled one for one, for ``max_refills`` rounds, then fewer groups are returned, perhaps none.
    ``reward`` is "exact" (1 if correct else 0) or "score" (as the verifier gives it). ``epochs=0``
    means no end; else PoolEnd follows the last take.

    Staleness is 0: completions of another version than the newest published one are a PoolError,
    and so is a take before anything was published, an error of the generator (with its text) and a
    call that lasts longer than ``watchdog_s`` seconds. A verifier that raises or gives no finite
    score leaves the rollout without a reward (failure "data"); after two such groups its task is
    drawn no more. With ``record_dir``, all rollouts of a take, refused ones included, are written
    to ``record_dir/step-<step>.rollouts``.

    A source that is ``grouped`` gives each sample its own prompt and judges a whole group at once.
    Of a verdict's feedback the first ``max_feedback_tokens`` follow the response, as tokens that
    nobody sampled; what is cut is counted. ``annotate`` adds facts to groups that are handed over.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        source: Questions,
        *,
        run_id: str,
        seed: int,
        rollouts_per_group: int,
        temperature: float,
        max_new_tokens: int,
        max_prompt_tokens: int,
        watchdog_s: float,
        max_refills: int,
        max_feedback_tokens: int = 0,
        keep: Keep | None = None,
        annotate: Annotate | None = None,
        reward: Literal["exact", "score"] = "exact",
        record_dir: str | os.PathLike[str] | None = None,
        epochs: int = 0,
        split: Literal["train", "held_out"] = "train",
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        if not temperature > 0:
            raise ValueError(
                f"sampler.temperature={temperature!r}; allowed: > 0, greedy is refused for training"
            )
        if reward not in ("exact", "score"):
            raise ValueError(f"task.reward={reward!r}; allowed: 'exact', 'score'")
        _at_least(1, rollouts_per_group=rollouts_per_group, max_new_tokens=max_new_tokens)
        _at_least(1, max_prompt_tokens=max_prompt_tokens)
        _at_least(0, max_refills=max_refills, max_feedback_tokens=max_feedback_tokens)
        _at_least(0, epochs=epochs)
        self._tasks = of_shard(source.tasks(split), shard)
        if not self._tasks:
            raise ValueError(f"no {split!r} task in shard {shard}; allowed: at least one")
        self._generator = generator
        self._tokenizer = tokenizer
        self._source = source
        self._run_id = run_id
        self._seed = seed
        self._rollouts_per_group = rollouts_per_group
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._watchdog_s = watchdog_s
        self._max_refills = max_refills
        self._max_feedback_tokens = max_feedback_tokens
        self._keep = keep
        self._annotate = annotate
        self._reward: Literal["exact", "score"] = reward
        self._record_dir = None if record_dir is None else pathlib.Path(record_dir)
        self._end = min(epochs * len(self._tasks), MAX_GROUPS) if epochs else MAX_GROUPS
        self._cursor = Cursor()
        # Content hash of a task: groups that its verifier failed in.
        self._failures: dict[str, list[int]] = {}
        self._version: Version | None = None
        self._draws = Draws(self._tasks, seed)

    # -- the contract

    def take(self, n: int, step: int) -> tuple[list[Group], Manifest]:
        """At most n groups of verified rollouts, all sampled from the newest published weights."""
        if self._version is None:
            raise PoolError(
                "no weights were published: a pool that acked no version serves nothing"
            )
        if n < 1:
            raise ValueError(f"n={n}; allowed: >= 1")
        self._begin(step)
        counts: Counter[str] = Counter({name: 0 for name in COUNTS})
        groups: list[Group] = []
        seen: list[Rollout] = []
        for refill in range(1 + self._max_refills):
            drawn = self._draw(n - len(groups), counts)
            counts["refilled"] += len(drawn) if refill else 0
            rollouts = self._attempt(drawn, counts, step, len(groups)) if drawn else {}
            seen += [rollout for group in rollouts.values() for rollout in group]
            groups += self._usable(rollouts, counts)
            if len(groups) == n or self._cursor.position >= self._end:
                break
        counts["short"] = n - len(groups)
        self._record(seen, step)
        taken = tuple((group.id, group.content_hash) for group in groups)
        return groups, Manifest(step=step, groups=taken, counts=dict(counts))

    def commit(self, step: int) -> None:
        """The groups of steps up to this one are trained and covered by a checkpoint."""
        self._cursor.commit(step)

    def state(self) -> dict[str, Any]:
        """The position of the draws, those of the steps in flight, and the failures of
        verifiers."""
        return {
            "pool": "local",
            "tasks": len(self._tasks),
            "seed": self._seed,
            "failures": {task: list(groups) for task, groups in self._failures.items()},
            **self._cursor.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. ValueError naming the field if it belongs to another pool, task set
        or seed."""
        mine = {"pool": "local", "tasks": len(self._tasks), "seed": self._seed}
        for field, value in mine.items():
            if state[field] != value:
                raise ValueError(f"pool state has {field}={state[field]!r}; allowed: {value!r}")
        self._cursor.restore(state)
        self._failures = {task: list(groups) for task, groups in state["failures"].items()}

    def publish(self, version: Version, path: str) -> None:
        """Load new weights into the generator. Until that has succeeded nothing is served."""
        newest = self._version
        if newest is not None and (version.epoch, version.step) < (newest.epoch, newest.step):
            raise PoolError(f"{version} is older than {newest}, which was published before")
        self._version = None
        within(
            self._watchdog_s,
            lambda: self._generator.load(version, path),
            f"loading {version} from {path}",
        )
        self._version = version

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """Draw universes with these probabilities from the next take on; see ``Draws``."""
        self._draws.weigh(probabilities)

    def close(self) -> None:
        """The generator belongs to the caller, records are closed with each take: nothing is
        held."""

    # -- prompts

    def _begin(self, step: int) -> None:
        self._cursor.begin(step)
        start = self._cursor.position
        if start >= self._end:
            raise PoolEnd(f"all {start} prompts were drawn ({len(self._tasks)} tasks)")
        # What a step that is begun again had found out will be found out again.
        failures = {t: [g for g in groups if g < start] for t, groups in self._failures.items()}
        self._failures = {task: groups for task, groups in failures.items() if groups}

    def _draw(self, n: int, counts: Counter[str]) -> list[_Drawn]:
        """The next n usable prompts, fewer at the end of the data. PoolError if a whole epoch has
        none."""
        drawn: list[_Drawn] = []
        passed = 0
        while len(drawn) < n and self._cursor.position < self._end:
            number = self._cursor.position
            self._cursor.position += 1
            task = self._draws.task(number)
            prompts = prompt_ids(self._source, self._tokenizer, task, self._rollouts_per_group)
            refused = self._refusal(task, prompts)
            if refused is None:
                drawn.append(_Drawn(number, task, prompts))
                passed = 0
                continue
            counts[refused] += 1
            passed += 1
            if passed > len(self._tasks):
                raise PoolError(
                    f"none of {len(self._tasks)} prompts can be used "
                    f"(max_prompt_tokens={self._max_prompt_tokens}): {_shown(counts)}"
                )
        return drawn

    def _refusal(self, task: Question, prompts: Sequence[Sequence[int]]) -> str | None:
        if len(self._failures.get(task.content_hash, ())) >= QUARANTINE_AFTER:
            return "quarantined"
        return refusal(prompts, self._max_prompt_tokens)

    # -- attempts

    def _attempt(
        self, drawn: Sequence[_Drawn], counts: Counter[str], step: int, done: int
    ) -> dict[int, list[Rollout]]:
        """Generate and verify: the rollouts of each group, without those that could not be read."""
        where = (
            f"at step {step} ({done} groups of this take done, {len(drawn)} asked for; "
            f"{_shown(counts)})"
        )
        requests = [
            Request(
                prompt=item.prompts[sample],
                group=item.number,
                sample=sample,
                temperature=self._temperature,
                max_new_tokens=self._max_new_tokens,
                stop_ids=self._tokenizer.stop_ids,
            )
            for item in drawn
            for sample in range(self._rollouts_per_group)
        ]
        began = time.time()
        completions = within(
            self._watchdog_s, lambda: self._generator.generate(requests), f"generation {where}"
        )
        if len(completions) != len(requests):
            raise PoolError(
                f"the generator gave {len(completions)} completions "
                f"for {len(requests)} requests {where}"
            )
        times = {"dispatched": began, "sampled": time.time()}
        answered: dict[int, list[tuple[Request, Completion]]] = {item.number: [] for item in drawn}
        for request, completion in zip(requests, completions, strict=True):
            if self._readable(request, completion, counts):
                answered[request.group].append((request, completion))

        def verified() -> dict[int, list[Rollout]]:
            return {
                item.number: self._verified(item, answered[item.number], counts, times)
                for item in drawn
            }

        return within(self._watchdog_s, verified, f"verification {where}")

    def _readable(self, request: Request, completion: Completion, counts: Counter[str]) -> bool:
        """Whether ids and log-probs belong together; counted if not."""
        if completion.version != self._version:
            raise PoolError(
                f"group {request.group} was sampled by {completion.version}, "
                f"published is {self._version}"
            )
        tokens = np.asarray(completion.tokens)
        if tokens.shape != np.shape(completion.logp) or not tokens.size:
            counts["rejected_ragged"] += 1
            return False
        check_end(tokens, completion.stop_reason, request)
        counts["sampled_tokens"] += len(tokens)
        return True

    def _verified(
        self,
        drawn: _Drawn,
        answered: Sequence[tuple[Request, Completion]],
        counts: Counter[str],
        times: Mapping[str, float],
    ) -> list[Rollout]:
        """A group's rollouts with their outcomes. One that is not whole is not judged together."""
        if self._source.grouped and len(answered) < self._rollouts_per_group:
            return []
        texts = [self._tokenizer.decode(np.asarray(c.tokens).tolist()) for _, c in answered]
        outcomes = judge(self._source, drawn.task, texts, self._reward)
        failed = sum(outcome.reward is None for outcome in outcomes)
        if failed:
            counts["failed"] += failed
            groups = self._failures.setdefault(drawn.task.content_hash, [])
            if drawn.number not in groups:
                groups.append(drawn.number)
        return [
            self._rollout(drawn, pair, text, outcome, counts, times)
            for pair, text, outcome in zip(answered, texts, outcomes, strict=True)
        ]

    def _rollout(
        self,
        drawn: _Drawn,
        answered: tuple[Request, Completion],
        text: str,
        outcome: Outcome,
        counts: Counter[str],
        times: Mapping[str, float],
    ) -> Rollout:
        """One attempt: the prompt, the response, then what the environment answered."""
        request, completion = answered
        reply = self._tokenizer.encode(outcome.feedback) if outcome.feedback else []
        counts["feedback_cut"] += 0 < self._max_feedback_tokens < len(reply)
        reply = reply[: self._max_feedback_tokens]
        sizes = [len(request.prompt), len(completion.tokens), len(reply)]

        def column(values: Sequence[float], dtype: Any) -> np.ndarray:
            return np.repeat(np.array(values), sizes).astype(dtype)

        logp = column([0, 0, 0], np.float32)
        logp[sizes[0] : sizes[0] + sizes[1]] = completion.logp
        rollout = Rollout(
            run_id=self._run_id,
            group_id=request.group,
            sample=request.sample,
            attempt=0,
            task_key=drawn.task.key,
            content_hash=drawn.task.content_hash,
            split=drawn.task.split,
            source=drawn.task.source,
            tokens=np.array([*request.prompt, *completion.tokens, *reply], np.uint32),
            kind=column([PROMPT, ACTION, FEEDBACK], np.uint8),
            step=column([-1, 0, 0], np.int32),
            logp=logp,
            version_index=column([NOT_SAMPLED, 0, NOT_SAMPLED], np.uint16),
            temperature=column([1, request.temperature, 1], np.float32),
            versions=(completion.version,),
            reward=outcome.reward,
            reward_components=outcome.reward_components,
            correct=outcome.correct,
            stop_reason=completion.stop_reason,
            failure=outcome.failure,
            text=text,
            facts={
                **outcome.facts,
                **self._draws.facts(drawn.task),
                **route_facts(completion, len(reply)),
            },
            times={**times, "verified": time.time()},
        )
        try:
            rollout.check()
        except ValueError as error:
            raise PoolError(f"group {request.group} sample {request.sample}: {error}") from error
        return rollout

    def _usable(
        self, rollouts: Mapping[int, Sequence[Rollout]], counts: Counter[str]
    ) -> list[Group]:
        """Groups that are whole and wanted; the others are counted."""
        groups: list[Group] = []
        for number, members in rollouts.items():
            whole = len(members) == self._rollouts_per_group
            if not whole or any(member.reward is None for member in members):
                counts["voided"] += 1
            elif self._keep is not None and not self._keep(*judged(members)):
                counts["filtered"] += 1
            else:
                members = tuple(self._annotated(members))
                groups.append(Group(id=number, content_hash=digest_of(members), rollouts=members))
        return groups

    def _annotated(self, members: Sequence[Rollout]) -> Sequence[Rollout]:
        if self._annotate is None:
            return members
        annotate = self._annotate

        def annotated() -> list[Rollout]:
            return [
                dataclasses.replace(member, facts={**member.facts, **facts})
                for member, facts in zip(members, annotate(members), strict=True)
            ]

        return within(self._watchdog_s, annotated, f"annotation of group {members[0].group_id}")

    # -- surroundings

    def _record(self, rollouts: Sequence[Rollout], step: int) -> None:
        if self._record_dir is None:
            return
        path = self._record_dir / f"step-{step:08d}{SUFFIX}"
        try:
            with Writer(path) as writer:
                for rollout in rollouts:
                    writer.append(rollout)
        except OSError as error:
            raise PoolError(
                f"the rollouts of step {step} cannot be recorded at {path}: {error}"
            ) from error


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value!r}; allowed: >= {least}")


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "no counts"
