"""The physical blocks: who is free, how often each is referenced, what is sealed, findable, cached.

FREE ─take→ ACTIVE ─seal→ SEALED ─last reference dropped→ CACHED (if it is in the index; else FREE)
  ▲            │ last reference dropped                      │ evicted, or shared again → SEALED
  └────────────┴─────────────────────────────────────────────┘

Device and host have one numbering, so that a block keeps its columns' meaning when it moves from one to the other:

    places   0     1 ··· num_blocks - 1   num_blocks   num_blocks + 1 ··· num_blocks + num_host - 1
             null  device blocks          (host null)  host slots 1, 2 ···

On the host nothing is cached: what loses its last reference there is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from block_manager_svc.core.accounts import Accounts, Caches
from block_manager_svc.core.allocator import BitmapAllocator
from block_manager_svc.core.eviction import EvictionPolicy, MakePolicy
from block_manager_svc.core.prefix_index import PrefixIndex
from block_manager_svc.core.results import BlockStates, Counters, Sharing, TenantUsage
from block_manager_svc.core.step import I32, I64

SPARE_SLOTS = 1  # of the host: only an exchange passes through


@dataclass(slots=True)
class Use:
    """Of one side, kept current: what `audit` counts afresh."""

    entries: int = 0  # sum of all refcounts
    referenced: int = 0  # blocks with at least 1
    shared: int = 0  # of these, at least 2
    sealed: int = 0  # of the referenced


class BlockPool:
    """Blocks are int64 arrays of places. Callers check; nothing here refuses."""

    __slots__ = (
        "_idle_pinned",
        "_make_cache",
        "_pinned",
        "_zero_crossing",
        "accounts",
        "allocator",
        "cached",
        "counters",
        "device",
        "host",
        "host_allocator",
        "index",
        "indexed",
        "num_blocks",
        "num_host",
        "pinned",
        "refcount",
        "reserved",
        "sealed",
        "withheld",
    )

    def __init__(
        self, num_blocks: int, num_host: int, block_size: int, policy: MakePolicy, *, zero_crossing: bool
    ) -> None:
        """zero_crossing: whether `take` tells which blocks hold what another tenant wrote."""
        self.num_blocks = num_blocks
        self.num_host = num_host
        self.allocator = BitmapAllocator(num_blocks)
        self.host_allocator = BitmapAllocator(max(num_host, 1))
        self.index = PrefixIndex(num_blocks + num_host, block_size)
        self._make_cache = partial(policy, num_blocks, self.index.held)
        self.cached: EvictionPolicy = self._make_cache()
        self.accounts: Accounts | None = None  # while there is one tenant, 0, without quota or floor
        self.refcount: I32 = np.zeros(num_blocks + num_host, np.int32)
        self.sealed = np.zeros(num_blocks + num_host, bool)
        self.indexed = np.zeros(num_blocks + num_host, bool)
        self.pinned: I32 = np.zeros(num_blocks, np.int32)  # pins that hold each
        self.counters = Counters()
        self.device = Use()
        self.host = Use()
        # Blocks that are kept free: promised to reservations, and above the limit of the pool.
        self.reserved = 0
        self.withheld = 0
        # How many blocks are pinned, and of these, how many nothing references.
        self._pinned = 0
        self._idle_pinned = 0
        self._zero_crossing = zero_crossing

    def available(self) -> int:
        """Blocks that `take` can give: free, or cached and not pinned, but for those that are kept free."""
        return len(self.allocator) + len(self.cached) - self.reserved - self.withheld

    def open_accounts(self, tenant: int) -> Accounts:
        """Accounts in which there are tenants up to this one; all that there is now belongs to tenant 0."""
        accounts = self.accounts
        if accounts is None:
            accounts = self.accounts = Accounts(self.num_blocks, self.refcount.size, self._make_cache)
            accounts.admit(0)
            accounts.caches[0] = self.cached
            accounts.charged[0] = self.num_blocks - 1 - len(self.allocator)
            accounts.reserved[0] = self.reserved
            accounts.host[0] = self.host.referenced
            if self.counters.allocated_blocks:
                accounts.writer[:] = 0
            self.cached = Caches(accounts)
        accounts.admit(tenant)
        return accounts

    def room(self, tenant: int) -> int:
        """Blocks that a tenant can take: what is available, but for its quota and for what others are guaranteed."""
        return self.accounts.room(tenant, self.available()) if self.accounts else self.available()

    def unpromised(self) -> int:
        """What is available and not guaranteed to anybody."""
        return self.available() - (int(self.accounts.protected().sum()) if self.accounts else 0)

    def host_room(self) -> int:
        """Host slots that can be taken: one is kept for exchanges."""
        return max(0, len(self.host_allocator) - SPARE_SLOTS)

    def most(self, tenant: int) -> int:
        """Blocks that a tenant can ever hold at once."""
        limit = self.num_blocks - 1 - self.withheld
        return self.accounts.most(tenant, limit) if self.accounts else limit

    def usage(self, tenant: int) -> TenantUsage:
        if self.accounts is None:
            if tenant:
                return TenantUsage(0, 0, 0, 0, 0, None, 0, None)
            charged = self.device.referenced + len(self.cached) + self._idle_pinned
            return TenantUsage(charged, len(self.cached), self.reserved, self.host.referenced, 0, None, 0, None)
        return self.accounts.usage(tenant)

    def is_evictable(self, blocks: I64) -> NDArray[np.bool_]:
        """Of findable blocks, those that are neither referenced nor pinned."""
        evictable: NDArray[np.bool_] = (self.refcount[blocks] == 0) & (self.pinned[blocks] == 0)
        return evictable

    def to_take(self, found: I64, tenant: int) -> int:
        """How many of distinct blocks that are found add to what the tenant uses: evictable, or charged to others."""
        take = self.is_evictable(found)
        if self.accounts:
            take |= self.accounts.is_charged(found, tenant) == 0
        return int(np.count_nonzero(take))

    def change(self, found: I64, tenant: int) -> I64:
        """By tenant, how many blocks more are used when one takes distinct blocks that are found.

        What is pinned and idle was used by the one who left it there.
        """
        assert self.accounts
        left = found[(self.refcount[found] == 0) & (self.pinned[found] > 0)]
        change: I64 = -self.accounts.bill(left)
        change[tenant] += self.to_take(found, tenant) + int(self.accounts.is_charged(left, tenant).sum())
        return change

    def join(self, found: I64, tenant: int) -> I64:
        """By tenant, how many of distinct blocks that are found become joint when the tenant takes them."""
        assert self.accounts
        busy = found[self.refcount[found] > 0]
        return self.accounts.join(busy[self.accounts.is_charged(busy, tenant) == 0], tenant)

    def keep(self, reserved: int, withheld: int) -> None:
        """So many blocks are kept free from now on; evicts what the free ones fall short of."""
        self.reserved, self.withheld = reserved, withheld
        self._evict(reserved + withheld - len(self.allocator))

    def claim(self, count: int) -> I64:
        """`count` blocks of the device for whatever, lowest numbers first; evicts what the free ones fall short of."""
        self._evict(count + self.reserved + self.withheld - len(self.allocator))
        return self.allocator.allocate(count)

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        self._give_up(self.cached.evict(count))

    def _give_up(self, victims: I64) -> None:
        """Blocks that have left the cache for good are free."""
        self.index.remove(victims.tolist())
        self.indexed[victims] = False
        self.sealed[victims] = False
        self.allocator.free(victims)
        self.counters.evicted_blocks += victims.size
        if self.accounts:
            self.accounts.lose(victims)

    def obey_quotas(self) -> None:
        """Who is charged more than its quota gives up what it has in the cache."""
        if self.accounts:
            for cache, count in self.accounts.excess():
                self._give_up(cache.evict(count))

    def take(self, who: I64) -> tuple[I64, NDArray[np.bool_] | None]:
        """A block of the device for each of these tenants, with one reference, as `claim` gives them.

        Also, which of them hold what another tenant wrote and are to be zeroed; None: none of them.
        """
        count = who.size
        if self.accounts:
            self.accounts.take(who)
            self.obey_quotas()
        blocks = self.claim(count)
        crossed = None
        if self.accounts:
            crossed = self.accounts.assign(blocks, who)
            if not self._zero_crossing or not crossed.any():
                crossed = None
        self.refcount[blocks] = 1
        self.counters.allocated_blocks += count
        self.device.entries += count
        self.device.referenced += count
        return blocks, crossed

    def share(self, blocks: I64, tenant: int, count: int = 1) -> None:
        """`count` more references of a tenant to each of some distinct blocks; what was cached leaves the cache."""
        if self.host.entries and (away := blocks >= self.num_blocks).any():
            self._share_host(blocks[away], tenant, count)
            blocks = blocks[~away]
        before = self.refcount[blocks]
        idle = blocks[before == 0]
        if idle.size:
            # Last first is how a sequence's blocks came in, see `release`.
            evictable = self._not_pinned(idle)
            self.cached.remove(evictable[::-1])
            self._idle_pinned -= idle.size - evictable.size
            self.device.referenced += idle.size
            self.device.sealed += idle.size
        if self.accounts:
            self.accounts.share(blocks, before, count, tenant)
        self.refcount[blocks] = before + count
        self.device.entries += count * blocks.size
        self.device.shared += int(np.count_nonzero((before < 2) & (before + count >= 2)))

    def _share_host(self, blocks: I64, tenant: int, count: int) -> None:
        """As `share`; nothing is cached on the host."""
        before = self.refcount[blocks]
        if self.accounts:
            self.accounts.share(blocks, before, count, tenant)
        self.refcount[blocks] = before + count
        self.host.entries += count * blocks.size
        self.host.shared += int(np.count_nonzero((before < 2) & (before + count >= 2)))

    def release(self, blocks: I64, who: I64) -> None:
        """One reference less, of tenant who[i], for each of some distinct blocks.

        What becomes cached is evicted in this order.
        """
        if self.accounts:
            self.accounts.release(blocks, who)
        before = self.refcount[blocks]
        self.refcount[blocks] = before - 1
        self._settle(blocks, before, before - 1, blocks.size)

    def release_repeated(self, blocks: I64, who: I64) -> None:
        """As `release`, for blocks that may be named several times; the last mention of each gives its place."""
        if self.accounts:
            self.accounts.release(blocks, who)
        last = np.unique(blocks[::-1], return_index=True)[1]
        distinct = blocks[np.sort(blocks.size - 1 - last)]
        before = self.refcount[distinct]
        np.subtract.at(self.refcount, blocks, 1)
        self._settle(distinct, before, self.refcount[distinct], blocks.size)

    def _settle(self, blocks: I64, before: I32, after: I32, fell: int) -> None:
        """Takes note of refcounts that fell, by `fell` in all.

        What nothing references any more is cached if it is indexed, else free.
        """
        if self.host.entries and (away := blocks >= self.num_blocks).any():
            fell -= self._settle_host(blocks[away], before[away], after[away])
            blocks, before, after = blocks[~away], before[~away], after[~away]
        self.device.entries -= fell
        self.device.shared -= int(np.count_nonzero((before > 1) & (after < 2)))
        dropped = blocks[after == 0]
        if not dropped.size:
            return
        self.device.referenced -= dropped.size
        self.device.sealed -= int(np.count_nonzero(self.sealed[dropped]))
        keep = self.indexed[dropped]
        idle = dropped[keep]
        evictable = self._not_pinned(idle)
        self.cached.add(evictable)
        self._idle_pinned += idle.size - evictable.size
        gone = dropped[~keep]
        self.sealed[gone] = False
        self.allocator.free(gone)
        if self.accounts:
            self.accounts.lose(gone)
            self.obey_quotas()

    def _settle_host(self, blocks: I64, before: I32, after: I32) -> int:
        """As `_settle`, on the host. Returns by how much the refcounts fell."""
        fell = int((before - after).sum())
        self.host.entries -= fell
        self.host.shared -= int(np.count_nonzero((before > 1) & (after < 2)))
        gone = blocks[after == 0]
        self.host.referenced -= gone.size
        self.host.sealed -= int(np.count_nonzero(self.sealed[gone]))
        self.index.remove(gone[self.indexed[gone]].tolist())
        self.indexed[gone] = False
        self.sealed[gone] = False
        self.host_allocator.free(gone - self.num_blocks)
        if self.accounts:
            self.accounts.lose_host(gone)
        return fell

    def move(self, old: I64, new: I64) -> None:
        """What is known of the referenced block old[i] is true of new[i] from now on; all at once.

        The places in `new` were claimed, those in `old` given back; a place may be in both: vacated, and taken again.
        Eviction policies begin anew with what has moved. See `cross` for what changes sides.
        """
        refcount, sealed, indexed = self.refcount[old], self.sealed[old], self.indexed[old]
        self.index.move(old[indexed].tolist(), new[indexed].tolist())
        self.refcount[old] = 0
        self.refcount[new] = refcount
        self.sealed[old] = False
        self.sealed[new] = sealed
        self.indexed[old] = False
        self.indexed[new] = indexed
        self.cached.forget(old[old < self.num_blocks])
        if self.accounts:
            self.accounts.move(old, new)

    def cross(self, places: I64, source: Use, target: Use) -> None:
        """Referenced blocks that lie at `places` now have changed sides."""
        if not places.size:
            return
        refcount = self.refcount[places]
        entries, shared = int(refcount.sum()), int(np.count_nonzero(refcount > 1))
        sealed = int(np.count_nonzero(self.sealed[places]))
        for use, sign in ((source, -1), (target, 1)):
            use.entries += sign * entries
            use.referenced += sign * places.size
            use.shared += sign * shared
            use.sealed += sign * sealed

    def move_pins(self, old: I64, new: I64) -> None:
        """Pins of device block old[i] are those of device block new[i] from now on."""
        pinned = self.pinned[old]
        self.pinned[old] = 0
        self.pinned[new] = pinned

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
        self.obey_quotas()

    @property
    def has_pins(self) -> bool:
        return self._pinned > 0

    def forget_all(self) -> int:
        """Nothing is found any more, pinned or not: what is cached becomes free. Returns how many blocks that are."""
        found = self.index.blocks()
        idle = found[self.refcount[found] == 0]
        ordered = self.cached.evict(len(self.cached))
        assert ordered.size + self._idle_pinned == idle.size
        self.index.clear()
        on_device = found[found < self.num_blocks]
        self.cached.forget(on_device)
        self.indexed[found] = False
        self.pinned[on_device] = 0
        self._pinned = self._idle_pinned = 0
        self.sealed[idle] = False
        self.allocator.free(idle)
        if self.accounts:
            self.accounts.lose(idle)
        return int(idle.size)

    def _not_pinned(self, blocks: I64) -> I64:
        return blocks[self.pinned[blocks] == 0] if self._pinned else blocks

    def seal(
        self, parents: list[int], counts: list[int], tokens: bytes, blocks: I64, extra: Mapping[int, bytes]
    ) -> list[int]:
        """Seals blocks, and indexes those whose content is new behind its prefix. See PrefixIndex.insert."""
        ends, indexed = self.index.insert(parents, counts, tokens, blocks.tolist(), extra)
        self.sealed[blocks] = True
        self.indexed[indexed] = True
        self.device.sealed += blocks.size
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
        self.device.sealed -= blocks.size

    def states(self) -> BlockStates:
        return BlockStates(
            null=1,
            free=len(self.allocator) - self.reserved,
            reserved=self.reserved,
            active=self.device.referenced - self.device.sealed,
            sealed=self.device.sealed,
            cached=len(self.cached) + self._idle_pinned,
            quarantined=0,
        )

    def host_states(self) -> BlockStates:
        return BlockStates(
            null=min(1, self.num_host),
            free=len(self.host_allocator),
            reserved=0,
            active=self.host.referenced - self.host.sealed,
            sealed=self.host.sealed,
            cached=0,
            quarantined=0,
        )

    def sharing(self) -> Sharing:
        """Of the device."""
        return Sharing(self.device.entries, self.device.referenced, self.device.shared)

    def note_peaks(self) -> None:
        """After each command that may raise what `sharing` says."""
        counters, use = self.counters, self.device
        counters.peak_table_entries = max(counters.peak_table_entries, use.entries)
        counters.peak_referenced_blocks = max(counters.peak_referenced_blocks, use.referenced)
        counters.peak_shared_blocks = max(counters.peak_shared_blocks, use.shared)
