"""What generates behind a gateway: a generator in this process, or servers. No jax here.

An engine stamps each token with the version that sampled it, when it is sampled, and serves nothing
before it has loaded a version and said so. New weights reset whatever was computed with the old
ones.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from jaxrl.pool.contract import Completion, Generator, Request
from jaxrl.pool.pressure import Pressure
from jaxrl.pool.rollout import StopReason, Version

# Seconds that the first request of a batch waits for others: below what a decoding step takes.
LINGER_S = 0.004


class EngineError(RuntimeError):
    """An engine failed: infrastructure, no fault of the request."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """An answer with the version of each of its tokens."""

    tokens: list[int]  # the terminator included
    logp: list[float]
    version_index: list[int]  # into `versions`
    versions: list[Version]
    stop_reason: StopReason  # STOP or LENGTH
    text: str = ""  # of a server that tells no ids
    trainable: bool = True  # False: ids and log-probs are not known

    @classmethod
    def of(cls, completion: Completion) -> "Sampled":
        """A whole completion, sampled by one version."""
        count = len(completion.tokens)
        return cls(
            tokens=[int(token) for token in completion.tokens],
            logp=[float(value) for value in completion.logp],
            version_index=[0] * count,
            versions=[completion.version],
            stop_reason=completion.stop_reason,
        )

    def then(self, more: "Sampled") -> "Sampled":
        """This answer and how it went on."""
        versions = list(dict.fromkeys([*self.versions, *more.versions]))
        index = [versions.index(more.versions[place]) for place in more.version_index]
        return Sampled(
            tokens=[*self.tokens, *more.tokens],
            logp=[*self.logp, *more.logp],
            version_index=[*self.version_index, *index],
            versions=versions,
            stop_reason=more.stop_reason,
        )


class Engine(Protocol):
    """A generation engine as a gateway sees it."""

    @property
    def version(self) -> Version | None:
        """The version that has been acknowledged; None serves nothing."""
        ...

    async def generate(self, request: Request) -> Sampled:
        """One answer. ValueError for a request that cannot be served, EngineError else."""
        ...

    async def load(self, version: Version, path: str) -> None:
        """Take new weights, whose digest is checked, and forget what was computed with the old
        ones. EngineError if that failed: then nothing is served until it succeeds."""
        ...

    def counts(self) -> dict[str, float]:
        """What the engine has done so far, by name."""
        ...

    async def pressure(self) -> list[Pressure | None]:
        """The load of each of its servers, always in the same order; None of one that does not
        tell. It raises nothing."""
        ...

    async def close(self) -> None:
        """Free what the engine holds."""
        ...


@dataclasses.dataclass
class _Asked:
    """Requests whose answers are told together."""

    answers: list[Any]  # Sampled, or an Exception
    left: int
    told: asyncio.Future[None]

    def take(self, place: int, answer: Sampled | Exception) -> bool:
        """Keep an answer; whether it was the last one."""
        self.answers[place] = answer
        self.left -= 1
        return not self.left


@dataclasses.dataclass
class _Job:
    """A request on its way, with what was sampled so far."""

    request: Request
    asked: _Asked
    place: int
    so_far: Sampled | None = None

    def next(self, chunk: int, room: int) -> Request:
        """What to ask for now: at most ``chunk`` tokens, unless the prompt then grew beyond
        ``room``."""
        made = self.so_far.tokens if self.so_far else []
        prompt = [*self.request.prompt, *made]
        left = self.request.max_new_tokens - len(made)
        if chunk and len(prompt) + chunk <= room:
            left = min(left, chunk)
        first = self.request.first + len(made)
        return self.request._replace(prompt=prompt, max_new_tokens=left, first=first)

    def take(self, more: Sampled) -> bool:
        """Add what was sampled; whether the answer is whole."""
        self.so_far = self.so_far.then(more) if self.so_far else more
        whole = len(self.so_far.tokens) >= self.request.max_new_tokens
        return whole or more.stop_reason is StopReason.STOP


class Batching:
    """A generator in a thread of its own: all requests that are waiting are decoded together.

    With ``chunk_tokens`` > 0 answers are generated so many tokens at a time, while prompt and
    answer fit into ``room`` tokens: requests that came meanwhile join in, and new weights take over
    in the middle of an answer, which is then read again by them. With 0, an answer is of one
    version, and weights wait for the running batch. ``slots`` is how many the generator decodes at
    once; 0: not known, and no load is told.
    """

    def __init__(
        self, generator: Generator, *, chunk_tokens: int, room: int, slots: int = 0
    ) -> None:
        self._generator, self._chunk, self._room = generator, chunk_tokens, room
        self._slots, self._asked, self._answered = slots, 0, 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._active: list[_Job] = []
        self._version: Version | None = None
        self._batches, self._busy_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> Version | None:
        """Of the weights that are loaded."""
        return self._version

    async def generate(self, request: Request) -> Sampled:
        """One answer, decoded beside others."""
        (told,) = await self.generate_all([request])
        if isinstance(told, Exception):
            raise told
        return told

    async def generate_all(self, requests: Sequence[Request]) -> list[Sampled | Exception]:
        """An answer to each, or why there is none."""
        count = len(requests)
        asked = _Asked([None] * count, count, asyncio.get_running_loop().create_future())
        self._asked += count
        self._inbox.put([_Job(one, asked, place) for place, one in enumerate(requests)])
        await asked.told
        return asked.answers

    async def load(self, version: Version, path: str) -> None:
        """Load between two batches, or two chunks."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._inbox.put((version, path, done))
        await asyncio.wrap_future(done)

    def counts(self) -> dict[str, float]:
        """Batches (or pieces of them), and the seconds that they took; requests under way."""
        under_way = self._asked - self._answered
        return {"batches": self._batches, "busy_s": self._busy_s, "under_way": under_way}

    async def pressure(self) -> list[Pressure | None]:
        """Slots in use, of all, and requests beyond them. The cache of all slots is there from the
        beginning: nothing is ever preempted."""
        if not self._slots:
            return [None]
        under_way = self._asked - self._answered
        used = min(under_way, self._slots)
        return [Pressure(used / self._slots, under_way - used, 0)]

    async def close(self) -> None:
        """End the thread when its batch is done; requests that wait are refused."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 10.0)

    def _run(self) -> None:
        while True:
            loads, ended = self._gather()
            for version, path, done in loads:
                self._load(version, path, done)
            if ended:
                break
            if self._active:
                self._step()
        _tell([(job, EngineError("the engine was closed")) for job in self._active])

    def _gather(self) -> tuple[list[Any], bool]:
        """Everything that waits, once there is something to do."""
        loads, until = [], time.monotonic() + LINGER_S
        while True:
            idle = not self._active and not loads
            left = until - time.monotonic()
            try:
                item = self._inbox.get(timeout=None if idle else max(left, 0))
            except queue.Empty:
                return loads, False
            if item is None:
                return loads, True
            if isinstance(item, list):
                if not self._active:
                    until = time.monotonic() + LINGER_S
                self._active += item
            else:
                loads.append(item)

    def _load(self, version: Version, path: str, done: "concurrent.futures.Future[None]") -> None:
        self._version = None
        try:
            self._generator.load(version, path)
        except Exception as error:  # told to the one who asked for it
            done.set_exception(EngineError(f"loading {version}: {error}"))
            return
        self._version = version
        done.set_result(None)

    def _step(self) -> None:
        """One batch, or one chunk of it."""
        jobs, began = self._active, time.monotonic()
        self._active = []
        if self._version is None:
            error = EngineError("the engine has acknowledged no version")
            results: Sequence[Completion | Exception] = [error] * len(jobs)
        else:
            results = self._generated([job.next(self._chunk, self._room) for job in jobs])
        ended: list[tuple[_Job, Sampled | Exception]] = []
        for job, result in zip(jobs, results, strict=True):
            if job.asked.told.cancelled():
                self._answered += 1
                continue
            if isinstance(result, Exception):
                ended.append((job, result))
            elif job.take(Sampled.of(result)):
                assert job.so_far is not None
                ended.append((job, job.so_far))
            else:
                self._active.append(job)
        self._answered += len(ended)
        _tell(ended)
        self._batches += 1
        self._busy_s += time.monotonic() - began

    def _generated(self, requests: Sequence[Request]) -> Sequence[Completion | Exception]:
        """A completion for each request, or what is wrong with it."""
        try:
            return self._generator.generate(requests)
        except ValueError as error:
            if len(requests) == 1:
                return [error]
            # One of them cannot be served; the others are not to blame.
            return [one for request in requests for one in self._generated([request])]
        except Exception as error:
            return [EngineError(f"{type(error).__name__}: {error}")] * len(requests)


def _tell(ended: Sequence[tuple[_Job, Sampled | Exception]]) -> None:
    """Answer those who asked, in their own threads: all of a loop at once."""

    def tell(mine: Sequence[asyncio.Future[None]]) -> None:
        for told in mine:
            if not told.done():
                told.set_result(None)

    whole = [job.asked.told for job, result in ended if job.asked.take(job.place, result)]
    for loop in {told.get_loop() for told in whole}:
        mine = [told for told in whole if told.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # a loop that was closed asks for nothing
            loop.call_soon_threadsafe(tell, mine)


class Fleet:
    """Several engines as one: a request goes to the least busy one that has the newest weights.

    An engine that fails to load is left out until a later load succeeds.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._busy = {place: 0 for place in range(len(engines))}
        self._engines = list(engines)
        self._lost = 0

    @property
    def version(self) -> Version | None:
        """The newest that any engine has."""
        return max((e.version for e in self._engines if e.version is not None), default=None)

    async def generate(self, request: Request) -> Sampled:
        """One answer, of one of the engines."""
        newest = self.version
        fit = [place for place in self._busy if self._engines[place].version == newest]
        if newest is None or not fit:
            raise EngineError("no engine has acknowledged a version")
        place = min(fit, key=lambda place: self._busy[place])
        self._busy[place] += 1
        try:
            return await self._engines[place].generate(request)
        finally:
            self._busy[place] -= 1

    async def load(self, version: Version, path: str) -> None:
        """Load everywhere; EngineError if it failed everywhere."""
        loads = (engine.load(version, path) for engine in self._engines)
        errors = [e for e in await asyncio.gather(*loads, return_exceptions=True) if e is not None]
        self._lost += len(errors)
        if len(errors) == len(self._engines):
            raise EngineError(f"no engine took {version}: {errors[0]}")

    async def pressure(self) -> list[Pressure | None]:
        """Of all servers of all engines."""
        told = await asyncio.gather(*(engine.pressure() for engine in self._engines))
        return [one for each in told for one in each]

    def counts(self) -> dict[str, float]:
        """Sums over the engines; ``lost``: loads that failed."""
        told = Counter[str]()
        for engine in self._engines:
            told.update(engine.counts())
        return {**told, "lost": self._lost}

    async def close(self) -> None:
        """Close all."""
        await asyncio.gather(*(engine.close() for engine in self._engines))
