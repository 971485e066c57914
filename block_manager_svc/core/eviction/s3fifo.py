"""S3-FIFO: most blocks are never found again, so new ones wait in a small queue and go first.

Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction (SOSP 2023), section 4 and algorithm 1.

                   found twice or more since
    new ─► small ─────────────────────────────► main ─► found since: again to the end, one use less
             │ else                              ▲  └─► else evicted
             ▼                                   │
          evicted, its content goes on as a ghost ── computed again while the ghost is there

The small queue gives as long as it has a tenth of all blocks, else the main queue. Two things differ from a cache of
objects. A block that is found leaves the cache until its last holder is gone, and comes back to the end of the queue
that it was in, one use (of at most MOST) richer. And the capacity is whatever no sequence needs, so the tenth is that
of the blocks held when one is to go.

A ghost outlives its block and all that is chained before it, so it is known by the block's own content alone, compared
exactly. The same after another prefix are taken for the same: they begin in the main queue, which costs them their
probation and never anybody's content, since the policy says only what goes first and the index what is found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from block_manager_svc.core.eviction.fifo import Fifo
from block_manager_svc.core.eviction.policy import EvictionPolicy
from block_manager_svc.core.step import I64

MOST = 3
_SMALL, _MAIN, _NEW = 0, 1, 2


class S3FIFO(EvictionPolicy):
    """See EvictionPolicy."""

    __slots__ = ("_ghosts", "_held", "_main", "_most_ghosts", "_place", "_small", "_uses")

    def __init__(self, num_blocks: int, held: Callable[[int], bytes]) -> None:
        """held: what an indexed block holds, its tokens and extra keys."""
        self._held = held
        self._small: Fifo[int] = Fifo()
        self._main: Fifo[int] = Fifo()
        self._place = bytearray([_NEW]) * num_blocks  # the queue of each, also while it is in use
        self._uses = bytearray(num_blocks)
        # Of contents, the oldest first; as many as the main queue has blocks when the whole pool is cached.
        self._ghosts: Fifo[bytes] = Fifo()
        self._most_ghosts = num_blocks * 9 // 10

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def add(self, blocks: I64) -> None:
        for block in blocks.tolist():
            if self._place[block] == _NEW:
                self._place[block] = self._first_place(self._held(block))
            self._queue(block).append(block)

    def remove(self, blocks: I64) -> None:
        for block in blocks.tolist():
            self._queue(block).remove(block)
            self._uses[block] = min(self._uses[block] + 1, MOST)

    def evict(self, count: int) -> I64:
        assert count <= len(self)
        victims = _give(count, self._small, self._main, self._place, self._uses)
        for block in victims:
            if self._place[block] == _SMALL:
                self._remember(self._held(block))
        evicted = np.array(victims, np.int64)
        self.forget(evicted)
        return evicted

    def forget(self, blocks: I64) -> None:
        for block in blocks.tolist():
            self._place[block] = _NEW
            self._uses[block] = 0

    def order(self) -> I64:
        victims = _give(len(self), self._small.copy(), self._main.copy(), self._place[:], self._uses[:])
        return np.array(victims, np.int64)

    def _queue(self, block: int) -> Fifo[int]:
        return self._main if self._place[block] == _MAIN else self._small

    def _first_place(self, held: bytes) -> int:
        """Where a block begins. A ghost is gone once its content is back."""
        if held not in self._ghosts:
            return _SMALL
        self._ghosts.remove(held)
        return _MAIN

    def _remember(self, held: bytes) -> None:
        if held in self._ghosts:
            self._ghosts.remove(held)
        self._ghosts.append(held)
        if len(self._ghosts) > self._most_ghosts:
            self._ghosts.popleft()


def _give(count: int, small: Fifo[int], main: Fifo[int], place: bytearray, uses: bytearray) -> list[int]:
    """Takes out the `count` blocks that go first; moves the others that come to the front on the way.

    Each move uses up something that a find has brought, so moves are no more than finds.
    """
    victims: list[int] = []
    while len(victims) < count:
        if len(small) * 10 >= len(small) + len(main):
            block = small.popleft()
            stays, left = uses[block] > 1, 0
        else:
            block = main.popleft()
            stays, left = uses[block] > 0, uses[block] - 1
        if stays:
            main.append(block)
            place[block], uses[block] = _MAIN, left
        else:
            victims.append(block)
    return victims
