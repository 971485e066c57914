"""The physical blocks: who is free, how often each is referenced, what is sealed, findable, cached.

FREE ─take→ ACTIVE ─seal→ SEALED ─last reference dropped→ CACHED (if it is in the index; else FREE)
  ▲            │ last reference dropped                      │ evicted, or shared again → SEALED
  └────────────┴─────────────────────────────────────────────┘
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.allocator import BitmapAllocator
from block_manager_svc.core.eviction import MakePolicy
from block_manager_svc.core.prefix_index import PrefixIndex
from block_manager_svc.core.results import BlockStates, Counters, Sharing
from block_manager_svc.core.step import I32, I64


class BlockPool:
    """Blocks are int64 arrays of numbers in 1 .. num_blocks - 1. Callers check; nothing here refuses."""

    __slots__ = (
        "_entries",
        "_idle_pinned",
        "_pinned",
        "_referenced",
        "_sealed",
        "_shared",
        "allocator",
        "cached",
        "counters",
        "index",
        "indexed",
        "num_blocks",
        "pinned",
        "refcount",
        "sealed",
    )

    def __init__(self, num_blocks: int, block_size: int, policy: MakePolicy) -> None:
        self.num_blocks = num_blocks
        self.allocator = BitmapAllocator(num_blocks)
        self.index = PrefixIndex(num_blocks, block_size)
        self.cached = policy(num_blocks, self.index.tokens)
        self.refcount: I32 = np.zeros(num_blocks, np.int32)
        self.sealed = np.zeros(num_blocks, bool)
        self.indexed = np.zeros(num_blocks, bool)
        self.pinned: I32 = np.zeros(num_blocks, np.int32)  # pins that hold each
        self.counters = Counters()
        # Kept current: the sum of all refcounts, and how many blocks have at least 1, and of these
        # at least 2, or are sealed; how many are pinned, and of these, how many nothing references.
        self._pinned = 0
        self._idle_pinned = 0
        self._entries = 0
        self._referenced = 0
        self._shared = 0
        self._sealed = 0

    def available(self) -> int:
        """Blocks that `take` can give: free, or cached and not pinned."""
        return len(self.allocator) + len(self.cached)

    def take(self, count: int) -> I64:
        """`count` blocks with one reference each, lowest numbers first; evicts what the free ones fall short of."""
        short = count - len(self.allocator)
        if short > 0:
            victims = self.cached.evict(short)
            self.index.remove(victims.tolist())
            self.indexed[victims] = False
            self.sealed[victims] = False
            self.allocator.free(victims)
            self.counters.evicted_blocks += short
        blocks = self.allocator.allocate(count)
        self.refcount[blocks] = 1
        self.counters.allocated_blocks += count
        self._entries += count
        self._referenced += count
        return blocks

    def share(self, blocks: I64, count: int = 1) -> None:
        """`count` more references to each of some distinct blocks; those that were cached leave the cache."""
        before = self.refcount[blocks]
        idle = blocks[before == 0]
        if idle.size:
            # Last first is how a sequence's blocks came in, see `release`.
            evictable = self._not_pinned(idle)
            self.cached.remove(evictable[::-1])
            self._idle_pinned -= idle.size - evictable.size
            self._referenced += idle.size
            self._sealed += idle.size
        self.refcount[blocks] = before + count
        self._entries += count * blocks.size
        self._shared += int(np.count_nonzero((before < 2) & (before + count >= 2)))

    def release(self, blocks: I64) -> None:
        """One reference less for each of some distinct blocks. What becomes cached is evicted in this order."""
        before = self.refcount[blocks]
        self.refcount[blocks] = before - 1
        self._settle(blocks, before, before - 1)

    def release_repeated(self, blocks: I64) -> None:
        """As `release`, for blocks that may be named several times; the last mention of each gives its place."""
        last = np.unique(blocks[::-1], return_index=True)[1]
        distinct = blocks[np.sort(blocks.size - 1 - last)]
        before = self.refcount[distinct]
        np.subtract.at(self.refcount, blocks, 1)
        self._entries -= blocks.size - distinct.size
        self._settle(distinct, before, self.refcount[distinct])

    def _settle(self, blocks: I64, before: I32, after: I32) -> None:
        """Takes note of refcounts that fell: what nothing references any more is cached if it is indexed, else free."""
        self._entries -= blocks.size
        self._shared -= int(np.count_nonzero((before > 1) & (after < 2)))
        dropped = blocks[after == 0]
        if not dropped.size:
            return
        self._referenced -= dropped.size
        self._sealed -= int(np.count_nonzero(self.sealed[dropped]))
        keep = self.indexed[dropped]
        idle = dropped[keep]
        evictable = self._not_pinned(idle)
        self.cached.add(evictable)
        self._idle_pinned += idle.size - evictable.size
        gone = dropped[~keep]
        self.sealed[gone] = False
        self.allocator.free(gone)

    def pin(self, blocks: I64) -> None:
        """One pin more for each of some distinct, indexed blocks: they are not evicted."""
        first = blocks[self.pinned[blocks] == 0]
        idle = first[self.refcount[first] == 0]
        self.cached.remove(idle[::-1])
        self._pinned += first.size
        self._idle_pinned += idle.size
        self.pinned[blocks] += 1

    def unpin(self, blocks: I64) -> None:
        """One pin less for each of some distinct, pinned blocks. What can be evicted then is so in this order."""
        self.pinned[blocks] -= 1
        last = blocks[self.pinned[blocks] == 0]
        idle = last[self.refcount[last] == 0]
        self.cached.add(idle)
        self._pinned -= last.size
        self._idle_pinned -= idle.size

    def forget_all(self) -> int:
        """Nothing is found any more, pinned or not: what is cached becomes free. Returns how many blocks that are."""
        found = self.index.blocks()
        idle = found[self.refcount[found] == 0]
        ordered = self.cached.evict(len(self.cached))
        assert ordered.size + self._idle_pinned == idle.size
        self.index.remove(found.tolist())
        self.cached.forget(found)
        self.indexed[found] = False
        self.pinned[found] = 0
        self._pinned = self._idle_pinned = 0
        self.sealed[idle] = False
        self.allocator.free(idle)
        return int(idle.size)

    def _not_pinned(self, blocks: I64) -> I64:
        return blocks[self.pinned[blocks] == 0] if self._pinned else blocks

    def seal(self, parents: list[int], counts: list[int], tokens: bytes, blocks: I64) -> list[int]:
        """Seals blocks, and indexes those whose content is new behind its prefix. See PrefixIndex.insert."""
        ends, indexed = self.index.insert(parents, counts, tokens, blocks.tolist())
        self.sealed[blocks] = True
        self.indexed[indexed] = True
        self._sealed += blocks.size
        return ends

    def unseal(self, blocks: I64) -> None:
        """Referenced, sealed blocks are to be written again: they leave the index, and lose their pins."""
        self.index.remove(blocks[self.indexed[blocks]].tolist())
        self.indexed[blocks] = False
        self.sealed[blocks] = False
        self.cached.forget(blocks)
        if self._pinned:
            self._pinned -= int(np.count_nonzero(self.pinned[blocks]))
            self.pinned[blocks] = 0
        self._sealed -= blocks.size

    def states(self) -> BlockStates:
        return BlockStates(
            null=1,
            free=len(self.allocator),
            reserved=0,
            active=self._referenced - self._sealed,
            sealed=self._sealed,
            cached=len(self.cached) + self._idle_pinned,
            quarantined=0,
        )

    def sharing(self) -> Sharing:
        return Sharing(self._entries, self._referenced, self._shared)

    def note_peaks(self) -> None:
        """After each command that may raise what `sharing` says."""
        counters = self.counters
        counters.peak_table_entries = max(counters.peak_table_entries, self._entries)
        counters.peak_referenced_blocks = max(counters.peak_referenced_blocks, self._referenced)
        counters.peak_shared_blocks = max(counters.peak_shared_blocks, self._shared)
