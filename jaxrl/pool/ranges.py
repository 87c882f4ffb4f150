"""A set of whole numbers that are mostly neighbours: ids of groups that were consumed."""

import bisect
from collections.abc import Iterable, Iterator


class Ranges:
    """Numbers as sorted ranges, both ends included; neighbours are one range."""

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for first, last in ranges:
            self._starts.append(first)
            self._ends.append(last)

    def add(self, number: int) -> None:
        """Take a number in; one that is there already changes nothing."""
        if number in self:
            return
        place = bisect.bisect(self._starts, number)
        joins_left = place > 0 and self._ends[place - 1] == number - 1
        joins_right = place < len(self._starts) and self._starts[place] == number + 1
        if joins_left and joins_right:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif joins_left:
            self._ends[place - 1] = number
        elif joins_right:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number)

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect(self._starts, number) - 1
        return place >= 0 and number <= self._ends[place]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self)

    def gaps(self, end: int) -> Iterator[int]:
        """The numbers from 0 to ``end - 1`` that are missing."""
        after = 0
        for first, last in self:
            yield from range(after, min(first, end))
            after = last + 1
        yield from range(after, end)
