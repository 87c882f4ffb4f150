"""Which draw comes next, and which draws a step that is not yet covered by a checkpoint has
used."""

from collections.abc import Mapping
from typing import Any

from jaxrl.pool.contract import PoolError


class Cursor:
    """A position in an endless or finite row of draws, with the starts of the steps in flight.

    A step that is begun again (after a restart, or because its batch was never trained) rolls the
    position back to where it began, so every draw is trained once: draws that were made ahead of
    the checkpoint are made again, none is passed over.
    """

    def __init__(self) -> None:
        self.position = 0
        self.committed = -1  # the last step whose groups are never handed out again
        self._begun: dict[int, int] = {}  # step: position at its start, for steps after `committed`

    def begin(self, step: int) -> None:
        """Start the draws of a step. PoolError if its groups were committed already."""
        if step <= self.committed:
            raise PoolError(
                f"step {step} was committed (all up to {self.committed} were): "
                "its groups are not handed out again"
            )
        later = [begun for begun in self._begun if begun >= step]
        self.position = min((self._begun[begun] for begun in later), default=self.position)
        for begun in later:
            del self._begun[begun]
        self._begun[step] = self.position

    def commit(self, step: int) -> None:
        """Forget how to roll back to steps up to and including this one."""
        self.committed = max(self.committed, step)
        self._begun = {begun: at for begun, at in self._begun.items() if begun > self.committed}

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "position": self.position,
            "committed": self.committed,
            "begun": [[step, at] for step, at in sorted(self._begun.items())],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self.position = int(state["position"])
        self.committed = int(state["committed"])
        self._begun = {int(step): int(at) for step, at in state["begun"]}
