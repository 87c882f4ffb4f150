"""Several Reasoning Gym families as one source, each a universe of its own. No jax here.

``task.parameters`` maps a universe to its family's parameters. A universe is called like its
family, or "family:label", so that one family may come in several sizes. The default suits graphs:
course_schedule, family_relationships, largest_island, path_star, quantum_lock, shortest_path; any
family goes. ``Task.source`` names the universe, and a moving task sampler draws by it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tasks import reasoning
from jaxrl.tasks.contract import Split, Task, Verdict

PREFIX = "reasoning_gym/"


def families() -> list[str]:
    """Names of the families that a universe may have."""
    return reasoning.families()


class Source:
    """The universes' questions in turn, one of each, then the next of each.

    A split's questions are shared out evenly, the first universes taking what is left over. Splits
    are those of each family, by content hash. A question that two universes share is asked in the
    first alone; its hash puts it into the same split in both.

    ``family`` is "graphs". ValueError naming the universe and the field for what
    jaxrl/tasks/reasoning.py refuses, and for no universe at all.
    """

    grouped = False
    needs: tuple[str, ...] = ()

    def __init__(
        self,
        family: str,
        parameters: Mapping[str, Mapping[str, Any]],
        *,
        seed: int,
        train_prompts: int,
        held_out_prompts: int,
        held_out_fraction: float,
    ) -> None:
        if family != "graphs":
            raise ValueError(f"task.family={family!r} is unknown; allowed: graphs")
        if not parameters:
            raise ValueError("task.parameters={}; allowed: parameters of at least one universe")
        self._sources: dict[str, reasoning.Source] = {}
        for place, (name, settings) in enumerate(parameters.items()):
            shares = [
                total // len(parameters) + (place < total % len(parameters))
                for total in (train_prompts, held_out_prompts)
            ]
            try:
                self._sources[PREFIX + name] = reasoning.Source(
                    name.partition(":")[0],
                    settings,
                    seed=seed,
                    train_prompts=shares[0],
                    held_out_prompts=shares[1],
                    held_out_fraction=held_out_fraction,
                )
            except ValueError as error:
                raise ValueError(f"task.parameters.{name}: {error}") from error

    @property
    def universes(self) -> list[str]:
        """Values of ``Task.source``."""
        return list(self._sources)

    def tasks(self, split: Split) -> list[Task]:
        """Distinct questions of a split, always in the same order."""
        found: list[Task] = []
        seen: set[str] = set()
        columns = {name: source.tasks(split) for name, source in self._sources.items()}
        for place in range(max(map(len, columns.values()))):
            for name, tasks in columns.items():
                if place < len(tasks) and tasks[place].content_hash not in seen:
                    seen.add(tasks[place].content_hash)
                    key = f"{name.removeprefix(PREFIX)}/{tasks[place].key}"
                    found.append(dataclasses.replace(tasks[place], source=name, key=key))
        return found

    def verify(self, task: Task, response: str) -> Verdict:
        """As the universe's family scores it."""
        return self._sources[task.source].verify(task, response)

    def prompts(self, task: Task, samples: int) -> list[str]:
        """The task's prompt, for every sample."""
        return [task.prompt] * samples

    def verify_group(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Each response on its own."""
        return [self.verify(task, response) for response in responses]
