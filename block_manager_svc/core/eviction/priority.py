"""By priority: the block that matters least to those who used it goes first; among equals, as LRU.

After the retention of blocks in TensorRT-LLM's KV cache manager: a priority from 0 to 100, and how long it counts once
nothing references the block. When that is over, the block goes on with the default priority, as if released then.

A list for each priority, so every operation costs what it moves, whatever is cached; and a heap of what ends when.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from block_manager_svc.core.eviction.lists import BlockLists
from block_manager_svc.core.eviction.policy import EvictionPolicy
from block_manager_svc.core.eviction.retention import DEFAULT_PRIORITY, MAX_PRIORITY, Retention
from block_manager_svc.core.step import I64
from block_manager_svc.core.undo import Agenda

_ENDED = 64  # the heap may have this many entries that are over, besides as many as those that are not


class Priority(EvictionPolicy):
    """See EvictionPolicy."""

    __slots__ = ("_due", "_ends", "_held", "_lists", "_now", "_priority", "_size", "_stamps", "_ttl")

    def __init__(self, num_blocks: int) -> None:
        self._lists = BlockLists(num_blocks, MAX_PRIORITY + 1)
        self._held = [0] * (MAX_PRIORITY + 1)  # blocks in each list
        self._size = 0
        self._priority = np.full(num_blocks, DEFAULT_PRIORITY, np.uint8)
        self._ttl = np.zeros(num_blocks, np.int64)  # ms, 0: for good
        self._now = 0
        self._stamps = itertools.count(1)
        self._ends: dict[int, int] = {}  # blocks held whose priority ends -> the stamp of their entry in ...
        self._due = Agenda()  # ... these (ms, stamp, block), with entries that are over

    def __len__(self) -> int:
        return self._size

    def add(self, blocks: I64) -> None:
        if not blocks.size:
            return
        priority = self._priority[blocks]
        for k, count in enumerate(np.bincount(priority).tolist()):
            if count:
                self._lists.append(blocks if count == blocks.size else blocks[priority == k], k)
                self._held[k] += count
        self._size += blocks.size
        ttl = self._ttl[blocks]
        for i in ttl.nonzero()[0].tolist():
            self._end_later(int(blocks[i]), self._now + int(ttl[i]))

    def remove(self, blocks: I64) -> None:
        if not blocks.size:
            return
        self._lists.unlink(blocks)
        for k, count in enumerate(np.bincount(self._priority[blocks]).tolist()):
            self._held[k] -= count
        self._size -= blocks.size
        self._end_never(blocks)

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
        self._end_never(evicted)
        self.forget(evicted)
        return evicted

    def order(self) -> I64:
        return np.array([block for k, held in enumerate(self._held) for block in self._lists.first(held, k)], np.int64)

    def forget(self, blocks: I64) -> None:
        self._priority[blocks] = DEFAULT_PRIORITY
        self._ttl[blocks] = 0

    def retain(self, blocks: I64, retention: Retention) -> None:
        self._priority[blocks] = retention.priority
        # The default ends in the default.
        self._ttl[blocks] = 0 if retention.priority == DEFAULT_PRIORITY else retention.ttl_ms or 0

    def advance(self, now: int) -> None:
        self._now = now
        while self._due and self._due[0][0] <= now:
            _, stamp, block = heapq.heappop(self._due)
            if self._ends.get(block) == stamp:
                ended = np.array([block], np.int64)
                self.remove(ended)
                self.forget(ended)
                self.add(ended)

    def _end_later(self, block: int, until: int) -> None:
        stamp = self._ends[block] = next(self._stamps)
        heapq.heappush(self._due, (until, stamp, block))
        if len(self._due) > 2 * len(self._ends) + _ENDED:
            self._due = Agenda(entry for entry in self._due if self._ends.get(entry[2]) == entry[1])
            heapq.heapify(self._due)

    def _end_never(self, blocks: I64) -> None:
        if self._ends:
            for block in blocks.tolist():
                self._ends.pop(block, None)
