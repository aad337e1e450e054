"""Best fit decreasing: pieces of text packed into rows of equal length, from a count of their lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowKind:
    """Rows that hold pieces of the same lengths.

    Attributes:
        rows: Number of such rows.
        pieces: Pairs (length, how many pieces of that length are in one row), the longest first.
    """

    rows: int
    pieces: tuple[tuple[int, int], ...]


def best_fit_decreasing(counts: np.ndarray, capacity: int) -> list[RowKind]:
    """Put pieces, the longest first, each into the row with the least room that still takes it, else into a new row.

    Pieces of one length are alike, and so are rows with the same pieces: whole groups are moved at once, and the cost
    grows with the number of lengths, not of pieces. The rows are at most 11/9 of the fewest possible, plus 1 (Johnson
    1973; Dosa 2007 for the constant); with short pieces among them, hardly any room is left.

    Args:
        counts: Number of pieces of each length from 0 on; none of length 0 and none longer than ``capacity``.
        capacity: Tokens in a row.

    Returns:
        The kinds of rows: together they hold each piece once.
    """
    packing = _Packing(capacity)
    for length in np.flatnonzero(counts)[::-1].tolist():
        packing.add(length, int(counts[length]))
    return packing.kinds()


class _Packing:
    """Rows so far, by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[RowKind]] = {}
        self._rooms: list[int] = []  # keys of `_by_room`, ascending

    def add(self, length: int, count: int) -> None:
        """Put `count` pieces of one length, not longer than those before, into rows."""
        while count:
            room, kind = self._tightest(length, count)
            each = room // length  # a row that got a piece is the tightest again while it takes another one
            full = min(kind.rows, count // each)
            self._put(room - each * length, RowKind(full, (*kind.pieces, (length, each))))
            count -= full * each
            partly = count if full < kind.rows else 0  # fewer than `each`
            if partly:
                self._put(room - partly * length, RowKind(1, (*kind.pieces, (length, partly))))
                count = 0
            self._put(room, RowKind(kind.rows - full - bool(partly), kind.pieces))

    def _tightest(self, length: int, count: int) -> tuple[int, RowKind]:
        """The room of rows with the least room for a piece, and those rows, taken out; new ones if there are none."""
        place = bisect_left(self._rooms, length)
        if place == len(self._rooms):
            return self._capacity, RowKind(-(-count // (self._capacity // length)), ())
        room = self._rooms[place]
        kind = self._by_room[room].pop()
        if not self._by_room[room]:
            del self._by_room[room], self._rooms[place]
        return room, kind

    def _put(self, room: int, kind: RowKind) -> None:
        if not kind.rows:
            return
        if room not in self._by_room:
            self._by_room[room] = []
            insort(self._rooms, room)
        self._by_room[room].append(kind)

    def kinds(self) -> list[RowKind]:
        return [kind for room in self._rooms for kind in self._by_room[room]]
