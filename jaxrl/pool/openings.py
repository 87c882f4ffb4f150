"""Which groups a remote pool opens next: draws in their order, less what is refused.

A group's id is the number of its draw. What was passed over or voided is not drawn again.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.pool.contract import PoolError, Question, Questions, Tokenizer
from jaxrl.pool.draws import Draws
from jaxrl.pool.ledger import OpenGroup
from jaxrl.pool.local import MAX_GROUPS, QUARANTINE_AFTER
from jaxrl.pool.prompts import prompt_ids, refusal
from jaxrl.pool.ranges import Ranges
from jaxrl.pool.rollout import Version


class Openings:
    """An endless or finite row of groups to be opened, and the tasks that are asked no more."""

    def __init__(
        self,
        tasks: Sequence[Question],
        source: Questions,
        tokenizer: Tokenizer,
        *,
        seed: int,
        samples: int,
        max_prompt_tokens: int,
        max_attempts: int,
        min_group: int,
        epochs: int,
    ) -> None:
        self.draws = Draws(tasks, seed)
        self._tasks, self._source, self._tokenizer = tasks, source, tokenizer
        self._samples, self._max_prompt_tokens = samples, max_prompt_tokens
        self._max_attempts, self._min_group = max_attempts, min_group
        self._end = min(epochs * len(tasks), MAX_GROUPS) if epochs else MAX_GROUPS
        self._position = 0  # the next draw
        self._again: list[int] = []  # draws that a new ledger does not have
        self._gone = Ranges()  # void, or passed over at the draw
        self._failures: dict[str, list[int]] = {}  # content hash: groups that its verifier failed

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to draw."""
        return self._position >= self._end and not self._again

    def draw(self, version: Version, generation: int, counts: Counter[str]) -> OpenGroup | None:
        """The next usable prompt; None at the end of the data. PoolError if a whole epoch has
        none."""
        for _ in range(len(self._tasks) + 1):
            if self.ended:
                return None
            if self._again:
                number = self._again.pop(0)
            else:
                number, self._position = self._position, self._position + 1
            task = self.draws.task(number)
            prompts = prompt_ids(self._source, self._tokenizer, task, self._samples)
            refused = refusal(prompts, self._max_prompt_tokens)
            if len(self._failures.get(task.content_hash, ())) >= QUARANTINE_AFTER:
                refused = "quarantined"
            if refused is None:
                return OpenGroup(
                    id=number,
                    task_key=task.key,
                    content_hash=task.content_hash,
                    split=task.split,
                    source=task.source,
                    prompts=prompts,
                    facts=self.draws.facts(task),
                    version=version,
                    max_attempts=self._max_attempts,
                    min_group=self._min_group,
                    generation=generation,
                )
            counts[refused] += 1
            self._gone.add(number)
        raise PoolError(
            f"none of {len(self._tasks)} prompts can be used "
            f"(max_prompt_tokens={self._max_prompt_tokens}): {dict(counts)}"
        )

    def lose(self, number: int, content_hash: str, reason: str) -> None:
        """A group is void. A task whose groups nobody could set up or judge is asked no more after
        the second one."""
        self._gone.add(number)
        if reason in ("data", "judge"):
            groups = self._failures.setdefault(content_hash, [])
            if number not in groups:
                groups.append(number)

    def follow(self, consumed: Ranges, held: set[int], next_id: int) -> None:
        """Go on with a ledger that holds these live groups: what it should have besides is drawn
        again, under the same numbers."""
        self._again = [
            number
            for number in consumed.gaps(self._position)
            if number not in held and number not in self._gone
        ]
        self._position = max(self._position, next_id)

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "position": self._position,
            "gone": [list(pair) for pair in self._gone],
            "failures": {task: list(groups) for task, groups in self._failures.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self._position, self._gone = int(state["position"]), Ranges(state["gone"])
        self._failures = {task: list(groups) for task, groups in state["failures"].items()}
