"""Who may begin at a gateway: no more attempts than engines bear, and none while weights are
loaded. No jax here.

What is under way goes on through a load. When engines are overloaded, the attempts of the youngest
groups are given back: their siblings have come least far.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from jaxrl.pool.admission import Admission, Move, youngest
from jaxrl.pool.engines import Engine, EngineError
from jaxrl.pool.ledger import Lease
from jaxrl.pool.order import Bell
from jaxrl.pool.rollout import Version

LOOK_S = 1.0  # between two questions to engines


class Entrance:
    """The attempts that were leased at a gateway and have not ended. ``cancel`` gives attempts
    back."""

    def __init__(
        self,
        admission: Admission,
        engine: Engine,
        bell: Bell,
        lease_s: float,
        cancel: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self.admission = admission
        self._engine, self._bell, self._lease_s, self._cancel = engine, bell, lease_s, cancel
        # a token's group, by age, and when its lease runs out, if nobody extends it
        self._lent: dict[str, tuple[tuple[int, ...], float]] = {}
        self._taken = 0  # leases that the ledger is being asked for
        self._most = 0  # attempts under way since the last look, at most
        self._loads = 0
        self._closed = False  # somebody was told that there is no room
        self._opened = asyncio.Event()

    # -- leases

    def room(self, most: int) -> int:
        """How many of so many attempts may begin now."""
        if self._loads:
            return 0
        left = self.admission.limit - len(self._lent) - self._taken
        if left < most:
            self._forget_late()
            left = self.admission.limit - len(self._lent) - self._taken
            self._closed |= left < most
        return max(min(left, most), 0)

    def short(self) -> None:
        """Somebody waits for what attempts hold that are under way."""
        self._closed = True

    @contextlib.asynccontextmanager
    async def taking(self, count: int) -> AsyncIterator[None]:
        """Room that is kept while the ledger is asked for leases."""
        self._taken += count
        try:
            yield
        finally:
            self._taken -= count

    def begun(self, leases: Iterable[Lease]) -> None:
        """These are under way now."""
        ends = time.monotonic() + self._lease_s
        self._lent |= {
            one.token: ((one.version.epoch, one.version.step, one.group), ends) for one in leases
        }
        self._most = max(self._most, len(self._lent))

    def extended(self, tokens: Iterable[str]) -> None:
        """Their leases begin anew."""
        ends = time.monotonic() + self._lease_s
        for token in tokens:
            if (known := self._lent.get(token)) is not None:
                self._lent[token] = known[0], ends

    def unknown(self, token: str) -> bool:
        """Whether it is not known to be under way: leased before this gateway was started."""
        return token not in self._lent

    def ended(self, tokens: Iterable[str]) -> None:
        """These are not under way any more."""
        for token in tokens:
            self._lent.pop(token, None)
        if self._closed:
            self._closed = False
            self._bell.ring()

    @property
    def strict(self) -> bool:
        """Whether not everything that was leased may begin at once."""
        return self._loads > 0 or len(self._lent) > self.admission.limit

    def over(self, tokens: Sequence[str]) -> set[str]:
        """Which of these are more than may be under way, the oldest groups first."""
        self._forget_late()
        return {*tokens} & {*self._youngest()}

    def _youngest(self) -> list[str]:
        order = {token: group for token, (group, _) in self._lent.items()}
        return youngest(order, self.admission.limit)

    def _forget_late(self) -> None:
        """Their workers are gone: the ledger gives their samples to others."""
        now = time.monotonic()
        for token in [token for token, (_, ends) in self._lent.items() if ends < now]:
            del self._lent[token]

    # -- weights

    async def load(self, version: Version, path: str) -> None:
        """Have the engine load weights, while nothing begins. EngineError if that failed."""
        if not self._loads:
            self._opened.clear()
        self._loads += 1
        try:
            await self._engine.load(version, path)
        finally:
            self._loads -= 1
            if not self._loads:
                self._opened.set()
                self._bell.ring()

    async def opened(self, wait_s: float) -> None:
        """Wait while weights are loaded. EngineError if that takes longer."""
        if not self._loads:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._opened.wait()
        except TimeoutError:
            raise EngineError(f"weights are being loaded for more than {wait_s} s") from None

    # -- engines

    async def look(self) -> Move:
        """Ask the engine how it is, move the limit, and end what is too much."""
        told = await self._engine.pressure()
        if self._loads:  # begun meanwhile
            return Move.HELD
        self._forget_late()
        move = self.admission.look(told, len(self._lent), self._most)
        self._most = len(self._lent)
        if move is Move.CUT:
            await self._cancel(self._youngest())
        if move is Move.GREW:
            self._bell.ring()
        return move

    @contextlib.asynccontextmanager
    async def watched(self, look_s: float) -> AsyncIterator[None]:
        """Look every so many seconds while something is under way, if the limit moves at all. An
        engine that loads weights is idle for no lack of attempts: it says nothing of the limit."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(look_s)
                if self._lent and not self._loads:
                    with contextlib.suppress(OSError):  # a ledger may come back
                        await self.look()

        watching = asyncio.create_task(watch()) if self.admission.adapts else None
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()

    def counts(self) -> dict[str, Any]:
        """The limit, if there is one; attempts under way; where engines are asked, what the limit
        did so far and what was told last."""
        self._forget_late()
        admission, told = self.admission, self.admission.told
        counts: dict[str, Any] = {"under_way": len(self._lent)}
        if admission.bounds or admission.adapts:
            counts["limit"] = admission.limit
        if admission.adapts:
            moves = {name: admission.counts[name] for name in ("grew", "trimmed", "cut", "untold")}
            counts |= moves | {"kv_usage": told.usage, "waiting": told.waiting}
            counts["preempted"] = told.preempted
        return counts
