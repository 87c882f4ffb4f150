"""Which groups a remote pool opens next: draws in their order, less what is refused.

A group's id is the number of its draw. What was passed over or voided is not drawn again. A draw
whose universe has its share of the pool waits, before all later ones of that universe.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxrl.pool.contract import PoolError, Question, Questions, Tokenizer
from jaxrl.pool.draws import Draws
from jaxrl.pool.durations import Durations
from jaxrl.pool.ledger import GroupState, Live, OpenGroup
from jaxrl.pool.local import MAX_GROUPS, QUARANTINE_AFTER
from jaxrl.pool.prompts import prompt_ids, refusal
from jaxrl.pool.quotas import DEFERRED, Quotas
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
        quotas: Sequence[tuple[str, float]] = (),
        universes: Collection[str] = (),  # of other shards; quotas may be theirs
    ) -> None:
        self.draws = Draws(tasks, seed)
        self.quotas = Quotas(quotas, {*universes, *(task.source for task in tasks)})
        self._durations = Durations()
        self._timed: set[int] = set()  # live groups whose duration is learnt
        self._by_key = {task.key: task for task in tasks}
        self._tasks, self._source, self._tokenizer = tasks, source, tokenizer
        self._samples, self._max_prompt_tokens = samples, max_prompt_tokens
        self._max_attempts, self._min_group = max_attempts, min_group
        self._end = min(epochs * len(tasks), MAX_GROUPS) if epochs else MAX_GROUPS
        self._position = 0  # the next draw
        # draws before that one which are to be opened yet: their universe had its share, or a new
        # ledger does not have them
        self._due: list[int] = []
        # of those that were deferred, what was drawn: probabilities may have moved since
        self._drawn: dict[int, tuple[str, dict[str, float]]] = {}
        self._gone = Ranges()  # void, or passed over at the draw
        self._failures: dict[str, list[int]] = {}  # content hash: groups that its verifier failed

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to draw."""
        return self._position >= self._end and not self._due

    def draw(
        self,
        version: Version,
        generation: int,
        counts: Counter[str],
        full: Collection[str] = (),
    ) -> OpenGroup | None:
        """The next usable prompt of a universe that is not full; None at the end of the data, or
        where all that may be drawn now is of full ones. PoolError if a whole epoch has none."""
        passed = 0  # without those that were due: they may be what nobody could use before
        while passed <= len(self._tasks):
            due = len(self._due)
            number = self._next(counts, full)
            if number is None:
                return None
            passed += len(self._due) >= due
            task, facts = self._of(number)
            self._drawn.pop(number, None)
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
                    facts=facts,
                    version=version,
                    max_attempts=self._max_attempts,
                    min_group=self._min_group,
                    generation=generation,
                    expected=self._durations.expected(task.source, task.content_hash),
                )
            counts[refused] += 1
            self._gone.add(number)
        if full:
            return None  # those of the full universes may be usable
        raise PoolError(
            f"none of {len(self._tasks)} prompts can be used "
            f"(max_prompt_tokens={self._max_prompt_tokens}): {dict(counts)}"
        )

    def _of(self, number: int) -> tuple[Question, dict[str, float]]:
        """The task of a draw, and the facts of its group."""
        if number in self._drawn:
            key, facts = self._drawn[number]
            return self._by_key[key], facts
        task = self.draws.task(number)
        return task, self.draws.facts(task)

    def _next(self, counts: Counter[str], full: Collection[str]) -> int | None:
        """The first draw whose universe is not full."""
        for place, number in enumerate(self._due):
            if not full or self._of(number)[0].source not in full:
                return self._due.pop(place)
        while self._position < self._end and len(self._due) < DEFERRED:
            number, self._position = self._position, self._position + 1
            task, facts = self._of(number)
            if task.source not in full:
                return number
            self._due.append(number)
            self._drawn[number] = task.key, facts
            counts["deferred"] += 1
        return None

    def learn(self, live: Sequence[Live]) -> None:
        """How long groups took, each once it is READY."""
        for group in live:
            if group.state is GroupState.READY and group.id not in self._timed:
                self._timed.add(group.id)
                self._durations.learn(group.source, group.content_hash, group.worked)
        self._timed &= {group.id for group in live}

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
        again, under the same numbers, and what was deferred waits on."""
        # Also those after the checkpoint: what was deferred since, only this process knew.
        self._position = max(self._position, next_id)
        self._due = [
            number
            for number in consumed.gaps(self._position)
            if number not in held and number not in self._gone
        ]
        self._drawn = {number: self._drawn[number] for number in self._due if number in self._drawn}

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "position": self._position,
            "gone": [list(pair) for pair in self._gone],
            "failures": {task: list(groups) for task, groups in self._failures.items()},
            "deferred": [[number, *told] for number, told in self._drawn.items()],
            "durations": self._durations.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self._position, self._gone = int(state["position"]), Ranges(state["gone"])
        self._failures = {task: list(groups) for task, groups in state["failures"].items()}
        deferred = state.get("deferred", ())  # older checkpoints knew neither
        self._drawn = {number: (key, dict(facts)) for number, key, facts in deferred}
        self._due = list(self._drawn)
        if "durations" in state:
            self._durations.restore(state["durations"])
