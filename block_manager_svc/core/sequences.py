"""The sequences that are alive: their ids, and what is known of each, in columns over rows.

A row is found from an id without a dictionary: row = id mod capacity. Ids rise, and skip those whose row is taken; the
capacity is at least twice the number alive and a power of two, so rows that differ stay different when it doubles, and
skips are rare. No id is ever used twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from block_manager_svc.core.errors import InvalidArgument, SequenceNotFound
from block_manager_svc.core.events import EventLog
from block_manager_svc.core.extra_keys import Keyed
from block_manager_svc.core.ragged import RaggedArena
from block_manager_svc.core.step import I64

_COLUMNS = (
    "id",
    "length",
    "computed",
    "writable",
    "blocks",
    "node",
    "root",
    "away",
    "owner",
    "tenant",
    "window",
    "sinks",
    "gone",
    "changed",
)


class Sequences:
    """Columns (int64, by row; meaningless where no sequence is):

    id        0: the row is empty
    length    tokens known
    computed  positions whose K/V are written; what is full below it is sealed
    writable  positions up to which the table may be written, beyond length by a lookahead; computed <= both
    blocks    entries of the block table
    node      of the prefix index, after computed // block_size blocks; NO_NODE: what follows is not to be found
    root      of the prefix index, the namespace's
    owner     whose it is, as its creator said
    tenant    who is charged for its blocks
    window    positions that each position sees, itself among them; 0: all. See windows
    sinks     positions, from the first, that all see
    gone      entries below it, behind those of the sinks, are given up and null
    changed   revision of the page table at which the entries of the block table last changed
    away      1: swapped out; its blocks are on the host, but for those that a sequence on the device shares
    """

    __slots__ = (
        *_COLUMNS,
        "_last",
        "_last_key",
        "_mark",
        "_mask",
        "_next",
        "_size",
        "_taken",
        "events",
        "extra",
        "tables",
        "tokens",
        "windowed",
    )

    id: I64
    length: I64
    computed: I64
    writable: I64
    blocks: I64
    node: I64
    root: I64
    owner: I64
    tenant: I64
    changed: I64
    window: I64
    sinks: I64
    gone: I64
    away: I64

    def __init__(self, capacity: int = 64, *, first: int = 1) -> None:
        self._mask = capacity - 1
        self._next = first
        self._size = 0
        self._taken = bytearray(capacity)
        self._mark = np.zeros(capacity, np.int64)
        for name in _COLUMNS:
            setattr(self, name, np.zeros(capacity, np.int64))
        self.tokens = RaggedArena(capacity, least=16)
        self.tables = RaggedArena(capacity, least=4)
        self.extra: dict[int, Keyed] = {}  # sequence -> its extra keys, of those that have some
        self.events: EventLog | None = None
        self.windowed = 0  # sequences that have a window
        # The batch that was resolved last, and its rows: an engine names the same sequences call after call.
        self._last_key: bytes | None = None
        self._last = np.empty(0, np.int64)

    @property
    def next(self) -> int:
        """No id from here on was given out."""
        return self._next

    def __len__(self) -> int:
        return self._size

    def add(self) -> int:
        """A new id; its row's columns are 0 and its regions closed."""
        if 2 * (self._size + 1) > len(self._taken):
            self._double()
        start = self._next & self._mask
        row = self._taken.find(0, start)
        if row < 0:
            row = self._taken.find(0) + len(self._taken)
        sequence = self._next + row - start
        self._next = sequence + 1
        row &= self._mask
        self._taken[row] = 1
        for name in _COLUMNS:
            getattr(self, name)[row] = 0
        self.id[row] = sequence
        self._size += 1
        self._last_key = None
        if self.events is not None:
            self.events.created(sequence)
        return sequence

    def remove(self, rows: I64) -> None:
        self.tokens.close(rows)
        self.tables.close(rows)
        if self.events is not None:
            self.events.ended(self.id[rows])
        if self.windowed:
            self.windowed -= int(np.count_nonzero(self.window[rows]))
        for sequence in self.id[rows].tolist() if self.extra else ():
            self.extra.pop(sequence, None)
        self.id[rows] = 0
        for row in rows.tolist():
            self._taken[row] = 0
        self._size -= rows.size
        self._last_key = None

    def cut_extra(self, ids: I64, lengths: I64) -> None:
        """Forgets extra keys of position lengths[i] and above."""
        for sequence, length in zip(ids.tolist(), lengths.tolist(), strict=True):
            if (keyed := self.extra.pop(sequence, None)) and keyed[0][0] < length:
                self.extra[sequence] = tuple(each for each in keyed if each[0] < length)

    def mark(self, rows: I64 | int, revision: int) -> None:
        """The block tables of rows have other entries since this revision."""
        self.changed[rows] = revision
        if self.events is not None and (ids := np.atleast_1d(self.id[rows])).size:
            self.events.tables_changed(ids, revision)

    def row(self, sequence: int) -> int:
        """The row of an id, or SequenceNotFound."""
        row = sequence & self._mask
        if sequence <= 0 or self.id[row] != sequence:
            raise SequenceNotFound(sequence)
        return row

    def rows(self, ids: I64) -> I64:
        """The rows of distinct ids. SequenceNotFound names the first that is not alive."""
        key = ids.tobytes()
        if key == self._last_key:
            return self._last
        rows = ids & self._mask
        if b"\1" in ((self.id[rows] != ids) | (ids <= 0)).tobytes():
            missing = ((self.id[rows] != ids) | (ids <= 0)).nonzero()[0][0]
            raise SequenceNotFound(int(ids[missing]))
        order = np.arange(ids.size)
        self._mark[rows] = order
        twice = (self._mark[rows] != order).nonzero()[0]
        if twice.size:
            sequence = int(ids[twice[0]])
            raise InvalidArgument("DUPLICATE_SEQUENCE", f"sequence {sequence} is named twice", sequence=sequence)
        self._last_key, self._last = key, rows
        return rows

    def holds(self, ids: I64) -> NDArray[np.bool_]:
        """Whether each of these ids, above 0, is alive."""
        held: NDArray[np.bool_] = self.id[ids & self._mask] == ids
        return held

    def owned(self, ids: I64, owner: int) -> NDArray[np.bool_]:
        """Whether each of these numbers is an id that is alive, and `owner`'s."""
        rows = ids & self._mask
        owned: NDArray[np.bool_] = (self.id[rows] == ids) & (ids > 0) & (self.owner[rows] == owner)
        return owned

    def alive(self) -> I64:
        """Rows in use, in order of creation."""
        rows = self.id.nonzero()[0]
        return rows[self.id[rows].argsort()]

    def check(self) -> list[str]:
        """One sentence for each way in which ids and rows disagree."""
        rows = self.id.nonzero()[0]
        wrong = [
            f"sequence {self.id[row]} is in row {row} of {self._mask + 1}"
            for row in rows
            if self.id[row] & self._mask != row
        ]
        taken = np.frombuffer(self._taken, np.uint8)
        wrong += [
            f"row {row} holds sequence {self.id[row]}, and is marked {'taken' if taken[row] else 'empty'}"
            for row in ((self.id > 0) != (taken > 0)).nonzero()[0]
        ]
        if rows.size != self._size:
            wrong.append(f"{rows.size} sequences are alive, {self._size} are counted")
        if rows.size and int(self.id.max()) >= self._next:
            wrong.append(f"sequence {self.id.max()} is alive, the next is to be {self._next}")
        return wrong

    def _double(self) -> None:
        old = self.id.nonzero()[0]
        capacity = 2 * len(self._taken)
        self._mask = capacity - 1
        new = self.id[old] & self._mask
        for name in _COLUMNS:
            column = np.zeros(capacity, np.int64)
            column[new] = getattr(self, name)[old]
            setattr(self, name, column)
        self.tokens.move_rows(old, new, capacity)
        self.tables.move_rows(old, new, capacity)
        self._taken = bytearray(self.id.astype(bool).tobytes())
        self._mark = np.zeros(capacity, np.int64)
