"""Many arrays of different and growing lengths in one: int32 regions that double.

    data:   | row 7 ······ | row 2 ·· | (given back) | row 9 ············ |        · room to grow
              ▲ start[7]                                                  ▲ end

A region's capacity is a power of two; one that is outgrown or closed is kept for the next of its size, so at most half
of each region is unused. An open region costs nothing until its row is named.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.step import I32, I64


def ranges(first: I64, count: I64) -> I64:
    """first[0], first[0] + 1, … (count[0] of them), then those of first[1] and so on, as one array.

    That is `first` itself where all counts are 1.
    """
    if b"\1" not in (count != 1).tobytes():  # a decode step
        return first
    end = count.cumsum()
    return np.repeat(first - end + count, count) + np.arange(end[-1])


class RaggedArena:
    """Regions by row. `start` and `capacity` are columns over rows; a closed row has capacity 0."""

    __slots__ = ("_closed", "_end", "_least", "_open", "capacity", "data", "start")

    def __init__(self, rows: int, least: int) -> None:
        """least: the smallest capacity, a power of two."""
        self._least = least
        self._closed: dict[int, list[int]] = {}
        self._end = 0
        self._open = 0  # sum of the capacities
        self.data: I32 = np.empty(1024, np.int32)
        self.start: I64 = np.zeros(rows, np.int64)
        self.capacity: I64 = np.zeros(rows, np.int64)

    def move_rows(self, old: I64, new: I64, rows: int) -> None:
        """Renumbers rows old[i] to new[i], in columns of `rows`. No other row may be open."""
        for name in ("start", "capacity"):
            column = np.zeros(rows, np.int64)
            column[new] = getattr(self, name)[old]
            setattr(self, name, column)

    def open(self, row: int, values: I32 | I64) -> None:
        """Opens a region for a closed row, holding `values`."""
        size = self._fit(values.size)
        if self._end + size > self.data.size:
            self._make_room(size)
        start = self._claim(size)
        self.start[row] = start
        self.capacity[row] = size
        self._open += size
        self.data[start : start + values.size] = values

    def close(self, rows: I64) -> None:
        for start, capacity in zip(self.start[rows].tolist(), self.capacity[rows].tolist(), strict=True):
            if capacity:
                self._closed.setdefault(capacity, []).append(start)
                self._open -= capacity
        self.capacity[rows] = 0

    def reserve(self, rows: I64, used: I64, wanted: I64) -> None:
        """Makes room for wanted[i] values in row rows[i], of which the first used[i] are kept. May move any region."""
        short = (wanted > self.capacity[rows]).nonzero()[0]
        if not short.size:
            return
        rows = rows[short]
        sizes = [self._fit(n) for n in wanted[short].tolist()]
        if self._end + sum(sizes) > self.data.size:
            self._make_room(sum(sizes))
        starts = [self._claim(size) for size in sizes]
        data = self.data
        for old, new, keep in zip(self.start[rows].tolist(), starts, used[short].tolist(), strict=True):
            data[new : new + keep] = data[old : old + keep]
        self.close(rows)
        self.start[rows] = starts
        self.capacity[rows] = sizes
        self._open += sum(sizes)

    def values(self, row: int, count: int) -> I32:
        """The first `count` values of a row: a view, good until a region is opened or grows."""
        start = int(self.start[row])
        return self.data[start : start + count]

    def gather(self, rows: I64, first: I64, count: I64) -> I32:
        """Values first[i] : first[i] + count[i] of rows[i], one row after another."""
        return self.data[ranges(self.start[rows] + first, count)]

    def gather_equal(self, rows: I64, first: I64, count: int) -> I32:
        """As `gather` where all counts are the same, as an array [rows, count]."""
        columns: I32 = self.data[(self.start[rows] + first)[:, None] + np.arange(count)]
        return columns

    def _fit(self, wanted: int) -> int:
        return max(self._least, 1 << (wanted - 1).bit_length())

    def _claim(self, size: int) -> int:
        """The start of a region of `size`: one given back, or the next at the end, where there is room for it."""
        closed = self._closed.get(size)
        if closed:
            return closed.pop()
        start = self._end
        self._end += size
        return start

    def _make_room(self, wanted: int) -> None:
        """Room for `wanted` values at the end: closes the gaps if they are half of all, else by a larger array."""
        if 2 * (self._open + wanted) > self.data.size:
            size = max(self.data.size * 3 // 2, self._end + wanted)
            grown = np.empty(size, np.int32)
            grown[: self._end] = self.data[: self._end]
            self.data = grown
            return
        rows = self.capacity.nonzero()[0]
        capacity = self.capacity[rows]
        packed = np.empty_like(self.data)
        packed[: self._open] = self.data[ranges(self.start[rows], capacity)]
        self.data = packed
        self.start[rows] = capacity.cumsum() - capacity
        self._end = self._open
        self._closed.clear()

    def check(self, name: str) -> list[str]:
        """One sentence for each region that lies outside the data or on another."""
        wrong = []
        rows = self.capacity.nonzero()[0]
        rows = rows[self.start[rows].argsort(kind="stable")]
        ends = self.start[rows] + self.capacity[rows]
        wrong += [
            f"the {name} of rows {rows[i]} and {rows[i + 1]} overlap at {self.start[rows[i + 1]]}"
            for i in (ends[:-1] > self.start[rows[1:]]).nonzero()[0]
        ]
        if rows.size and (self.start[rows[0]] < 0 or ends[-1] > self._end):
            wrong.append(f"the {name} end at {ends[-1]}, of {self._end}")
        if (total := int(self.capacity.sum())) != self._open:
            wrong.append(f"the {name} have capacities of {total} in all, {self._open} are counted")
        return wrong
