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

A ghost outlives its block and all that is chained before it, so it is known by the block's own tokens alone, compared
exactly. Equal tokens after another prefix are taken for the same: they begin in the main queue, which costs them their
probation and never anybody's content, since the policy says only what goes first and the index what is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from block_manager_svc.core.eviction.policy import EvictionPolicy
from block_manager_svc.core.step import I64

MOST = 3
_SMALL, _MAIN, _NEW = 0, 1, 2

Queue = OrderedDict[int, None]


class S3FIFO(EvictionPolicy):
    """See EvictionPolicy."""

    __slots__ = ("_ghosts", "_most_ghosts", "_place", "_queues", "_tokens", "_uses")

    def __init__(self, num_blocks: int, tokens: Callable[[int], bytes]) -> None:
        """tokens: what an indexed block holds."""
        self._tokens = tokens
        self._queues = Queue(), Queue()  # small and main
        self._place = bytearray([_NEW]) * num_blocks  # the queue of each, also while it is in use
        self._uses = bytearray(num_blocks)
        # Keys are tokens, the oldest first; as many as the main queue has blocks when the whole pool is cached.
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._most_ghosts = num_blocks * 9 // 10

    def __len__(self) -> int:
        small, main = self._queues
        return len(small) + len(main)

    def add(self, blocks: I64) -> None:
        for block in blocks.tolist():
            if self._place[block] == _NEW:
                self._place[block] = self._first_place(self._tokens(block))
            self._queues[self._place[block]][block] = None

    def remove(self, blocks: I64) -> None:
        for block in blocks.tolist():
            del self._queues[self._place[block]][block]
            self._uses[block] = min(self._uses[block] + 1, MOST)

    def evict(self, count: int) -> I64:
        assert count <= len(self)
        victims = _give(count, self._queues, self._place, self._uses)
        for block in victims:
            if self._place[block] == _SMALL:
                self._remember(self._tokens(block))
        evicted = np.array(victims, np.int64)
        self.forget(evicted)
        return evicted

    def forget(self, blocks: I64) -> None:
        for block in blocks.tolist():
            self._place[block] = _NEW
            self._uses[block] = 0

    def order(self) -> I64:
        small, main = self._queues
        victims = _give(len(self), (small.copy(), main.copy()), self._place[:], self._uses[:])
        return np.array(victims, np.int64)

    def _first_place(self, tokens: bytes) -> int:
        """Where a block begins. A ghost is gone once its content is back."""
        if tokens not in self._ghosts:
            return _SMALL
        del self._ghosts[tokens]
        return _MAIN

    def _remember(self, tokens: bytes) -> None:
        self._ghosts[tokens] = None
        self._ghosts.move_to_end(tokens)
        if len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)


def _give(count: int, queues: tuple[Queue, Queue], place: bytearray, uses: bytearray) -> list[int]:
    """Takes out the `count` blocks that go first; moves the others that come to the front on the way.

    Each move uses up something that a find has brought, so moves are no more than finds.
    """
    small, main = queues
    victims: list[int] = []
    while len(victims) < count:
        if len(small) * 10 >= len(small) + len(main):
            block, _ = small.popitem(last=False)
            stays, left = uses[block] > 1, 0
        else:
            block, _ = main.popitem(last=False)
            stays, left = uses[block] > 0, uses[block] - 1
        if stays:
            main[block] = None
            place[block], uses[block] = _MAIN, left
        else:
            victims.append(block)
    return victims
