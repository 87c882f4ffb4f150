"""From a request to a call: what an engine is asked, and what its answer becomes. No jax here."""

import asyncio
import bisect
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl.pool.contract import Request, Tokenizer
from jaxrl.pool.conversation import Call, Conversation, Plan
from jaxrl.pool.dialogue import answer_message, link
from jaxrl.pool.engines import Batching, Engine, EngineError, Sampled
from jaxrl.pool.ledger import Lease, LedgerRefusal
from jaxrl.pool.permits import Permits
from jaxrl.pool.rollout import ROUNDING, StopReason, Version
from jaxrl.pool.tokens import name_of
from jaxrl.pool.turns import Turn, fit

# Random keys of visitors: above those of training, below those of a trainer's own evaluation.
FIRST_VISIT = VISITS = 2**29

# Seconds between two looks whether new weights are there.
YOUNG_S = 0.01


class ContextLimit(ValueError):
    """A prompt that leaves no room for an answer."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a run allows its attempts."""

    run_id: str
    temperature: float
    max_new_tokens: int
    max_prompt_tokens: int
    max_feedback_tokens: int
    lease_s: float
    wait_s: float  # for weights that are young enough
    under_way: int  # answers at once
    permits: Permits = Permits()  # of the run, over all its gateways


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request for an answer: exactly one of messages, text and ids, or none of them (the task's
    own prompt). One that is ``plain`` asks nothing but that, and is told the text alone."""

    request: str  # digest, to know it when it is sent again
    again: bool  # whether the agent says that it sends it again
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Any] = ()
    text: str | None = None
    ids: Sequence[int] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    stop_ids: frozenset[int] = frozenset()
    seed: int | None = None  # of a visitor: the same one draws the same answer; None: a new one
    plain: bool = False


@dataclasses.dataclass
class Attempt:
    """A lease and what was said under it."""

    lease: Lease
    begin: Callable[[], Conversation]  # with what the spool has of it
    began: float
    started: bool = False
    full: bool = False  # its last request did not fit into the context
    visits: bool = False  # evaluation: of no sample, kept nowhere
    given_back: bool = False  # nobody will take what it comes to
    generate_s: float = 0.0
    said: tuple[Turn, int] | None = None  # its only call, while it stands in columns
    seen: int | None = None  # what the ledger's changes were before it was leased

    @functools.cached_property
    def conversation(self) -> Conversation:
        """Made when it is first asked for: most attempts need none."""
        found, said = self.begin(), self.said
        self.said = None
        if said is not None:
            turn, row = said
            found.add(turn.call(row))
        return found

    @property
    def fresh(self) -> bool:
        """Whether nothing was asked under it yet."""
        return self.said is None and "conversation" not in vars(self)


@dataclasses.dataclass(frozen=True)
class Asked:
    """An attempt that the engine is to answer."""

    attempt: Attempt
    plan: Plan
    request: Request


class Answers:
    """What all attempts are answered with. ``tally`` counts what is rare."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        limits: Limits,
        tally: Callable[[Sequence[str]], None],
    ) -> None:
        self._engine, self._tokenizer, self._limits = engine, tokenizer, limits
        self._tally = tally
        self._calls: dict[str, asyncio.Task[Sampled]] = {}  # of servers, by tokens

    def planned(self, attempt: Attempt, ask: Ask) -> Asked | Call | Exception:
        """What to ask the engine, or the answer that was given before."""
        conversation = attempt.conversation
        known = conversation.answered(ask.request) if ask.again else None
        if known is not None:
            return known
        try:
            if ask.messages is not None:
                plan = conversation.plan_messages(ask.messages, ask.tools)
            elif ask.text is not None:
                plan = conversation.plan_text(ask.text)
            else:
                plan = conversation.plan_ids(attempt.lease.prompt if ask.ids is None else ask.ids)
            return Asked(attempt, plan, self._request(attempt, ask, plan))
        except Exception as error:
            return error

    def alike(self, attempts: Sequence[Attempt], ask: Ask) -> list[Request] | None:
        """What to ask the engine for answers that may stand in columns together; None if that
        takes more than the attempts' own prompts."""
        first = attempts[0].lease
        if not ask.plain or not all([one.fresh for one in attempts]):
            return None
        lengths = [len(one.lease.prompt) for one in attempts]
        if min(lengths) < 1 or max(lengths) > self._limits.max_prompt_tokens:
            return None
        if any([one.lease.epoch != first.epoch for one in attempts]):
            return None
        model = self._asked(attempts[0], ask, first.prompt, 0)
        leases = [one.lease for one in attempts]
        return [Request(one.prompt, one.group, one.sample, *model[3:]) for one in leases]

    async def sampled(
        self, requests: Sequence[Request], attempts: Sequence[Attempt], oldest: tuple[int, int]
    ) -> list[Sampled | Exception]:
        """An answer to each of some, of weights that are young enough for all of them
        (``oldest_of``). Nobody is asked for those that were given back while they waited."""
        try:
            await self._young(oldest)
        except EngineError as error:
            return [error] * len(requests)
        if not any([one.given_back for one in attempts]):
            return await self._generated(requests, attempts)
        pairs = zip(requests, attempts, strict=True)
        kept = [(request, one) for request, one in pairs if not one.given_back]
        told = iter(await self._generated([one for one, _ in kept], [one for _, one in kept]))
        return [_given_back() if one.given_back else next(told) for one in attempts]

    async def _generated(
        self, requests: Sequence[Request], attempts: Sequence[Attempt]
    ) -> list[Sampled | Exception]:
        """An answer to each, which ends early where its attempt is given back."""
        if not requests:
            return []
        if isinstance(self._engine, Batching):  # what a batch has begun it ends
            return await self._engine.generate_all(requests)
        calls = [asyncio.ensure_future(self._engine.generate(request)) for request in requests]
        tokens = [one.lease.token for one in attempts]
        self._calls.update(zip(tokens, calls, strict=True))
        try:
            told = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            for token in tokens:
                self._calls.pop(token, None)
        return [_ended(one) for one in told]

    def abandon(self, tokens: Iterable[str]) -> None:
        """End what servers are generating for these: nobody will take it."""
        for token in tokens:
            if token and (call := self._calls.get(token)) is not None:
                call.cancel()

    def together(
        self,
        attempts: Sequence[Attempt],
        ask: Ask,
        requests: Sequence[Request],
        sampled: Sequence[Sampled | Exception],
        oldest: tuple[int, int],
        seconds: float,
    ) -> Turn | None:
        """Answers in columns; None if there is something to be said of one alone."""
        answers = [one for one in sampled if isinstance(one, Sampled)]
        if len(answers) < len(sampled):
            return None
        if not fit(answers, oldest, requests[0].max_new_tokens):
            return None
        names = [name_of(one.lease.token) for one in attempts]
        return Turn.of(names, requests, answers, self._tokenizer, ask.request, seconds)

    def made(self, one: Asked, ask: Ask, sampled: Sampled | Exception) -> Call | Exception:
        """An answer as a call, if it is one."""
        if isinstance(sampled, Exception):
            return sampled
        try:
            self._check(sampled, one.attempt.lease.version, one.request)
            return self._call(one, ask, sampled)
        except Exception as error:
            return error

    def _request(self, attempt: Attempt, ask: Ask, plan: Plan) -> Request:
        limits = self._limits
        if not plan.prompt:
            raise ValueError("the prompt is empty; allowed: at least one token")
        if len(plan.prompt) > limits.max_prompt_tokens:
            attempt.full = True
            raise ContextLimit(
                f"the prompt has {len(plan.prompt)} tokens; allowed: {limits.max_prompt_tokens}"
            )
        attempt.full = False
        return self._asked(attempt, ask, plan.prompt, len(attempt.conversation.calls))

    def _asked(self, attempt: Attempt, ask: Ask, prompt: Sequence[int], call: int) -> Request:
        limits, lease = self._limits, attempt.lease
        temperature = limits.temperature if ask.temperature is None else ask.temperature
        if not (0 < temperature < math.inf or (temperature == 0 and attempt.visits)):
            raise ValueError(
                f"temperature={temperature}; allowed: > 0, greedy is refused for training; finite"
            )
        most = limits.max_new_tokens if ask.max_tokens is None else ask.max_tokens
        if most < 1:
            raise ValueError(f"max_tokens={most}; allowed: >= 1")
        seed = ask.seed if attempt.visits else None
        group = lease.group if seed is None else FIRST_VISIT + seed % VISITS
        return Request(
            prompt=prompt,
            group=group,
            sample=lease.sample,
            temperature=temperature,
            max_new_tokens=min(most, limits.max_new_tokens),
            stop_ids=ask.stop_ids or self._tokenizer.stop_ids,
            call=call,
        )

    async def _young(self, oldest: tuple[int, int]) -> None:
        """Wait until the engine has weights that may sample these attempts."""
        until, wait_s = time.monotonic() + self._limits.wait_s, self._limits.wait_s
        while not ((found := self._engine.version) and (found.epoch, found.step) >= oldest):
            if time.monotonic() > until:
                told = "epoch {}, step {}".format(*oldest)
                raise EngineError(f"no engine has acknowledged {told} ({wait_s} s)")
            await asyncio.sleep(YOUNG_S)

    def _check(self, sampled: Sampled, oldest: Version, request: Request) -> None:
        """EngineError for an answer that is not whole, or not of the weights it must be of."""
        logp, index = sampled.logp, sampled.version_index
        lengths = {len(sampled.tokens), len(logp), len(index)}
        if sampled.trainable and (len(lengths) > 1 or lengths == {0}):
            self._tally(["rejected_ragged"])
            raise EngineError(f"an answer with {sorted(lengths)} ids, log-probs and versions")
        if len(sampled.tokens) > request.max_new_tokens:
            raise EngineError(f"{len(sampled.tokens)} ids for {request.max_new_tokens}")
        if not (math.isfinite(sum(logp)) and max(logp, default=0.0) <= ROUNDING):
            raise EngineError("an answer with a log-prob above 0, or not finite")
        stamps = sampled.versions
        if not stamps or min(index, default=0) < 0 or max(index, default=0) >= len(stamps):
            self._tally(["refused_stamp"])
            raise EngineError("an answer without the version that sampled it")
        if not all(_at_least(stamp, oldest) for stamp in stamps):
            self._tally(["refused_stamp"])
            raise EngineError(f"an answer of {min(stamps)}; allowed: {oldest} or newer")

    def _call(self, one: Asked, ask: Ask, sampled: Sampled) -> Call:
        attempt, plan = one.attempt, one.plan
        tokens, text, reason = self._cut(sampled, ask.stops)
        if not sampled.trainable:
            tokens = self._tokenizer.encode(text)
            self._tally([] if attempt.visits else ["untrainable"])
        count = len(tokens)
        index = len(attempt.conversation.calls)
        name = f"{attempt.lease.group}_{attempt.lease.sample}_{index}"
        return Call(
            index=index,
            parent=plan.parent,
            context=plan.context,
            tokens=tokens,
            logp=sampled.logp[:count],
            version_index=sampled.version_index[:count],
            versions=list(sampled.versions),
            temperature=one.request.temperature,
            stop_reason=reason,
            text=text,
            chain=link(plan.chain, answer_message(text, name)) if plan.chain else "",
            shown=plan.shown + text if plan.shown else "",
            tools=plan.tools,
            drift=plan.drift,
            request=ask.request,
            trainable=sampled.trainable,
        )

    def _cut(self, sampled: Sampled, stops: Sequence[str]) -> tuple[list[int], str, StopReason]:
        """Ids, text and stop reason up to the first stop text. The ids end with the token that
        completed it: what came after was sampled, but nobody has seen it."""
        whole = sampled.text if not sampled.trainable else self._tokenizer.decode(sampled.tokens)
        places = [place for stop in stops if stop and (place := whole.find(stop)) >= 0]
        if not places:
            return sampled.tokens, whole, sampled.stop_reason
        shown = whole[: min(places)]
        if not sampled.trainable:
            return [], shown, StopReason.STOP

        def holds(count: int) -> bool:
            text = self._tokenizer.decode(sampled.tokens[:count])
            return any(stop in text for stop in stops if stop)

        count = bisect.bisect_left(range(len(sampled.tokens)), True, key=holds)
        return sampled.tokens[:count], shown, StopReason.STOP


def _given_back() -> LedgerRefusal:
    return LedgerRefusal("cancelled", "the engines were overloaded; it is attempted again")


def _ended(told: Sampled | BaseException) -> Sampled | Exception:
    """How a call ended; one that was abandoned is of an attempt that was given back."""
    if isinstance(told, asyncio.CancelledError):
        return _given_back()
    if isinstance(told, Sampled | Exception):
        return told
    raise told


def oldest_of(attempts: Sequence[Attempt]) -> tuple[int, int]:
    """Epoch and step of weights that may sample all of the attempts."""
    versions = {id(one.lease.version): one.lease.version for one in attempts}  # groups share them
    return max([(version.epoch, version.step) for version in versions.values()])


def _at_least(version: Version | None, oldest: Version) -> bool:
    """Whether a version is this one or a newer one."""
    return version is not None and (version.epoch, version.step) >= (oldest.epoch, oldest.step)
