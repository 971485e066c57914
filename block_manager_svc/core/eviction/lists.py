"""Several doubly linked lists of blocks in two int32 columns, each threaded through a sentinel of its own.

    next[sentinel] ─► first ─► … ─► last ─► sentinel        prev runs the other way

Neighbours in an argument that are neighbours in a list are linked and unlinked as one run, so a sequence's blocks,
released and found again in the same order, cost a handful of vector operations.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.step import I64


class BlockLists:
    """`lists` lists over blocks 1 .. num_blocks - 1; the sentinel of list k is 0 for k = 0, else num_blocks + k - 1."""

    __slots__ = ("_next", "_next_item", "_num_blocks", "_prev", "_prev_item")

    def __init__(self, num_blocks: int, lists: int) -> None:
        self._num_blocks = num_blocks
        self._next = np.zeros(num_blocks + lists - 1, np.int32)
        self._prev = np.zeros(num_blocks + lists - 1, np.int32)
        # Single items are read and written twice as fast through these.
        self._next_item = self._next.data
        self._prev_item = self._prev.data
        for k in range(1, lists):
            self._link(self._sentinel(k), self._sentinel(k))

    def append(self, blocks: I64, k: int = 0) -> None:
        """Puts blocks, none of which is in a list, at the end of list k in this order."""
        sentinel = self._sentinel(k)
        self._next[blocks[:-1]] = blocks[1:]
        self._prev[blocks[1:]] = blocks[:-1]
        self._link(self._prev_item[sentinel], int(blocks[0]))
        self._link(int(blocks[-1]), sentinel)

    def unlink(self, blocks: I64) -> None:
        """Takes blocks out of the lists that they are in."""
        ends = (self._next[blocks[:-1]] != blocks[1:]).nonzero()[0].tolist()
        ends.append(blocks.size - 1)
        start = 0
        for end in ends:
            self._link(self._prev_item[int(blocks[start])], self._next_item[int(blocks[end])])
            start = end + 1

    def first(self, count: int, k: int = 0) -> list[int]:
        """The first `count` blocks of list k, which has so many."""
        block = self._sentinel(k)
        blocks = []
        for _ in range(count):
            block = self._next_item[block]
            blocks.append(block)
        return blocks

    def pop(self, count: int, k: int = 0) -> list[int]:
        """Takes out what `first` gives."""
        blocks = self.first(count, k)
        if blocks:
            self._link(self._sentinel(k), self._next_item[blocks[-1]])
        return blocks

    def _sentinel(self, k: int) -> int:
        return self._num_blocks + k - 1 if k else 0

    def _link(self, before: int, after: int) -> None:
        self._next_item[before] = after
        self._prev_item[after] = before
