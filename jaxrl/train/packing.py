"""Groups of rollouts -> rows of the trunk in which a shared prompt stands once (``batch.Packed``).

    common   what all valid rollouts of a group begin with, before a token of any of them that is
             trained on or scored: tokens of a prompt, or put in by a harness, only
    rest     what is left of a rollout, the end of its own prompt included
    row      the prefix (the common beginning, cut to its bucket), then bins of equal size

Rests go into bins whole, the longest first, each into the first bin that has room. Of the compiled
shapes that hold the take the one with the fewest places is taken. One whose longest rest is longer
than any bin stays as plain rows. Rollouts that are not valid have no place: nobody reads them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.batch import Packed
from jaxrl.pool.rollout import INJECTED, PROMPT, Rollout

Members = Mapping[int, Rollout]  # the valid rollouts of a group by their slot


def _ladder(field: str, value: tuple[int, ...], least: int) -> None:
    if list(value) != sorted(set(value)) or any(size < least for size in value):
        raise ValueError(f"train.packing.{field}={value!r}; allowed: increasing numbers >= {least}")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of packed rows that are compiled: tokens of a prefix (0: nothing is shared), of a
    bin, and bins of a group, besides as many as it has rollouts. Raises ValueError naming the
    field."""

    prefix_buckets: tuple[int, ...]
    bin_buckets: tuple[int, ...]
    bins: tuple[int, ...]

    def __post_init__(self) -> None:
        for field, least in (("prefix_buckets", 0), ("bin_buckets", 1), ("bins", 1)):
            _ladder(field, vars(self)[field], least)


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    """Whether the trunk goes through packed rows, and the shapes of those. Raises ValueError naming
    the field."""

    rows: Literal["plain", "packed"]
    prefix_buckets: tuple[int, ...]  # (): those of prompts
    bin_buckets: tuple[int, ...]  # (): the longest response
    bins: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.rows not in ("plain", "packed"):
            raise ValueError(f"train.packing.rows={self.rows!r}; allowed: 'plain', 'packed'")
        Shapes(self.prefix_buckets, self.bin_buckets, self.bins)

    @property
    def on(self) -> bool:
        """Whether rows are packed."""
        return self.rows == "packed"

    def shapes(self, prompts: Sequence[int], response: int, rollouts_per_group: int) -> Shapes:
        """The shapes for prompts of these buckets and responses of so many tokens.

        Raises ValueError naming the field if a group has no use for so many bins, or the longest
        prefix and bin do not hold the longest prompt and its response.
        """
        made = Shapes(self.prefix_buckets or tuple(prompts), self.bin_buckets or (response,), ())
        if any(count >= rollouts_per_group for count in self.bins):
            raise ValueError(
                f"train.packing.bins={self.bins!r}; allowed: numbers below "
                f"pool.rollouts_per_group={rollouts_per_group}, which is always compiled"
            )
        longest = max(prompts) + response
        if made.prefix_buckets[-1] + made.bin_buckets[-1] < longest:
            raise ValueError(
                f"train.packing.prefix_buckets={self.prefix_buckets!r}, bin_buckets="
                f"{self.bin_buckets!r}; allowed: (), or longest ones that hold {longest} tokens "
                "together (sampler.prompt_buckets + max_new_tokens + pool.max_feedback_tokens)"
            )
        return dataclasses.replace(made, bins=self.bins)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How takes are packed: by which shapes, and which facts with an entry for each token must be
    alike too where a beginning is shared (routes that are replayed)."""

    shapes: Shapes
    alike: tuple[str, ...]

    def lay_out(
        self, placed: Members, slots: int, rollouts_per_group: int, tokens: int
    ) -> tuple[Packed | None, dict[str, float]]:
        """The packed rows of a take's valid rollouts by their rows, of which there are ``slots *
        rollouts_per_group`` of ``tokens`` tokens; None if they fit no shape.

        Counts: ``packed`` 1 or 0; ``positions`` that the trunk goes through, and ``held_frac``, the
        share of them that holds a token.
        """
        groups: list[dict[int, Rollout]] = [{} for _ in range(slots)]
        for row, rollout in placed.items():
            groups[row // rollouts_per_group][row % rollouts_per_group] = rollout
        commons = [common(members, self.alike) for members in groups]
        found = self._smallest(groups, commons, rollouts_per_group)
        if found is None:
            held, places = sum(len(r.tokens) for r in placed.values()), slots * rollouts_per_group
            packed, places = None, places * tokens
        else:
            packed = _filled(*found, groups, commons, rollouts_per_group, tokens)
            held, places = int((packed.segment > 0).sum()), packed.segment.size
        counts = {"packed": found is not None, "positions": places, "held_frac": held / places}
        return packed, {name: float(count) for name, count in counts.items()}

    def _smallest(
        self, groups: Sequence[Members], commons: Sequence[int], rollouts_per_group: int
    ) -> tuple[int, int, int] | None:
        """(prefix, bins, tokens of a bin): the fewest places, and of equals the smallest bins."""
        shapes, longest = self.shapes, max(commons)
        ladder = (*shapes.bins, rollouts_per_group)
        enough = min((size for size in shapes.prefix_buckets if size >= longest), default=longest)
        best: list[tuple[int, int, int, int]] = []
        for prefix in (size for size in shapes.prefix_buckets if size <= enough):
            rests = [_rests(*pair, prefix) for pair in zip(groups, commons, strict=True)]
            widest = max((max(lengths.values(), default=0) for lengths in rests), default=0)
            for size in (size for size in shapes.bin_buckets if size >= widest):
                needed = max(len(fitted(lengths, size)) for lengths in rests)
                count = min(count for count in ladder if count >= needed)
                best.append((prefix + count * size, size, prefix, count))
        if not best:
            return None
        _, size, prefix, count = min(best)
        return prefix, count, size


def common(members: Members, alike: Sequence[str]) -> int:
    """How many tokens the rollouts of a group may share: the first so many are the same in all,
    nobody trains on them or scores them, and the facts ``alike`` are the same too."""
    rollouts = list(members.values())
    if not rollouts:
        return 0
    first, length = rollouts[0], min(len(rollout.tokens) for rollout in rollouts)
    same = np.ones(length, bool)
    for rollout in rollouts:
        same &= rollout.tokens[:length] == first.tokens[:length]
        same &= np.isin(rollout.kind[:length], (PROMPT, INJECTED))
        for name in alike:
            facts = (np.asarray(one.facts[name])[:length] for one in (rollout, first))
            differs = next(facts) != next(facts)
            same &= ~differs.reshape(length, -1).any(-1)
    return int(same.cumprod().sum())


def _rests(members: Members, shared: int, prefix: int) -> dict[int, int]:
    """Tokens that are left of each rollout behind a prefix bucket, where any are."""
    lengths = {slot: len(r.tokens) - min(shared, prefix) for slot, r in members.items()}
    return {slot: length for slot, length in lengths.items() if length}


def fitted(lengths: Mapping[int, int], size: int) -> list[list[int]]:
    """Slots by bin, first fit decreasing; one without room for the next is passed over, not closed.
    At least one bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for slot, length in sorted(lengths.items(), key=lambda item: (-item[1], item[0])):
        place = next((i for i, free in enumerate(room) if free >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(size)
        bins[place].append(slot)
        room[place] -= length
    return bins or [[]]


def _filled(
    prefix: int,
    count: int,
    size: int,
    groups: Sequence[Members],
    commons: Sequence[int],
    rollouts_per_group: int,
    tokens: int,
) -> Packed:
    """The arrays of one shape."""
    shape = len(groups), prefix + count * size
    names = ("tokens", "position", "segment", "source")
    arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
    place: Any = np.full((len(groups) * rollouts_per_group, tokens), -1, np.int32)

    def put(group: int, slot: int, segment: int, start: int, columns: np.ndarray) -> None:
        places = slice(start, start + len(columns))
        arrays["tokens"][group, places] = groups[group][slot].tokens[columns]
        arrays["position"][group, places] = columns
        arrays["segment"][group, places] = segment
        arrays["source"][group, places] = slot * tokens + columns

    for group, (members, length) in enumerate(zip(groups, commons, strict=True)):
        if not members:
            continue
        shared = min(length, prefix)
        put(group, min(members), 1, prefix - shared, np.arange(shared))
        for slot in members:
            row = group * rollouts_per_group + slot
            place[row, :shared] = np.arange(prefix - shared, prefix)
        lengths = _rests(members, length, prefix)
        for number, slots in enumerate(fitted(lengths, size)):
            start = prefix + number * size
            for slot in slots:
                columns = np.arange(shared, shared + lengths[slot])
                put(group, slot, 2 + slot, start, columns)
                row = group * rollouts_per_group + slot
                place[row, columns] = np.arange(start, start + len(columns))
                start += len(columns)
    return Packed(**arrays, place=place, prefix=prefix, bins=count)
