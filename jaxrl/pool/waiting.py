"""What a trainer tells its ledger while it waits, where permits are limited: which groups it lacks,
and that it is about to judge."""

import time
from collections.abc import Sequence

from jaxrl.pool.ledger import GroupState, Ledger, Live
from jaxrl.pool.permits import BELIEVED_S, Permits, Used

TOLD_S = 1.0  # after which a ledger is told again


class Waiting:
    """What a trainer tells its ledger of its waits; nothing where there is no limit."""

    def __init__(self, ledger: Ledger, permits: Permits) -> None:
        self._ledger, self._permits = ledger, permits
        self._told, self._when = 0, 0.0

    def lacks(self, live: Sequence[Live], n: int, step: int) -> None:
        """No batch of ``n`` groups for ``step`` is there yet."""
        if not self._permits.spool_bytes:
            return
        due = [group for group in live if group.step == step]
        among = due or [group for group in live if group.step is None]
        ready = sum(group.state is GroupState.READY for group in among)
        lacking = max((len(due) if due else n) - ready, 1)
        if lacking != self._told or time.monotonic() > self._when + TOLD_S:
            self._ledger.lack(lacking, BELIEVED_S)
            self._told, self._when = lacking, time.monotonic()

    def over(self) -> None:
        """There is a batch."""
        if self._told:
            self._ledger.lack(0, 0.0)
            self._told = 0

    def may_judge(self, seconds: float) -> bool:
        """Whether a verdict may be asked for now, in so many seconds. If not, one permit is kept
        for this trainer, which asks again: it comes before all that is not leased yet."""
        if not self._permits.rooms(Used(0, 0, 0)):
            return True
        return self._ledger.ask_judge(seconds, self._permits)

    def judged(self) -> None:
        """The verdict is there, or the group is not wanted."""
        if self._permits.rooms(Used(0, 0, 0)):
            self._ledger.end_judging()
