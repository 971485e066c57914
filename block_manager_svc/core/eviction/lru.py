"""Least recently used: the block that lost its last reference longest ago goes first."""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.eviction.lists import BlockLists
from block_manager_svc.core.eviction.policy import EvictionPolicy
from block_manager_svc.core.step import I64


class LRU(EvictionPolicy):
    """See EvictionPolicy."""

    __slots__ = ("_list", "_size")

    def __init__(self, num_blocks: int) -> None:
        self._list = BlockLists(num_blocks, 1)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, blocks: I64) -> None:
        if blocks.size:
            self._list.append(blocks)
            self._size += blocks.size

    def remove(self, blocks: I64) -> None:
        if blocks.size:
            self._list.unlink(blocks)
            self._size -= blocks.size

    def evict(self, count: int) -> I64:
        assert count <= self._size
        victims = self._list.pop(count)
        self._size -= count
        return np.array(victims, np.int64)

    def order(self) -> I64:
        return np.array(self._list.first(self._size), np.int64)
