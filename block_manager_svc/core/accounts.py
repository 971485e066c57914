"""Accounts of tenants: who is charged for which block, what nobody may exceed, and what everybody is guaranteed.

    charged    blocks that a tenant's tables reference, each once, and what it left in the cache; on device and on host
    used       of these, what cannot be evicted, and what is reserved
    joint      of these, what others are charged for as well
    protected  max(0, floor - (used - joint)): what a tenant can still take, whatever others do

A block is charged to one tenant, `tenant_of`, unless several reference it, as those of one share group do: then to each
of them, and `_several` counts whose references they are. Such a block does not come back when one of them frees it, so
it does not count towards anybody's floor. Each tenant has its own order of eviction. Room is made by those who have
most in the cache beyond what is protected; and since

    room = free + evictable - kept - sum of protected  >= 0

holds after every command, what is protected is there when its tenant comes for it: free, or in its own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from block_manager_svc.core.errors import OutOfBlocks, ResourceExhausted
from block_manager_svc.core.eviction import EvictionPolicy
from block_manager_svc.core.eviction.retention import Retention
from block_manager_svc.core.results import TenantUsage
from block_manager_svc.core.step import I32, I64

NO_QUOTA = (1 << 62) - 1
NOBODY = -1
_COLUMNS = ("charged", "joint", "reserved", "host", "host_joint", "floor", "quota", "host_floor", "host_quota")


class Accounts:
    """Columns by tenant (int64): see above; `host` is what is charged on the host, `host_joint` of it is joint."""

    __slots__ = (*_COLUMNS, "_make_cache", "_several", "caches", "now", "num_blocks", "tenant_of", "writer")

    charged: I64
    joint: I64
    reserved: I64
    host: I64
    host_joint: I64
    floor: I64
    quota: I64
    host_floor: I64
    host_quota: I64

    def __init__(self, num_blocks: int, places: int, make_cache: Callable[[], EvictionPolicy]) -> None:
        """make_cache: an empty cache for one more tenant."""
        self.num_blocks = num_blocks
        self.tenant_of: I32 = np.zeros(places, np.int32)
        # Whose K/V each holds, or held last; NOBODY before its first use.
        self.writer: I32 = np.full(places, NOBODY, np.int32)
        self.caches: list[EvictionPolicy] = []
        self.now = 0
        self._make_cache = make_cache
        self._several: dict[int, dict[int, int]] = {}  # place -> tenant -> references
        for name in _COLUMNS:
            setattr(self, name, np.empty(0, np.int64))

    def admit(self, tenant: int) -> None:
        """From now on there are tenants up to this one."""
        while len(self.caches) <= tenant:
            cache = self._make_cache()
            cache.advance(self.now)
            self.caches.append(cache)
            for name in _COLUMNS:
                first = NO_QUOTA if name.endswith("quota") else 0
                setattr(self, name, np.append(getattr(self, name), first))

    def set_quota(self, tenant: int, floor: int, quota: int | None, host_floor: int, host_quota: int | None) -> None:
        self.floor[tenant], self.host_floor[tenant] = floor, host_floor
        self.quota[tenant] = NO_QUOTA if quota is None else min(quota, NO_QUOTA)
        self.host_quota[tenant] = NO_QUOTA if host_quota is None else min(host_quota, NO_QUOTA)

    def quota_of(self, tenant: int) -> tuple[int, int | None, int, int | None]:
        """Floor and quota, and those on the host."""
        quota, host_quota = (None if c[tenant] == NO_QUOTA else int(c[tenant]) for c in (self.quota, self.host_quota))
        return int(self.floor[tenant]), quota, int(self.host_floor[tenant]), host_quota

    # --- what there is ------------------------------------------------------------------------------------------------

    def evictable(self) -> I64:
        return np.array([len(cache) for cache in self.caches], np.int64)

    def used(self) -> I64:
        used: I64 = self.charged - self.evictable() + self.reserved
        return used

    def protected(self, change: I64 | int = 0) -> I64:
        """By tenant; change: what each uses more, and is not joint."""
        protected: I64 = np.maximum(self.floor - (self.used() - self.joint + change), 0)
        return protected

    def protected_host(self, change: I64 | int = 0) -> I64:
        protected: I64 = np.maximum(self.host_floor - (self.host - self.host_joint + change), 0)
        return protected

    def usage(self, tenant: int) -> TenantUsage:
        if tenant >= len(self.caches):
            return TenantUsage(0, 0, 0, 0, 0, None, 0, None)
        floor, quota, host_floor, host_quota = self.quota_of(tenant)
        return TenantUsage(
            charged=int(self.charged[tenant]),
            cached=len(self.caches[tenant]),
            reserved=int(self.reserved[tenant]),
            host=int(self.host[tenant]),
            floor=floor,
            quota=quota,
            host_floor=host_floor,
            host_quota=host_quota,
        )

    def room(self, tenant: int, available: int) -> int:
        """Blocks that a tenant may take, of those that are available to all together."""
        room = self.room_above_quota(tenant, available)
        if tenant < len(self.caches):
            room = min(room, max(0, int(self.quota[tenant] - self.used()[tenant])))
        return room

    def room_above_quota(self, tenant: int, available: int) -> int:
        """As `room`, whatever the tenant's quota."""
        protected = self.protected()
        mine = int(protected[tenant]) if tenant < len(self.caches) else 0
        return available - int(protected.sum()) + mine

    def most(self, tenant: int, limit: int) -> int:
        """Blocks that a tenant could hold at once if all others held no more than they are guaranteed."""
        most = limit - int(self.floor.sum())
        if tenant < len(self.caches):
            most = min(most + int(self.floor[tenant]), int(self.quota[tenant]))
        return most

    def bill(self, places: I64) -> I64:
        """How many of these places each tenant is charged for."""
        several = [place for place in places.tolist() if place in self._several] if self._several else []
        bill: I64 = np.bincount(self.tenant_of[places], minlength=len(self.caches))
        for place in several:
            bill[self.tenant_of[place]] -= 1
            bill[list(self._several[place])] += 1
        return bill

    def is_charged(self, places: I64, tenant: int) -> I64:
        """1 for each place that the tenant is charged for, else 0."""
        charged: I64 = (self.tenant_of[places] == tenant).astype(np.int64)
        if self._several:
            for i, place in enumerate(places.tolist()):
                if place in self._several:
                    charged[i] = tenant in self._several[place]
        return charged

    def join(self, blocks: I64, tenant: int) -> I64:
        """By tenant, how many blocks become joint when one takes these, which are found on the device, as well."""
        joint = np.zeros(len(self.caches), np.int64)
        for block in blocks.tolist():
            if (holders := self._several.get(block)) is None:
                joint[self.tenant_of[block]] += 1
                joint[tenant] += 1
            elif tenant not in holders:
                joint[tenant] += 1
        return joint

    def shortfall(self, change: I64, joint: I64 | int, physical: int, available: int) -> int:
        """Blocks by which a demand exceeds what there is; 0: it is met.

        change: by tenant, how many more blocks will be used, and `joint` of them jointly; physical: how many fewer will
        be available.
        """
        return max(0, physical - (available - int(self.protected(change - joint).sum())))

    def over_quota(self, change: I64) -> tuple[int, int]:
        """The first tenant that a demand takes over its quota, and by how many blocks; else (0, 0)."""
        return _over(change, self.used(), self.quota)

    def to_give_way(self, change: I64) -> frozenset[int]:
        """Of a demand that is refused: who exceeds its quota, or else who would use more than its floor."""
        tenant, over = self.over_quota(change)
        if over:
            return frozenset([tenant])
        return frozenset((self.used() + change > self.floor).nonzero()[0].tolist())

    def check(self, change: I64, physical: int, available: int, needed: int, joint: I64 | int = 0) -> None:
        """Refuses a demand that takes a tenant over its quota, or that is not met. See `shortfall`.

        OutOfBlocks with `needed`; ResourceExhausted QUOTA_EXCEEDED.
        """
        tenant, over = self.over_quota(change)
        if over:
            raise _quota_exceeded(int(change[tenant]), over, int(self.quota[tenant]), "blocks")
        if short := self.shortfall(change, joint, physical, available):
            raise OutOfBlocks(needed, needed - short)

    def check_host(self, change: I64, joint: I64, physical: int, free: int) -> int:
        """As `check`, for slots of the host, of which `free` are free. Returns by how many they fall short."""
        tenant, over = _over(change, self.host, self.host_quota)
        if over:
            raise _quota_exceeded(int(change[tenant]), over, int(self.host_quota[tenant]), "host slots")
        return max(0, physical - (free - int(self.protected_host(change - joint).sum())))

    def bill_joint(self, places: I64) -> I64:
        """How many of these places each tenant is charged for together with others."""
        bill = np.zeros(len(self.caches), np.int64)
        for place in places.tolist() if self._several else ():
            bill[list(self._several.get(place, ()))] += 1
        return bill

    # --- what happens -------------------------------------------------------------------------------------------------

    def take(self, who: I64) -> None:
        """One more block is taken for each of these tenants; see `assign`."""
        self.charged += np.bincount(who, minlength=len(self.caches))

    def assign(self, blocks: I64, who: I64) -> NDArray[np.bool_]:
        """Whether each of these blocks, which are who[i]'s now, holds what another tenant wrote."""
        writer = self.writer[blocks]
        self.tenant_of[blocks] = self.writer[blocks] = who
        crossed: NDArray[np.bool_] = (writer != who) & (writer != NOBODY)
        return crossed

    def excess(self) -> Iterator[tuple[EvictionPolicy, int]]:
        """Caches of tenants that are charged more than they may be, and how much these are to give up."""
        over = np.minimum(self.charged + self.reserved - self.quota, self.evictable())
        for tenant in (over > 0).nonzero()[0].tolist():
            yield self.caches[tenant], int(over[tenant])

    def share(self, blocks: I64, refcount: I32, count: int, tenant: int) -> None:
        """The tenant is about to reference blocks, `count` times each; what was cached has left its cache."""
        other = self.tenant_of[blocks] != tenant
        idle = blocks[other & (refcount == 0)]
        if idle.size:
            for before, mine in self.by_tenant(idle):
                self.caches[before].forget(mine)
                self.charged[before] -= mine.size
            self.charged[tenant] += idle.size
            self.tenant_of[idle] = tenant
        if not self._several and not (other & (refcount > 0)).any():
            return
        for place, references in zip(blocks.tolist(), refcount.tolist(), strict=True):
            holders = self._several.get(place)
            if holders is None:
                if (first := int(self.tenant_of[place])) == tenant:
                    continue
                holders = self._several[place] = {first: references}
                self._join(place, first, 1)
            if tenant not in holders:
                self._charge(place, tenant, 1)
                self._join(place, tenant, 1)
            holders[tenant] = holders.get(tenant, 0) + count

    def release(self, blocks: I64, who: I64) -> None:
        """One reference less to each block (several times named, several less) from these tenants."""
        for place, tenant in zip(blocks.tolist(), who.tolist(), strict=True) if self._several else ():
            holders = self._several.get(place)
            if holders is None:
                continue
            holders[tenant] -= 1
            if holders[tenant]:
                continue
            del holders[tenant]
            self._charge(place, tenant, -1)
            self._join(place, tenant, -1)
            if len(holders) == 1:
                del self._several[place]
                (last,) = holders
                self._join(place, last, -1)
                if place < self.num_blocks and (before := int(self.tenant_of[place])) != last:
                    self.caches[before].forget(np.array([place]))
                self.tenant_of[place] = last

    def lose(self, blocks: I64) -> None:
        """Blocks of the device that nothing references are evicted or free now."""
        if blocks.size:
            self.charged -= np.bincount(self.tenant_of[blocks], minlength=len(self.caches))

    def lose_host(self, places: I64) -> None:
        if places.size:
            self.host -= np.bincount(self.tenant_of[places], minlength=len(self.caches))

    def move(self, old: I64, new: I64) -> None:
        """What is known of old[i] is true of new[i]; all at once."""
        self.tenant_of[new] = self.tenant_of[old]
        self.writer[new] = self.writer[old]
        if self._several:
            moves = zip(old.tolist(), new.tolist(), strict=True)
            moved = [(place, self._several.pop(was)) for was, place in moves if was in self._several]
            self._several.update(moved)

    def cross(self, outs: I64, ins: I64) -> None:
        """Blocks leave the device for the host, and others come from there."""
        bill, joint = self.bill(outs) - self.bill(ins), self.bill_joint(outs) - self.bill_joint(ins)
        self.host += bill
        self.charged -= bill
        self.host_joint += joint
        self.joint -= joint

    def by_tenant(self, blocks: I64) -> Iterator[tuple[int, I64]]:
        """Blocks by the tenant that is charged, each part in the order given."""
        if not blocks.size:
            return
        who = self.tenant_of[blocks]
        if (who == who[0]).all():
            yield int(who[0]), blocks
            return
        for tenant in np.unique(who).tolist():
            yield tenant, blocks[who == tenant]

    def _charge(self, place: int, tenant: int, sign: int) -> None:
        column = self.charged if place < self.num_blocks else self.host
        column[tenant] += sign

    def _join(self, place: int, tenant: int, sign: int) -> None:
        column = self.joint if place < self.num_blocks else self.host_joint
        column[tenant] += sign


class Caches(EvictionPolicy):
    """The caches of all tenants as one EvictionPolicy: whoever has most beyond what is protected gives first."""

    __slots__ = ("_accounts",)

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def __len__(self) -> int:
        return sum(len(cache) for cache in self._accounts.caches)

    def add(self, blocks: I64) -> None:
        for tenant, mine in self._accounts.by_tenant(blocks):
            self._accounts.caches[tenant].add(mine)

    def remove(self, blocks: I64) -> None:
        for tenant, mine in self._accounts.by_tenant(blocks):
            self._accounts.caches[tenant].remove(mine)

    def evict(self, count: int) -> I64:
        accounts = self._accounts
        evictable = accounts.evictable()
        excess = np.maximum(evictable - accounts.protected(), 0)
        give = _level(excess, count)
        give += _level(evictable - give, count - int(give.sum()))
        victims = [cache.evict(n) for cache, n in zip(accounts.caches, give.tolist(), strict=True) if n]
        return np.concatenate(victims) if victims else np.empty(0, np.int64)

    def forget(self, blocks: I64) -> None:
        for tenant, mine in self._accounts.by_tenant(blocks):
            self._accounts.caches[tenant].forget(mine)

    def retain(self, blocks: I64, retention: Retention) -> None:
        for tenant, mine in self._accounts.by_tenant(blocks):
            self._accounts.caches[tenant].retain(mine, retention)

    def advance(self, now: int) -> None:
        self._accounts.now = now
        for cache in self._accounts.caches:
            cache.advance(now)

    def order(self) -> I64:
        """Tenant by tenant."""
        return np.concatenate([cache.order() for cache in self._accounts.caches])


def _level(have: I64, count: int) -> I64:
    """How much each gives of what it has, `count` in all or everything: the largest are brought down to one level."""
    count = min(count, int(have.sum()))
    low, high = 0, int(have.max(initial=0))
    while low < high:  # the lowest level above which there is no more than `count`
        level = (low + high) // 2
        if int(np.maximum(have - level, 0).sum()) <= count:
            high = level
        else:
            low = level + 1
    give: I64 = np.maximum(have - low, 0)
    rest = count - int(give.sum())
    at_level = ((have - give == low) & (have >= low) & (have > give)).nonzero()[0][:rest]
    give[at_level] += 1
    return give


def _over(change: I64, used: I64, quota: I64) -> tuple[int, int]:
    over = (change > 0) * (used + change - quota)
    tenant = int((over > 0).argmax())
    return tenant, max(0, int(over[tenant]))


def _quota_exceeded(needed: int, over: int, quota: int, what: str) -> ResourceExhausted:
    return ResourceExhausted(
        "QUOTA_EXCEEDED",
        f"{needed} more {what} would be {over} above the tenant's quota of {quota}: free some first",
        needed=needed,
        over=over,
        quota=quota,
    )
