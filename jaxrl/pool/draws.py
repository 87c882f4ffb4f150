"""Which task each draw of a pool is: in turn, or of universes with given probabilities. No jax."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.pool.contract import Question

WEIGHED = 2**63  # added to the draw's number: no epoch's permutation has the same random bits


class Draws:
    """An endless row of tasks, each a function of its number, the seed and the probabilities.

    Unweighed, a permutation of all tasks each epoch, made from (seed, epoch). Weighed, a universe
    (``Question.source``) by its probability and then any of its tasks, with replacement: position
    and probabilities are all that resuming needs.
    """

    def __init__(self, tasks: Sequence[Question], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        self._universes: dict[str, list[Question]] = {}
        for task in tasks:
            self._universes.setdefault(task.source, []).append(task)
        self._probabilities: dict[str, float] = {}

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """Draw universes with these probabilities from now on.

        ValueError unless they are those of exactly the universes that there are, >= 0, and sum to 1
        within 1e-4.
        """
        if set(probabilities) != set(self._universes):
            raise ValueError(
                f"probabilities of {sorted(probabilities)}; allowed: of each of the tasks' sources "
                f"{sorted(self._universes)}"
            )
        total = math.fsum(probabilities.values())
        if not (min(probabilities.values()) >= 0 and abs(total - 1) < 1e-4):
            raise ValueError(f"probabilities={dict(probabilities)}; allowed: >= 0, sum 1")
        self._probabilities = {name: p / total for name, p in sorted(probabilities.items())}

    def task(self, number: int) -> Question:
        """The task of a draw."""
        if self._probabilities:
            bits = self._bits(WEIGHED + number)
            names = list(self._probabilities)
            ends = np.cumsum([self._probabilities[name] for name in names])
            place = np.searchsorted(ends, bits.random() * ends[-1], side="right")
            universe = self._universes[names[min(int(place), len(names) - 1)]]
            return universe[int(bits.integers(len(universe)))]
        epoch, place = divmod(number, len(self._tasks))
        if self._order[0] != epoch:
            self._order = (epoch, self._bits(epoch).permutation(len(self._tasks)))
        return self._tasks[int(self._order[1][place])]

    def facts(self, task: Question) -> dict[str, float]:
        """``task_probability`` of a weighed draw; nothing of an unweighed one."""
        if not self._probabilities:
            return {}
        share = self._probabilities[task.source] / len(self._universes[task.source])
        return {"task_probability": share}

    def _bits(self, number: int) -> np.random.Generator:
        key = np.array([self._seed % 2**64, number], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))
