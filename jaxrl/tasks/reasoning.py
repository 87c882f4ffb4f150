"""Reasoning Gym: any of its data sets by name, split by content hash. No jax here.

An item depends on seed + index, so neighbouring seeds share nearly all questions: splits by seed
would leak. Here the hash of the question's text alone decides the split, and a question counts once
however often it is drawn.

The package builds ``pycosat`` from source: it needs a C compiler and Python's headers.
"""

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tasks.contract import Split, Task, Verdict, content_hash, split_of

# Without a new question for a split that still lacks some, drawing goes on for this many draws plus
# two for each distinct question seen. In a family of S questions of which D were seen, S/D draws
# are expected until the next new one.
PATIENCE = 1000


def _gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "task.source 'jaxrl.tasks.reasoning' needs the package reasoning-gym, which cannot be "
            f"imported ({error}). Install it with `pip install reasoning-gym`; its dependency "
            "pycosat is built from source and needs a C compiler and Python's headers "
            "(Debian: apt-get install build-essential python3-dev)"
        ) from error
    return reasoning_gym


def families() -> list[str]:
    """Names of the data sets that the installed Reasoning Gym has. ImportError, with what to do, if
    it is missing."""
    return sorted(_gym().factory.DATASETS)


class Source:
    """A Reasoning Gym family as prompts with a verifier.

    Holds the first ``train_prompts`` and ``held_out_prompts`` distinct questions of each split in
    the order of the data set's index: the same family, parameters, seed and fraction give the same
    questions, and asking for more only appends. Drawn when a split is first asked for.

    ValueError for an unknown family (with close names), a parameter that the family does not have
    or refuses, and a family with fewer questions than asked for (with the number found).
    """

    grouped = False
    needs: tuple[str, ...] = ()

    def __init__(
        self,
        family: str,
        parameters: Mapping[str, Any],
        *,
        seed: int,
        train_prompts: int,
        held_out_prompts: int,
        held_out_fraction: float,
    ) -> None:
        if not 0 < held_out_fraction < 1:
            raise ValueError(
                f"task.held_out_fraction={held_out_fraction!r}; allowed: between 0 and 1"
            )
        if min(train_prompts, held_out_prompts) < 0:
            raise ValueError(
                f"task.train_prompts={train_prompts!r}, "
                f"task.held_out_prompts={held_out_prompts!r}; allowed: >= 0"
            )
        self.family = family
        self.parameters = dict(parameters)
        self.seed = seed
        self.held_out_fraction = held_out_fraction
        self._wanted: dict[Split, int] = {"train": train_prompts, "held_out": held_out_prompts}
        # Scoring depends on neither seed nor size. Built here so that bad parameters show at once.
        self._scorer = self._dataset(1)

    def _dataset(self, size: int) -> Any:
        known = _gym().factory.DATASETS
        if self.family not in known:
            close = difflib.get_close_matches(self.family, known, n=3, cutoff=0.5)
            allowed = (
                f"did you mean {', '.join(close)}?"
                if close
                else f"allowed: {', '.join(sorted(known))}"
            )
            raise ValueError(f"task.family={self.family!r} is unknown; {allowed}")
        fields = [
            name
            for name in inspect.signature(known[self.family][1]).parameters
            if name not in ("seed", "size")
        ]
        for name in self.parameters:
            if name not in fields:
                close = difflib.get_close_matches(name, fields, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(
                    f"task.parameters.{name} is unknown to {self.family!r}; {hint}"
                    f"allowed: {', '.join(fields)}"
                )
        try:
            return _gym().create_dataset(self.family, seed=self.seed, size=size, **self.parameters)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"task.parameters={self.parameters!r} refused by {self.family!r} "
                f"(size {size}): {error}"
            ) from error

    @functools.cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        found: dict[Split, list[Task]] = {"train": [], "held_out": []}
        seen: set[str] = set()
        expected = max(
            self._wanted["train"] / (1 - self.held_out_fraction),
            self._wanted["held_out"] / self.held_out_fraction,
        )
        size = int(1.2 * expected) + 100
        dataset = self._dataset(size)
        index, dry = 0, 0
        while any(len(found[split]) < wanted for split, wanted in self._wanted.items()):
            if dry > PATIENCE + 2 * len(seen):
                raise ValueError(self._too_small(found, index))
            if index == size:
                size *= 2
                dataset = self._larger(size, found, index)
            entry = dataset[index]
            digest = content_hash(entry["question"])
            split = split_of(digest, self.held_out_fraction)
            dry += 1
            if digest not in seen and len(found[split]) < self._wanted[split]:
                found[split].append(self._task(entry, index, split, digest))
                dry = 0
            seen.add(digest)
            index += 1
        return found

    def _larger(self, size: int, found: Mapping[Split, list[Task]], index: int) -> Any:
        """The same data set with more items. Families that allow no more are too small."""
        try:
            return self._dataset(size)
        except ValueError as error:
            raise ValueError(
                f"{self._too_small(found, index)}; it allows no more: {error}"
            ) from error

    def _too_small(self, found: Mapping[Split, list[Task]], index: int) -> str:
        return (
            f"task.family={self.family!r} with task.parameters={self.parameters!r} is too small: "
            f"{index} draws gave {len(found['train'])} of "
            f"task.train_prompts={self._wanted['train']} and {len(found['held_out'])} of "
            f"task.held_out_prompts={self._wanted['held_out']} distinct questions "
            f"(task.held_out_fraction={self.held_out_fraction}); allowed: at most what was found"
        )

    def _task(self, entry: Mapping[str, Any], index: int, split: Split, digest: str) -> Task:
        return Task(
            key=f"{self.family}/{self.seed}/{index}",
            source=f"reasoning_gym/{self.family}",
            split=split,
            prompt=entry["question"],
            answer=entry["answer"] or "",  # some families state no answer, they only score one
            content_hash=digest,
            metadata=entry,
        )

    def tasks(self, split: Split) -> list[Task]:
        """Distinct questions of a split. The other split shares none of them, whatever seed it was
        drawn with."""
        return self._tasks[split]

    def verify(self, task: Task, response: str) -> Verdict:
        """Score in [0, 1] as the family's own ``score_answer`` gives it; correct is a score >= 1.

        White space around the response does not count. A right answer inside a longer text earns a
        little and is not correct. Some families raise on a response that they cannot parse: if they
        do score the task's own answer, the response is to blame and gets 0 (``unparsed`` is 1).
        Any other error goes up to the caller: it is a fault of the data, not of the policy.
        """
        try:
            score = float(self._scorer.score_answer(response.strip(), task.metadata))
        except Exception:
            if not task.answer or self._scorer.score_answer(task.answer, task.metadata) < 1:
                raise
            return Verdict(score=0.0, correct=False, components={"score": 0.0, "unparsed": 1.0})
        return Verdict(score=score, correct=score >= 1, components={"score": score})

    def prompts(self, task: Task, samples: int) -> list[str]:
        """The task's prompt, for every sample."""
        return [task.prompt] * samples

    def verify_group(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Each response on its own."""
        return [self.verify(task, response) for response in responses]
