"""The accounts of tenants again, counted afresh from the plain model whenever somebody asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_model import Model

INFINITE = 1 << 60


@dataclass
class ModelQuota:
    floor: int = 0
    quota: int = INFINITE
    host_floor: int = 0
    host_quota: int = INFINITE


class ModelAccounts:
    """There from the first tenant above 0, or the first quota, on."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.quotas: list[ModelQuota] = []
        self.pending_joint: Counter[int] = Counter()  # of these, joint; what comes from the host, or leaves for it
        self.pending: Counter[int] = Counter()  # charged already for blocks that are still to be taken

    def admit(self, tenant: int) -> None:
        self.quotas += [ModelQuota() for _ in range(tenant + 1 - len(self.quotas))]

    def tenants(self) -> range:
        return range(len(self.quotas))

    def holders(self, place: int) -> set[int]:
        return {s.tenant for s in self.model.sequences.values() if place in s.table}

    def is_charged(self, place: int, tenant: int) -> bool:
        holders = self.holders(place)
        return tenant in holders if holders else self.model.owner.get(place) == tenant

    def charged(self, tenant: int) -> int:
        m = self.model
        places = {p for s in m.sequences.values() for p in s.held if p < m.num_blocks} | set(m.node_of)
        return self.pending[tenant] + sum(self.is_charged(p, tenant) for p in places if p < m.num_blocks)

    def host(self, tenant: int) -> int:
        places = {p for s in self.model.sequences.values() for p in s.held if p >= self.model.num_blocks}
        return sum(self.is_charged(p, tenant) for p in places)

    def evictable(self, tenant: int) -> int:
        return sum(self.model.owner[block] == tenant for block in self.model.cached)

    def reserved(self, tenant: int) -> int:
        held = self.model.reservations.items()
        return sum(blocks for i, (_, blocks) in held if self.model.reservation_of[i] == tenant)

    def used(self, tenant: int) -> int:
        return self.charged(tenant) - self.evictable(tenant) + self.reserved(tenant)

    def joint(self, tenant: int, on_host: bool) -> int:
        """Places that the tenant is charged for together with others."""
        m = self.model
        places = {p for s in m.sequences.values() for p in s.held if (p >= m.num_blocks) == on_host}
        return self.pending_joint[tenant] * (-1 if on_host else 1) + sum(
            tenant in self.holders(p) and len(self.holders(p)) > 1 for p in places
        )

    def joins(self, found: list[int], tenant: int) -> Counter[int]:
        """By tenant, blocks that become joint when the tenant takes what is found."""
        joins: Counter[int] = Counter()
        for holders in map(self.holders, set(found)):
            if holders and tenant not in holders:
                joins[tenant] += 1
                if len(holders) == 1:
                    joins.update(holders)
        return joins

    def change(self, found: list[int], tenant: int) -> Counter[int]:
        """By tenant, blocks that are used more when one takes what is found."""
        change = Counter({tenant: self.model.new_for(found, tenant)})
        for block in set(found):  # pinned and idle, it was used by the one who left it
            if not self.holders(block) and block not in self.model.cached and self.model.owner[block] != tenant:
                change[self.model.owner[block]] -= 1
        return change

    def protected(self, change: Counter[int] | None = None) -> list[int]:
        """change: by tenant, what is used more and is not joint."""
        change = change or Counter()
        return [max(0, self.quotas[t].floor - self.used(t) + self.joint(t, False) - change[t]) for t in self.tenants()]

    def fits(self, change: Counter[int], physical: int, joint: Counter[int] | None = None) -> bool:
        if any(n > 0 and self.used(t) + n > self.quotas[t].quota for t, n in change.items()):
            return False
        alone = Counter(change)
        alone.subtract(joint or Counter())
        return physical <= self.model.available() - sum(self.protected(alone))

    def fits_host(self, change: Counter[int], joint: Counter[int], physical: int, free: int) -> bool:
        if any(n > 0 and self.host(t) + n > self.quotas[t].host_quota for t, n in change.items()):
            return False
        held = [self.host(t) + change[t] - self.joint(t, True) - joint[t] for t in self.tenants()]
        return physical <= free - sum(max(0, q.host_floor - n) for q, n in zip(self.quotas, held, strict=True))

    def short(self, change: Counter[int], joint: Counter[int], physical: int) -> int:
        over = [self.used(t) + n - self.quotas[t].quota for t, n in change.items() if n > 0]
        alone = Counter(change)
        alone.subtract(joint)
        return max(0, physical - self.model.available() + sum(self.protected(alone)), *over)

    def room(self, tenant: int) -> int:
        protected = self.protected()
        others = sum(protected) - protected[tenant]
        return max(0, min(self.model.available() - others, self.quotas[tenant].quota - self.used(tenant)))

    def most(self, tenant: int, limit: int) -> int:
        others = sum(self.quotas[t].floor for t in self.tenants() if t != tenant)
        return min(limit - others, self.quotas[tenant].quota)

    def obey(self) -> None:
        for tenant in self.tenants():
            over = self.charged(tenant) + self.reserved(tenant) - self.quotas[tenant].quota
            for _ in range(min(over, self.evictable(tenant))):
                self.model.evict(self.model.victim(tenant))

    def who_gives(self) -> int:
        """Whose cache is beyond what is protected by most; of equals the first."""
        excess = [max(0, self.evictable(t) - p) for t, p in zip(self.tenants(), self.protected(), strict=True)]
        have = excess if any(excess) else [self.evictable(t) for t in self.tenants()]
        return have.index(max(have))
