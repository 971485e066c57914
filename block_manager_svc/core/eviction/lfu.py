"""Least frequently used: the block that was found again the fewest times goes first; among equals, as LRU.

A list for each number of times, up to MOST, beyond which all count the same; so every operation costs what it moves,
whatever is cached. A block begins with 0 when it is cached for the first time with its content.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.eviction.lists import BlockLists
from block_manager_svc.core.eviction.policy import EvictionPolicy
from block_manager_svc.core.step import I64

MOST = 63


class LFU(EvictionPolicy):
    """See EvictionPolicy."""

    __slots__ = ("_held", "_lists", "_size", "_uses")

    def __init__(self, num_blocks: int) -> None:
        self._lists = BlockLists(num_blocks, MOST + 1)
        self._uses = np.zeros(num_blocks, np.uint8)  # times that each was found again, MOST at most
        self._held = [0] * (MOST + 1)  # blocks in each list
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, blocks: I64) -> None:
        if not blocks.size:
            return
        uses = self._uses[blocks]
        for k, count in enumerate(np.bincount(uses).tolist()):
            if count:
                self._lists.append(blocks if count == blocks.size else blocks[uses == k], k)
                self._held[k] += count
        self._size += blocks.size

    def remove(self, blocks: I64) -> None:
        if not blocks.size:
            return
        self._lists.unlink(blocks)
        uses = self._uses[blocks]
        for k, count in enumerate(np.bincount(uses).tolist()):
            self._held[k] -= count
        self._uses[blocks] = np.minimum(uses + 1, MOST)
        self._size -= blocks.size

    def evict(self, count: int) -> I64:
        assert count <= self._size
        victims: list[int] = []
        k = 0
        while len(victims) < count:
            part = min(self._held[k], count - len(victims))
            victims += self._lists.pop(part, k)
            self._held[k] -= part
            k += 1
        self._size -= count
        evicted = np.array(victims, np.int64)
        self._uses[evicted] = 0
        return evicted

    def forget(self, blocks: I64) -> None:
        self._uses[blocks] = 0

    def order(self) -> I64:
        return np.array([block for k, held in enumerate(self._held) for block in self._lists.first(held, k)], np.int64)
