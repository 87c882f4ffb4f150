"""A pool of rollouts that lie on disk, read through grain; and demonstrations written as such
records.

Grain gives the order: a source with random access under a seeded shuffle that is new in each epoch,
so a position is the whole state. A pool imports grain, which imports jax; it starts no backend and
touches no array of it.
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.pool.contract import (
    Group,
    Keep,
    Manifest,
    PoolEnd,
    PoolError,
    Question,
    Questions,
    Tokenizer,
)
from jaxrl.pool.cursor import Cursor
from jaxrl.pool.rollout import (
    ACTION,
    NOT_SAMPLED,
    PROMPT,
    Failure,
    Rollout,
    StopReason,
    Version,
    digest_of,
    judged,
)
from jaxrl.pool.spool import SUFFIX, Entry, Writer, index, read, read_at

__all__ = ["NoRecords", "RecordedPool", "Writer", "demonstrate", "read"]


class _Groups:
    """Recorded groups with random access, as grain wants a source: item i is the entries of group
    i."""

    def __init__(self, groups: Sequence[Sequence[Entry]]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Sequence[Entry]:
        return self._groups[index]

    def __repr__(self) -> str:
        return f"recorded groups ({len(self)})"


class RecordedPool:
    """Serves recorded groups: each once an epoch, in an order given by (seed, epoch).

    The id of a group that is handed out is its running number, so a group that returns in the next
    epoch is another group; what it was recorded as stands in the fact ``recorded`` [run, group]. A
    rollout that was recorded twice counts once. ``keep`` refuses groups as in the live pool; a
    refused one is counted and the next one taken in its place, at most ``max_refills`` times the
    number asked for. ``epochs=0`` means no end; else PoolEnd follows the last, perhaps short, take.

    ``quarantine`` names a directory for damaged records, which are then counted; without it they
    are a RecordError. ValueError for a group with more rollouts than ``rollouts_per_group``, and
    for a state of other records.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        seed: int,
        rollouts_per_group: int,
        epochs: int = 0,
        keep: Keep | None = None,
        max_refills: int = 4,
        quarantine: str | os.PathLike[str] | None = None,
    ) -> None:
        import grain  # slow to load, and many runs have no records

        entries, self.damages = index(path, quarantine=quarantine)
        groups: dict[tuple[str, int], dict[str, Entry]] = {}
        for entry in entries:
            groups.setdefault((entry.run_id, entry.group_id), {}).setdefault(
                entry.idempotency_key, entry
            )
        for (run_id, group_id), members in groups.items():
            if len(members) > rollouts_per_group:
                raise ValueError(
                    f"{path}: group {group_id} of run {run_id!r} has {len(members)} rollouts; "
                    f"allowed: at most pool.rollouts_per_group={rollouts_per_group}"
                )
        if not groups:
            raise ValueError(f"{path}: no readable record")
        distinct = sum(len(members) for members in groups.values())
        self.counts = {
            "recorded": distinct,
            "repeated": len(entries) - distinct,
            "quarantined": len(self.damages),
        }
        ordered = [
            sorted(groups[key].values(), key=lambda entry: entry.sample) for key in sorted(groups)
        ]
        identity = "".join(entry.digest for members in ordered for entry in members)
        self._digest = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._order = (
            grain.MapDataset.source(_Groups(ordered))
            .shuffle(seed=seed % 2**32)
            .repeat(epochs or None)
        )
        self._end = len(ordered) * epochs if epochs else None
        self._what = f"{len(ordered)} recorded groups at {path}, pool.epochs={epochs}"
        self._keep = keep
        self._max_refills = max_refills
        self._cursor = Cursor()

    @property
    def delivered_fraction(self) -> float:
        """Part of the records found that can be handed out."""
        return self.counts["recorded"] / (self.counts["recorded"] + self.counts["quarantined"])

    def _group(self, position: int) -> Group:
        rollouts: list[Rollout] = []
        entries = self._order[position]
        if entries is None:  # grain's word for an element that a filter dropped; nothing filters
            raise PoolError(f"no group at position {position} of {self._what}")
        for entry in entries:
            rollout = read_at(entry)
            facts = {**rollout.facts, "recorded": [rollout.run_id, rollout.group_id]}
            rollouts.append(dataclasses.replace(rollout, group_id=position, facts=facts))
        return Group(id=position, content_hash=digest_of(rollouts), rollouts=tuple(rollouts))

    def take(self, n: int, step: int) -> tuple[list[Group], Manifest]:
        """The next n groups; fewer at the end of the data or if ``keep`` refuses too many. PoolEnd
        if none is left."""
        self._cursor.begin(step)
        if self._end is not None and self._cursor.position >= self._end:
            raise PoolEnd(f"all records were read: {self._what}")
        groups: list[Group] = []
        filtered = 0
        while len(groups) < n and filtered < n * (1 + self._max_refills):
            if self._end is not None and self._cursor.position >= self._end:
                break
            group = self._group(self._cursor.position)
            self._cursor.position += 1
            if self._keep is None or self._keep(*judged(group.rollouts)):
                groups.append(group)
            else:
                filtered += 1
        counts = {"filtered": filtered, "short": n - len(groups), "quarantined": len(self.damages)}
        taken = tuple((group.id, group.content_hash) for group in groups)
        return groups, Manifest(step=step, groups=taken, counts=counts)

    def commit(self, step: int) -> None:
        """Groups of steps up to this one are never handed out again in their epoch."""
        self._cursor.commit(step)

    def state(self) -> dict[str, Any]:
        """The position, and which records it is a position in."""
        return {"pool": "recorded", "records": self._digest, **self._cursor.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same records; ValueError naming the field if they are
        others."""
        for field, mine in (("pool", "recorded"), ("records", self._digest)):
            if state[field] != mine:
                raise ValueError(
                    f"pool state has {field}={state[field]!r}; allowed: {mine!r} ({self._what})"
                )
        self._cursor.restore(state)

    def publish(self, version: Version, path: str) -> None:
        """Records do not depend on the weights: nothing happens."""

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """Records are read as they lie: ValueError."""
        raise ValueError(
            "recorded rollouts are not drawn anew; allowed with train.curriculum.move: "
            "pool.kind='local'"
        )

    def close(self) -> None:
        """No file is held open between takes."""


class NoRecords:
    """The pool of a phase for which nothing was left to read: it ends at once, with ``reason``."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def take(self, n: int, step: int) -> tuple[list[Group], Manifest]:
        """PoolEnd."""
        raise PoolEnd(self._reason)

    def commit(self, step: int) -> None:
        """Nothing was handed out."""

    def state(self) -> dict[str, Any]:
        """That it is this pool."""
        return {"pool": "none"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """ValueError for the state of a pool that had something."""
        if state["pool"] != "none":
            raise ValueError(f"pool state has pool={state['pool']!r}; allowed: 'none'")

    def publish(self, version: Version, path: str) -> None:
        """Nothing depends on the weights."""

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """Nothing is drawn."""

    def close(self) -> None:
        """Nothing is held."""


def demonstrate(
    source: Questions,
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    *,
    run_id: str,
    split: str = "train",
    limit: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, int]:
    """Write right answers as rollouts for a supervised start: the prompt, then answer and eos as
    actions, reward 1.

    One group of one rollout for each task of the split that states an answer, at most ``limit``, to
    ``path/demonstrations.rollouts``. No policy sampled them: their log-prob is 0 and their version
    absent; the fact ``demonstration`` is true. Returns counts: ``written``, ``rejected_long`` (over
    ``max_tokens``, never cut), ``without_answer``. ValueError if nothing could be written.
    """
    counts = {"written": 0, "rejected_long": 0, "without_answer": 0}
    with Writer(pathlib.Path(path) / f"demonstrations{SUFFIX}") as writer:
        for number, task in enumerate(source.tasks(split)[:limit]):
            prompt, answer = tokenizer.prompt(task.prompt), tokenizer.encode(task.answer)
            if not answer:
                counts["without_answer"] += 1
            elif max_tokens is not None and len(prompt) + len(answer) + 1 > max_tokens:
                counts["rejected_long"] += 1
            else:
                writer.append(
                    _demonstration(task, number, run_id, prompt, [*answer, tokenizer.eos_id])
                )
                counts["written"] += 1
        if not counts["written"]:
            raise ValueError(
                f"no demonstration could be written to {path}: {counts}, max_tokens={max_tokens}"
            )
    return counts


def _demonstration(
    task: Question, number: int, run_id: str, prompt: Sequence[int], answer: Sequence[int]
) -> Rollout:
    length = len(prompt) + len(answer)
    return Rollout(
        run_id=run_id,
        group_id=number,
        sample=0,
        attempt=0,
        task_key=task.key,
        content_hash=task.content_hash,
        split=task.split,
        source=task.source,
        tokens=np.array([*prompt, *answer], np.uint32),
        kind=np.array([PROMPT] * len(prompt) + [ACTION] * len(answer), np.uint8),
        step=np.array([-1] * len(prompt) + [0] * len(answer), np.int32),
        logp=np.zeros(length, np.float32),
        version_index=np.full(length, NOT_SAMPLED, np.uint16),
        temperature=np.ones(length, np.float32),
        versions=(),
        reward=1.0,
        reward_components={"demonstration": 1.0},
        correct=True,
        stop_reason=StopReason.STOP,
        failure=Failure.NONE,
        text=task.answer,
        facts={"demonstration": True},
        times={},
    )
