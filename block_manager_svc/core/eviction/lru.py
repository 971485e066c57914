"""Least recently used: the block that lost its last reference longest ago goes first.

A doubly linked list in two int32 columns over the pool, threaded through block 0, which is never cached:

    next[0] ─► oldest ─► … ─► newest ─► 0        prev runs the other way

Neighbours in an argument that are neighbours in the list are linked and unlinked as one run, so a sequence's blocks,
released and found again in the same order, cost a handful of vector operations.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.step import I64


class LRU:
    """See EvictionPolicy."""

    __slots__ = ("_next", "_next_item", "_prev", "_prev_item", "_size")

    def __init__(self, num_blocks: int) -> None:
        self._next = np.zeros(num_blocks, np.int32)
        self._prev = np.zeros(num_blocks, np.int32)
        # Single items are read and written twice as fast through these.
        self._next_item = self._next.data
        self._prev_item = self._prev.data
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, blocks: I64) -> None:
        if not blocks.size:
            return
        self._next[blocks[:-1]] = blocks[1:]
        self._prev[blocks[1:]] = blocks[:-1]
        self._link(self._prev_item[0], int(blocks[0]))
        self._link(int(blocks[-1]), 0)
        self._size += blocks.size

    def remove(self, blocks: I64) -> None:
        if not blocks.size:
            return
        ends = (self._next[blocks[:-1]] != blocks[1:]).nonzero()[0].tolist()
        ends.append(blocks.size - 1)
        start = 0
        for end in ends:
            self._link(self._prev_item[int(blocks[start])], self._next_item[int(blocks[end])])
            start = end + 1
        self._size -= blocks.size

    def evict(self, count: int) -> I64:
        assert count <= self._size
        victims = self._walk(count)
        self._link(0, self._next_item[victims[-1]] if victims else self._next_item[0])
        self._size -= count
        return np.array(victims, np.int64)

    def order(self) -> I64:
        return np.array(self._walk(self._size), np.int64)

    def _link(self, before: int, after: int) -> None:
        self._next_item[before] = after
        self._prev_item[after] = before

    def _walk(self, count: int) -> list[int]:
        blocks = []
        block = 0
        for _ in range(count):
            block = self._next_item[block]
            blocks.append(block)
        return blocks
