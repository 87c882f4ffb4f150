"""How long a group may take: what groups like it took before. Only numbers here."""

import math
from collections.abc import Mapping
from typing import Any

RATE = 0.2  # of the newest group in an exponential mean
KEPT = 4096  # tasks that are remembered one by one, those that were seen last


class Durations:
    """Expected seconds of a group's longest sample, from those that were sealed.

    Means of log seconds, for durations have heavy tails: of its task, if one of that was seen; else
    of its universe (``Question.source``); else of all universes; 0 where nothing is known.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, float] = {}  # by content hash
        self._universes: dict[str, float] = {}

    def learn(self, universe: str, task: str, seconds: float) -> None:
        """A group took so long."""
        if not seconds > 0:
            return
        known, new = self._tasks.pop(task, None), math.log(seconds)
        self._tasks[task] = new if known is None else known + RATE * (new - known)
        if len(self._tasks) > KEPT:
            del self._tasks[next(iter(self._tasks))]
        known = self._universes.get(universe)
        self._universes[universe] = new if known is None else known + RATE * (new - known)

    def expected(self, universe: str, task: str) -> float:
        """Seconds, 0 where nobody can say."""
        if not self._universes:
            return 0.0
        mean = math.fsum(self._universes.values()) / len(self._universes)
        return math.exp(self._tasks.get(task, self._universes.get(universe, mean)))

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"tasks": dict(self._tasks), "universes": dict(self._universes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self._tasks, self._universes = dict(state["tasks"]), dict(state["universes"])
