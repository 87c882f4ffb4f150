"""Answers on their way into the spool: those that end together are written at once. No jax."""

import asyncio
from collections.abc import Sequence

from jaxrl.pool.segments import Spool


class Journal:
    """Writes the calls of one turn of the event loop at once."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._waiting: list[
            tuple[int, Sequence[tuple[Sequence[str], bytes]], asyncio.Future[None]]
        ] = []

    async def keep(self, epoch: int, calls: Sequence[tuple[Sequence[str], bytes]]) -> None:
        """On return the spool has the calls, each of its attempts' keys. OSError if it has not."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._write)
        done = loop.create_future()
        self._waiting.append((epoch, calls, done))
        await done

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for epoch in {one[0] for one in waiting}:
            mine = [one for one in waiting if one[0] == epoch]
            error: Exception | None = None
            try:
                self._spool.append(epoch, [call for _, calls, _ in mine for call in calls])
            except (OSError, ValueError) as fault:
                error = fault
            for *_, done in mine:
                if done.done():
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
