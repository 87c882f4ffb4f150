"""Who may go on in an event loop, and when: so many at once, one at a time with the same thing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection

RARE_S = 0.25  # between two looks of those who are told of news


class Bell:
    """What those wait for who look for something now and then.

    It rings when there is news. They look at multiples of some seconds on the clock besides, all of
    them together, so that an idle process wakes once for all; rarely, once ``relied`` on is that
    whoever makes news rings.
    """

    def __init__(self) -> None:
        self.relied = False
        self.news = asyncio.Event()  # of what comes after it was fetched

    def ring(self) -> None:
        """Wake all who wait."""
        self.news.set()
        self.news = asyncio.Event()

    async def wait(self, news: asyncio.Event, seconds: float) -> None:
        """Until there is news, or the time of the next look."""
        seconds = max(seconds, RARE_S) if self.relied else seconds
        left = seconds - time.monotonic() % seconds
        # A timer may end a little early: its multiple has been, though the clock does not say so.
        left = left if left > seconds / 8 else left + seconds
        timer = asyncio.get_running_loop().call_later(left, self._look, news)
        try:
            await news.wait()
        finally:
            timer.cancel()

    def _look(self, news: asyncio.Event) -> None:
        """Its time has come: as if there were news, unless there was."""
        if not news.is_set():
            self.ring()


class Room:
    """Room for so many; taken and given back in any numbers."""

    def __init__(self, size: int) -> None:
        self._free, self._freed = size, asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether who comes now has to wait."""
        return self._free == 0

    async def take(self, most: int) -> int:
        """As much as there is, at most so much; waits for some."""
        while self.full:
            self._freed.clear()
            await self._freed.wait()
        taken = min(most, self._free)
        self._free -= taken
        return taken

    def give(self, count: int) -> None:
        """Give back what was taken."""
        self._free += count
        self._freed.set()


class Turns:
    """Whoever acts on something that has a name has it to itself."""

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def of(self, names: Collection[str]) -> AsyncIterator[None]:
        """All of these at once, or none while somebody has one of them."""
        while others := self._ends.keys() & names:
            await self._ends[others.pop()].wait()
        ended = asyncio.Event()
        self._ends |= dict.fromkeys(names, ended)
        try:
            yield
        finally:
            for name in set(names):
                del self._ends[name]
            ended.set()
