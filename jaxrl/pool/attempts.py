"""Attempts at the samples of a pool, as a gateway keeps them: lease, answer, seal. No jax here.

The ledger knows whose attempt a token is, the spool keeps its calls, the engine answers. A call is
in the spool before its answer is sent, so that a gateway which is started again knows all that any
agent has seen.
"""

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrl.pool.admission import Admission, unbounded
from jaxrl.pool.answers import FIRST_VISIT, VISITS, Answers, Ask, Asked, Attempt, Limits, oldest_of
from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.conversation import Call, Conversation
from jaxrl.pool.dialogue import Dialogue
from jaxrl.pool.engines import Engine, Sampled
from jaxrl.pool.entrance import Entrance
from jaxrl.pool.journal import Journal
from jaxrl.pool.ledger import Lease, Ledger, LedgerRefusal
from jaxrl.pool.order import Bell, Room, Turns
from jaxrl.pool.rollout import Failure, Version
from jaxrl.pool.seals import Seals
from jaxrl.pool.segments import Spool
from jaxrl.pool.tokens import name_of
from jaxrl.pool.turns import Said, Turn, calls_of

T = TypeVar("T")

# Attempts whose conversation is kept in memory; older ones are read from the spool when they are
# asked for again.
KEPT = 4096

# Transitions asked for side by side: a ledger makes one durable write of those that wait together.
CLERKS = 32

# Seconds between two looks for samples while workers wait for some, and after which the ledger is
# asked though nothing changed in it: leases run out by the clock.
LOOK_S, ASK_S = 0.05, 1.0


class Busy(RuntimeError):
    """More answers are under way than are allowed at once."""


class Attempts:
    """All attempts of a run at one gateway.

    ``admission`` bounds how many are under way; None: nothing does. The ledger is used by several
    threads. Raises LedgerRefusal for a token that may not act, ValueError for a request that cannot
    be served (ContextLimit: it is too long), EngineError and OSError for infrastructure, Busy over
    the limit.
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        engine: Engine,
        tokenizer: Tokenizer,
        dialogue: Dialogue,
        limits: Limits,
        admission: Admission | None = None,
    ) -> None:
        self._clerks = concurrent.futures.ThreadPoolExecutor(CLERKS, "ledger")
        self._ledger = ledger
        self.spool, self.engine, self.limits = spool, engine, limits
        self._tokenizer, self._dialogue = tokenizer, dialogue
        self._held: OrderedDict[str, Attempt] = OrderedDict()
        self._room, self._turns = Room(limits.under_way), Turns()
        self._idle, self.bell = asyncio.Lock(), Bell()
        # what the ledger's changes were when there was nothing to lease, and when
        self._empty: tuple[int | None, float] = (None, 0.0)
        self._answers = Answers(engine, tokenizer, limits, self._tally)
        self._seals = Seals(ledger, spool, tokenizer, limits)
        self.entrance = Entrance(
            admission or unbounded(), engine, self.bell, limits.lease_s, self._cancel
        )
        self._turned: set[str] = set()  # attempts that were told to come again, and did not yet
        self._journal = Journal(spool)
        self.counts: Counter[str] = Counter()
        self.own_s = 0.0  # processor time of the ledger's and the spool's threads
        self._timing = threading.Lock()

    async def close(self) -> None:
        """End the threads and close the ledger."""
        await self._asked(self._ledger.close)
        self._clerks.shutdown()

    async def _asked(self, work: Callable[..., T], *args: Any) -> T:
        """What the ledger answers."""
        return await asyncio.wrap_future(self._clerks.submit(self._timed, work, *args))

    def _timed(self, work: Callable[..., T], *args: Any) -> T:
        began = time.thread_time()
        try:
            return work(*args)
        finally:
            with self._timing:
                self.own_s += time.thread_time() - began

    async def ledger_counts(self) -> dict[str, int]:
        """What the ledger tells of itself."""
        return await self._asked(self._ledger.counts)

    def _tally(self, names: Sequence[str]) -> None:
        """Count what is rare, here and in the ledger, where the trainer reads it."""
        for name in names:
            self.counts[name] += 1
            self._clerks.submit(self._timed, self._ledger.count, name)

    # -- leases

    async def lease(
        self, owner: str, most: int, wait_s: float, gone: Callable[[], bool]
    ) -> list[Lease]:
        """At most so many samples to attempt, waited for unless whoever asked is ``gone``."""
        until, news, short = time.monotonic() + wait_s, self.bell.news, set[str]()
        leases = [] if gone() or self._is_empty() else await self._leased(owner, most, short)
        while not (leases or gone()) and time.monotonic() < until:
            async with self._idle:  # all who wait look in turn, and ask for what others left
                await self.bell.wait(news, LOOK_S)
                while self._is_empty() and not gone() and time.monotonic() < until:
                    await self.bell.wait(self.bell.news, LOOK_S)
                news = self.bell.news
                leases = [] if gone() else await self._leased(owner, most, short)
        self.counts.update(f"waited_{unit}" for unit in short)
        return leases

    async def _leased(self, owner: str, most: int, short: set[str]) -> list[Lease]:
        """What there is to lease now; adds the units that others wait for."""
        if not (room := self.entrance.room(most)):
            return []
        now, seen, lacked = time.monotonic(), self._ledger.changes(), set[str]()
        async with self.entrance.taking(room):
            leases = await self._asked(self._permitted, owner, room, lacked)
        self.entrance.begun(leases)
        # a permit may be free again by what changes no sample that waits
        nothing_left = len(leases) < room and not lacked
        self._empty = (seen, now) if nothing_left else (None, 0.0)
        short |= lacked
        begin, began = self._conversation, time.time()
        self._keep({one.token: Attempt(one, begin, began, seen=seen) for one in leases})
        self.counts["leased"] += len(leases)
        return leases

    def _permitted(self, owner: str, most: int, short: set[str]) -> list[Lease]:
        """In a thread of the ledger: at most so many samples; adds the units that others of them
        wait for."""
        permits, lease_s = self.limits.permits, self.limits.lease_s
        if not permits:
            return self._ledger.lease_many(owner, lease_s, most)
        granted = self._ledger.lease_within(owner, lease_s, most, permits)
        if granted.short:
            short.update(granted.short)
            self.entrance.short()
        return granted.leases

    async def held(self) -> dict[str, int]:
        """Of each unit that has a limit, what is held in the run, and how many questions for
        samples waited for it here."""
        permits = self.limits.permits
        if not permits:
            return {}
        held = permits.held(await self._asked(self._ledger.used, permits))
        return {**held, **{f"waited_{unit}": self.counts[f"waited_{unit}"] for unit in held}}

    def _is_empty(self) -> bool:
        """Whether somebody has just found nothing to lease, and nothing has changed since."""
        seen, when = self._empty
        recent = seen is not None and time.monotonic() < when + ASK_S
        return recent and self._ledger.changes() == seen

    async def heartbeat(self, tokens: Sequence[str]) -> list[str]:
        """Extend leases; for each "" or the reason of a refusal."""

        def extended() -> list[str]:
            return [_reason(self._ledger.heartbeat, token, self.limits.lease_s) for token in tokens]

        told = await self._asked(extended)
        pairs = list(zip(tokens, told, strict=True))
        for token in [one for one, why in pairs if not why and self.entrance.unknown(one)]:
            with contextlib.suppress(LedgerRefusal):
                self.entrance.begun([await self._asked(self._ledger.find, token)])
        self.entrance.extended([token for token, why in pairs if not why])
        self.entrance.ended([token for token, why in pairs if why])
        return told

    async def attempt(self, token: str) -> Attempt:
        """The attempt of a token that may act; read from the spool if it is not in memory."""
        try:
            lease = await self._asked(self._ledger.find, token)
        except LedgerRefusal:
            self.entrance.ended([token])
            raise
        return self._hold(lease)

    async def begin(
        self, tokens: Sequence[str], plain: bool = False
    ) -> list[Attempt | LedgerRefusal | Busy]:
        """The attempts of tokens, about to be answered. Plain ones stay as they were leased: to be
        answered is all that they do.

        New ones wait while weights are loaded (EngineError if for too long), and are Busy over the
        limit, which may have fallen since they were leased.
        """
        over = await self._turned_away(tokens) if self.entrance.strict else set[str]()
        may = [token for token in tokens if token not in over] if over else tokens
        if plain and not over and (known := self._certain(tokens)):
            self._turned.difference_update(tokens)
            return known
        begun = await self._asked(self._begun, may, plain)
        found: dict[str, Attempt | LedgerRefusal | Busy] = {}
        for token, known in zip(may, begun, strict=True):
            if isinstance(known, LedgerRefusal):
                self._held.pop(token, None)
                self.entrance.ended([token])
                found[token] = known
                continue
            found[token] = attempt = known if isinstance(known, Attempt) else self._hold(known)
            attempt.started |= not plain
        self._turned.difference_update(may)
        return [found.get(token) or self._busy() for token in tokens]

    async def _turned_away(self, tokens: Sequence[str]) -> set[str]:
        """Those that must come again, once the others may begin."""
        new = [token for token in tokens if not self._is_running(token)]
        if new:
            await self.entrance.opened(self.limits.wait_s)
        over = self.entrance.over(new)
        self._turned |= over
        self.counts["refused_busy"] += len(over)
        return over

    def _is_running(self, token: str) -> bool:
        """Whether something was asked under it already."""
        known = self._held.get(token)
        return known is not None and (known.started or not known.fresh)

    def _busy(self) -> Busy:
        limit = min(self.entrance.admission.limit, self.limits.under_way)
        return Busy(f"{limit} answers are under way; allowed: no more")

    def _certain(self, tokens: Sequence[str]) -> list[Attempt | LedgerRefusal | Busy]:
        """The attempts of tokens where the ledger need not be asked whether they may act: nothing
        has changed in it since they were leased together. Else none."""
        held = [self._held.get(token) for token in tokens]
        known = [one for one in held if one is not None]
        seen = {one.seen for one in known}
        if len(known) < len(held) or len(seen) != 1:
            return []
        ends = {one.lease.expires for one in known}
        return [*known] if self._ledger.still(seen.pop(), ends, self.limits.lease_s) else []

    def _begun(self, tokens: Sequence[str], plain: bool) -> list[Attempt | Lease | LedgerRefusal]:
        """In a thread of the ledger: one question for all that run, one for all that are new."""
        pairs = [(token, self._held.get(token)) for token in tokens]
        running = [token for token, known in pairs if plain or (known and known.started)]
        new = [token for token, known in pairs if not (plain or (known and known.started))]
        told = dict(zip(running, self._ledger.check(running), strict=True))
        told |= dict(zip(new, self._ledger.start_many(new), strict=True))
        return [told[token] or known or self._ledger.find(token) for token, known in pairs]

    def _conversation(self) -> Conversation:
        return Conversation(self._tokenizer, self._dialogue)

    def _hold(self, lease: Lease) -> Attempt:
        """An attempt that is not in memory, with what the spool has of it."""
        if (known := self._held.get(lease.token)) is not None:
            return known
        self.entrance.begun([lease])
        attempt, name = Attempt(lease, self._conversation, time.time(), True), name_of(lease.token)
        calls = [call for line in self.spool.calls(name) for call in calls_of(name, line)]
        for call in sorted(calls, key=lambda call: call.index):  # of any journal
            attempt.conversation.add(call)
        self._keep({lease.token: attempt})
        return attempt

    def _keep(self, attempts: Mapping[str, Attempt]) -> None:
        self._held |= attempts
        while len(self._held) > KEPT:
            self._held.popitem(last=False)

    def visitor(self) -> Attempt:
        """Somebody who asks the newest weights something, once: evaluation. No ledger and no spool
        know of it, nothing of it is trained on, and it may be greedy."""
        lease = Lease(
            token="",
            epoch=0,
            group=FIRST_VISIT + secrets.randbelow(VISITS),
            sample=0,
            attempt=0,
            expires=float("inf"),
            prompt=(),
            task_key="",
            content_hash="",
            split="",
            source="",
            facts={},
            version=Version(0, 0, ""),
        )
        return Attempt(lease, self._conversation, time.time(), visits=True)

    # -- answers

    async def answer(self, attempt: Attempt, ask: Ask) -> Call:
        """One call: plan, generate, keep. Busy over the limit."""
        if self._room.full:
            self.counts["refused_busy"] += 1
            if not attempt.visits:
                self._turned.add(attempt.lease.token)
            raise self._busy()
        (told,) = await self.answers([attempt], ask)
        if isinstance(told, Exception):
            raise told
        assert isinstance(told, Call)  # what is not plain never stands in columns
        return told

    async def answers(self, attempts: Sequence[Attempt], ask: Ask) -> list[Call | Said | Exception]:
        """A call of each, or why there is none. Over the limit, some wait for the others."""
        told: list[Call | Said | Exception] = []
        while rest := attempts[len(told) :]:
            room = await self._room.take(len(rest))
            try:
                names = [one.lease.token for one in rest[:room] if not one.visits]
                async with self._turns.of(names):
                    told += await self._answered(rest[:room], ask)
            finally:
                self._room.give(room)
        return told

    async def _answered(
        self, attempts: Sequence[Attempt], ask: Ask
    ) -> Sequence[Call | Said | Exception]:
        began, requests = time.monotonic(), self._answers.alike(attempts, ask)
        sampled: list[Sampled | Exception] = []
        if requests is not None:
            oldest = oldest_of(attempts)
            sampled = await self._answers.sampled(requests, attempts, oldest)
            made = requests, sampled, oldest, time.monotonic() - began
            if turn := self._answers.together(attempts, ask, *made):
                return await self._said(attempts, turn)
        plans = [self._answers.planned(attempt, ask) for attempt in attempts]
        asked = [plan for plan in plans if isinstance(plan, Asked)]
        self.counts["replayed"] += sum(isinstance(plan, Call) for plan in plans)
        if requests is None:
            mine = [one.attempt for one in asked]
            questions = [one.request for one in asked]
            sampled = await self._answers.sampled(questions, mine, oldest_of(mine)) if mine else []
        spent = time.monotonic() - began
        for one in asked:
            one.attempt.generate_s += spent
        told = zip(asked, sampled, strict=True)
        made = [self._answers.made(one, ask, answer) for one, answer in told]
        kept = iter(await self._kept(asked, made))
        return [next(kept) if isinstance(plan, Asked) else plan for plan in plans]

    async def _said(self, attempts: Sequence[Attempt], turn: Turn) -> Sequence[Said | Exception]:
        """Keep a turn of attempts, before it is told."""
        try:
            await self._journal.keep(attempts[0].lease.epoch, [(turn.names, turn.encode())])
        except OSError as error:
            return [error] * len(attempts)
        for row, attempt in enumerate(attempts):
            attempt.said = turn, row
        self.counts["calls"] += len(attempts)
        self.counts["sampled_tokens"] += len(turn.tokens)
        return turn.said()

    async def _kept(
        self, asked: Sequence[Asked], made: Sequence[Call | Exception]
    ) -> list[Call | Exception]:
        """Before answers are sent: what an agent has seen is never forgotten."""
        told = list(made)
        calls = [
            (place, one.attempt, call)
            for place, (one, call) in enumerate(zip(asked, made, strict=True))
            if isinstance(call, Call)
        ]
        for epoch in {attempt.lease.epoch for _, attempt, _ in calls if not attempt.visits}:
            mine = [one for one in calls if one[1].lease.epoch == epoch]
            lines = [([name_of(attempt.lease.token)], call.encode()) for _, attempt, call in mine]
            try:
                await self._journal.keep(epoch, lines)
            except OSError as error:
                for place, _, _ in mine:
                    told[place] = error
        for place, attempt, call in calls:
            if told[place] is not call:
                continue
            attempt.conversation.add(call)
            self.counts["visits" if attempt.visits else "calls"] += 1
            self.counts["sampled_tokens"] += len(call.tokens)
            if call.drift:
                self._tally([f"drift_{call.drift}"])
        return told

    # -- ends

    async def seal(self, told: Mapping[str, Mapping[str, Any]]) -> dict[str, Exception]:
        """Write the records of attempts, each with what a worker says of it, then have the ledger
        take them; what could not be sealed, and why. The first seal wins.

        Plain verdicts on attempts that stand in columns are sealed together; of the others each is
        looked at by itself.
        """
        failed: dict[str, Exception] = {}
        attempts: dict[str, Attempt] = {}
        async with self._turns.of(told.keys()):
            for token in told:
                try:
                    attempts[token] = self._held.get(token) or await self.attempt(token)
                except (LedgerRefusal, OSError, ValueError) as error:
                    failed[token] = error
            failed |= await self._asked(self._seals.sealed, attempts, told)
        done = [token for token in attempts if isinstance(failed.get(token), LedgerRefusal | None)]
        self._forget(done)
        self.counts["sealed"] += sum(token not in failed for token in done)
        return failed

    async def fail(self, token: str, failure: Failure, reason: str) -> None:
        """The attempt ended without a result; it never becomes a reward. One that was told to come
        again, and did not, is given back: that is nobody's failure, though a worker that cannot
        read its agent's error takes it for the environment's."""
        try:
            if token in self._turned and failure in (Failure.INFRA, Failure.ENV):
                (refusal,) = await self._asked(self._ledger.cancel, [token], "busy")
                if refusal:
                    raise refusal
            else:
                await self._asked(self._ledger.fail, token, failure, reason)
                self.counts[f"failed_{failure.value}"] += 1
        except LedgerRefusal:
            self._forget([token])
            raise
        self.bell.ring()  # it may be attempted again
        self._forget([token])

    async def _cancel(self, tokens: Sequence[str]) -> None:
        """Give attempts back, and end what servers generate for them. What was sealed meanwhile
        stays so."""
        told = await self._asked(self._ledger.cancel, tokens, "pressure")
        for token in tokens:  # what is refused has ended, too
            if (known := self._held.get(token)) is not None:
                known.given_back = True
        self._answers.abandon(tokens)
        self._forget(tokens)
        self.counts["cancelled_pressure"] += told.count(None)
        self.bell.ring()  # their samples wait again

    def _forget(self, tokens: Sequence[str]) -> None:
        for token in tokens:
            self._held.pop(token, None)
        self._turned.difference_update(tokens)
        self.entrance.ended(tokens)
        self.spool.discard(map(name_of, tokens))


def _reason(work: Callable[..., Any], *args: Any) -> str:
    """Why the ledger refuses; "" if it does not."""
    try:
        work(*args)
    except LedgerRefusal as refusal:
        return refusal.reason
    return ""
