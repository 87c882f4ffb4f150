"""Which row of the cache holds which prompt, and which samples sit at it: bookkeeping of one
device's part, on the host.

A row holds a prompt's keys and values, read in pieces; its seats are taken by the slots that decode
samples of it. A prompt stays in its row after its samples have ended, until the row is needed: who
asks for the same prompt again takes a seat, and one that begins like it (the next call of a
conversation, a shared preamble) goes on from the last whole piece that both have, in the same row
or in a copy of it. What is read twice is the same to the last bit, so no sample depends on it.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of a device: ``slots`` that decode, ``rows`` of ``places`` for prompts, ``seats`` at each."""

    slots: int
    rows: int
    seats: int
    places: int
    piece: int  # tokens; places are a multiple


def layouts(slots: int, samples: int, bucket: int, piece: int) -> tuple[Layout, Layout]:
    """For groups of so many samples a prompt, with half as many rows again as whole groups fill, so
    that the last sample of a group keeps no slot waiting; and for prompts that go alone, a row for
    each slot. Seats are as many in both: a prompt meets them in matmuls of one shape, so that the
    bits of a sample do not tell how many others there were.
    """
    piece = min(piece, bucket)
    places = -(-bucket // piece) * piece
    seats = min(samples, slots)
    rows = min(slots, -(-3 * slots // (2 * seats)))
    return Layout(slots, rows, seats, places, piece), Layout(slots, slots, seats, places, piece)


class Seats:
    """See above. ``copies`` (source, target) of rows come first, in their order, then the
    ``pieces`` (row, first place); ``done`` is called when both were carried out."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.free = list(range(layout.slots))
        self.seat: dict[int, int] = {}  # of the slots that are taken
        self.copies: list[tuple[int, int]] = []
        self.pieces: list[tuple[int, int]] = []
        self._tokens = np.full((layout.rows, layout.places), -1, np.int32)
        self._length = np.zeros(layout.rows, np.int32)
        self._read = np.zeros(layout.rows, np.int32)  # tokens whose keys and values are there
        self._slots = np.full((layout.rows, layout.seats), -1, np.int32)
        self._holding: dict[Prompt, list[int]] = {}
        self._order = collections.OrderedDict.fromkeys(range(layout.rows))  # the oldest use first

    @property
    def slots(self) -> np.ndarray:
        """[row seat] who sits there; 0 where nobody does."""
        return np.maximum(self._slots, 0)

    def holds(self, prompt: Prompt) -> bool:
        """Whether a row has this prompt or is to get it."""
        return prompt in self._holding

    def sit(self, prompt: Prompt) -> tuple[int, int] | None:
        """A free slot and the row whose seat it takes; None if there is none before others end, or
        before what was planned is done."""
        if not self.free:
            return None
        rows = self._holding.get(prompt, [])
        row = next((row for row in rows if (self._slots[row] < 0).any()), None)
        if row is None:
            row = self._row_for(prompt, rows)
        if row is None:
            return None
        slot, seat = self.free.pop(), int(np.argmax(self._slots[row] < 0))
        self._slots[row, seat] = slot
        self.seat[slot] = row * self.layout.seats + seat
        self._order.move_to_end(row)
        return slot, row

    def leave(self, slot: int) -> None:
        """The slot's sample has ended."""
        row, seat = divmod(self.seat.pop(slot), self.layout.seats)
        self._slots[row, seat] = -1
        self.free.append(slot)

    def tokens(self, row: int, start: int) -> np.ndarray:
        """Of a piece of the row's prompt; fewer at its end."""
        end = min(start + self.layout.piece, int(self._length[row]))
        return self._tokens[row, start:end]

    def ends(self, row: int, start: int) -> bool:
        """Whether the row's prompt ends in this piece."""
        return start + self.layout.piece >= self._length[row]

    def done(self) -> None:
        """What was planned is carried out."""
        self._read[:] = self._length
        self.copies, self.pieces = [], []

    def _row_for(self, prompt: Prompt, same: Sequence[int]) -> int | None:
        """A row without samples, planned to hold the prompt."""
        if any(self._read[row] < len(prompt) for row in same):
            return None  # it is copied once it is there
        empty = [row for row in self._order if (self._slots[row] < 0).all()]
        if not empty:
            return None
        source, kept = (same[0], len(prompt)) if same else self._likest(prompt)
        row = source if kept and source in empty else empty[0]
        if kept and row != source:
            self.copies.append((source, row))
        self._forget(row)
        self._holding.setdefault(prompt, []).append(row)
        self._tokens[row, : len(prompt)] = prompt
        self._length[row], self._read[row] = len(prompt), kept
        piece = self.layout.piece
        self.pieces += [(row, start) for start in range(kept, len(prompt), piece)]
        return row

    def _likest(self, prompt: Prompt) -> tuple[int, int]:
        """The row that begins most like it, and how many tokens of whole pieces both have; at least
        one is left to read, as what follows comes from its last state."""
        differ = self._tokens[:, : len(prompt)] != np.asarray(prompt)
        alike = np.where(differ.any(1), differ.argmax(1), len(prompt))
        alike = np.minimum(np.minimum(alike, self._read), len(prompt) - 1)
        alike = alike // self.layout.piece * self.layout.piece
        row = int(alike.argmax())
        return row, int(alike[row])

    def _forget(self, row: int) -> None:
        held = tuple(self._tokens[row, : self._length[row]].tolist())
        rows = self._holding.get(held, [])
        if row in rows:
            rows.remove(row)
            if not rows:
                del self._holding[held]
        self._tokens[row] = -1
