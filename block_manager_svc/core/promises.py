"""What is promised ahead of time: pinned prefixes, reserved blocks, the limit of the pool. `PageTable` inherits it."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from block_manager_svc.core.arguments import Integers, integers, token_ids
from block_manager_svc.core.chain import find
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfBlocks
from block_manager_svc.core.extra_keys import ExtraKeys, by_place
from block_manager_svc.core.pins import Pins
from block_manager_svc.core.prefix_index import NO_NODE
from block_manager_svc.core.reads import Reads
from block_manager_svc.core.results import Pinned
from block_manager_svc.core.step import I64
from block_manager_svc.core.terms import Terms

MAX_TENANT: Final = (1 << 16) - 1


class Reserved(NamedTuple):
    """What a reservation still promises."""

    blocks: int
    tenant: int


class Promises(Reads):
    """Raises as PageTable's commands do. Time is what `advance` says, in ms."""

    __slots__ = ("_pins", "_reservations", "now")

    _pins: Pins
    _reservations: Terms[Reserved]
    now: int

    def advance(self, now: int) -> None:
        """The clock, ms: ends the priorities of blocks, pins and reservations whose time is over.

        InvalidArgument CLOCK_BACKWARDS: it only goes forward.
        """
        if now < self.now:
            raise InvalidArgument(
                "CLOCK_BACKWARDS", f"the clock says {now} ms, it said {self.now} before", now=now, before=self.now
            )
        self.now = now
        self._pool.cached.advance(now)
        self._pins.end(self._pool, now)
        for reservation, _ in self._reservations.over(now):
            self._give_up(reservation)
        self.revision += 1

    def pin(
        self,
        tokens: Integers,
        until: int,
        namespace: bytes = b"",
        *,
        owner: int = 0,
        extra: ExtraKeys | None = None,
    ) -> Pinned:
        """Keeps what the index finds of `tokens` (int32; whole blocks, the last included) until the clock says `until`.

        Pinned blocks are not evicted: they stay CACHED when nothing references them, and `available` is without them.
        InvalidArgument UNTIL_PASSED: that moment is over. NotFound PREFIX_NOT_CACHED: not one whole block is found.
        """
        content = token_ids(tokens)
        keyed = by_place(extra, np.array([0]), np.array([content.size]))
        self._check_until(until)
        whole = content[: content.size // self.block_size * self.block_size]
        _, blocks = find(self._pool, self._pool.index.root(namespace), whole, keyed.get(0, ()))
        if not blocks.size:
            raise NotFound(
                "PREFIX_NOT_CACHED",
                f"no block of these {content.size} tokens is found: compute them first",
                tokens=content.size,
            )
        self._check_pinned(blocks)
        pin = self._pins.add(self._pool, blocks, until, owner)
        self.revision += 1
        return Pinned(pin, blocks.size * self.block_size)

    def unpin(self, pins: Integers, *, owner: int = 0) -> None:
        """Ends distinct pins before their time, or none of them.

        NotFound PIN_NOT_FOUND: one has ended, is another owner's, or never was.
        """
        self._pins.remove(self._pool, integers(pins, "pins").tolist(), owner)
        self.revision += 1

    def reserve(self, blocks: int, until: int, *, owner: int = 0, tenant: int = 0) -> int:
        """Keeps `blocks` free until the clock says `until`, for who names the reservation that is returned.

        The tenant is charged for them. OutOfBlocks; ResourceExhausted QUOTA_EXCEEDED; InvalidArgument UNTIL_PASSED,
        COUNT_OUT_OF_RANGE: less than 1.
        """
        self._check_until(until)
        if blocks < 1:
            raise InvalidArgument("COUNT_OUT_OF_RANGE", f"{blocks} blocks to reserve: at least 1", count=blocks)
        pool = self._pool
        self._check_tenant(tenant)
        if pool.accounts:
            change = np.zeros(len(pool.accounts.caches), np.int64)
            change[tenant] = blocks
            pool.accounts.check(change, blocks, pool.available(), blocks)
            pool.accounts.reserved[tenant] += blocks
            pool.obey_quotas()
        elif blocks > pool.available():
            raise OutOfBlocks(blocks, pool.available())
        pool.keep(pool.reserved + blocks, pool.withheld)
        self.revision += 1
        return self._reservations.add(Reserved(blocks, tenant), until, owner)

    def release(self, reservations: Integers, *, owner: int = 0) -> None:
        """Ends distinct reservations before their time, or none of them.

        NotFound RESERVATION_NOT_FOUND: one has ended, is used up, is another owner's, or never was.
        """
        ids = integers(reservations, "reservations").tolist()
        self._reservations.check(ids, owner)
        for reservation in ids:
            self._give_up(reservation)
        self.revision += 1

    def resize(self, limit: int) -> int:
        """At most `limit` blocks are in use, cached or reserved from now on. Returns how many were evicted for it.

        InvalidArgument LIMIT_OUT_OF_RANGE: below 1, or more than there are. FailedPrecondition RESIZE_BELOW_USE: more
        are referenced, pinned, reserved or guaranteed to tenants.
        """
        pool = self._pool
        most = self.num_blocks - 1
        if not 1 <= limit <= most:
            raise InvalidArgument(
                "LIMIT_OUT_OF_RANGE", f"a limit of {limit} blocks: at least 1, at most {most}", limit=limit, most=most
            )
        used = most - pool.withheld - pool.unpromised()
        if limit < used:
            raise FailedPrecondition(
                "RESIZE_BELOW_USE",
                f"a limit of {limit} blocks, {used} are referenced, pinned, reserved or guaranteed to tenants: free "
                f"{used - limit} first",
                limit=limit,
                used=used,
            )
        evicted = pool.counters.evicted_blocks
        pool.keep(pool.reserved, most - limit)
        self.revision += 1
        return pool.counters.evicted_blocks - evicted

    def reset_cache(self) -> int:
        """Nothing that is in the index now is found again, pinned or not. Returns how many cached blocks became free.

        Blocks in use stay with their holders, and what these go on to compute is not found either: only prompts that
        are computed from their beginning after this are.
        """
        freed = self._pool.forget_all()
        s = self._sequences
        s.node[s.computed > 0] = NO_NODE
        self.revision += 1
        return freed

    def _check_until(self, until: int) -> None:
        if until <= self.now:
            raise InvalidArgument(
                "UNTIL_PASSED", f"until {until} ms, the clock says {self.now}", until=until, now=self.now
            )

    def set_quota(
        self,
        tenant: int,
        *,
        floor: int = 0,
        quota: int | None = None,
        host_floor: int = 0,
        host_quota: int | None = None,
    ) -> None:
        """What a tenant is guaranteed, and the most that it may be charged for (None: no bound); device, and host.

        Above its quota a tenant gives up what it has in the cache at once; what it references beyond stays until it is
        freed, and nothing comes to it before. InvalidArgument QUOTA_OUT_OF_RANGE: negative, or a floor above its
        quota. FailedPrecondition FLOORS_EXCEED_POOL: what all use and what is guaranteed beyond does not fit.
        """
        self._check_tenant(tenant)
        for low, high in ((floor, quota), (host_floor, host_quota)):
            if low < 0 or (high is not None and high < low):
                raise InvalidArgument(
                    "QUOTA_OUT_OF_RANGE",
                    f"a floor of {low} and a quota of {high} blocks: 0 <= floor <= quota",
                    floor=low,
                    quota=high,
                )
        pool = self._pool
        accounts = pool.open_accounts(tenant)
        before = accounts.quota_of(tenant)
        accounts.set_quota(tenant, floor, quota, host_floor, host_quota)
        for guaranteed, free, what in (
            (int(accounts.protected().sum()), pool.available(), "blocks"),
            (int(accounts.protected_host().sum()), pool.host_room(), "host slots"),
        ):
            if guaranteed > free:
                accounts.set_quota(tenant, *before)
                raise FailedPrecondition(
                    "FLOORS_EXCEED_POOL",
                    f"with a floor of {floor} blocks and {host_floor} host slots all tenants together are guaranteed "
                    f"{guaranteed} {what} more than they use, {free} are left: lower floors, or free some first",
                    guaranteed=guaranteed,
                    available=free,
                )
        pool.obey_quotas()
        self.revision += 1

    def _check_tenant(self, tenant: int) -> None:
        """Tenants that are new get an account; without any but 0 there are no accounts."""
        if not 0 <= tenant <= MAX_TENANT:
            raise InvalidArgument(
                "TENANT_OUT_OF_RANGE", f"tenant {tenant}: at least 0, at most {MAX_TENANT}", tenant=tenant
            )
        if tenant or self._pool.accounts:
            self._pool.open_accounts(tenant)

    def _check_pinned(self, blocks: I64) -> None:
        """That others are still guaranteed what they are when blocks that are found cannot be evicted any more."""
        pool = self._pool
        if pool.accounts:
            idle = blocks[(pool.refcount[blocks] == 0) & (pool.pinned[blocks] == 0)]
            pool.accounts.check(pool.accounts.bill(idle), idle.size, pool.available(), idle.size)

    def _promised(self, reservation: int, owner: int, *tenants: int) -> int:
        """Blocks that a reservation still promises to these tenants; 0 is none."""
        if not reservation:
            return 0
        reserved = self._reservations.get(reservation, owner)
        if set(tenants) - {reserved.tenant}:
            raise _not_found(reservation)
        return reserved.blocks

    def _draw(self, reservation: int, promised: int, needed: int) -> None:
        """`needed` blocks are about to be taken, from the reservation as far as it goes."""
        if promised > needed:
            reserved = self._reservations.held(reservation)
            self._reservations.replace(reservation, reserved._replace(blocks=promised - needed))
            self._unreserve(needed, reserved.tenant)
        elif promised:
            self._give_up(reservation)

    def _give_up(self, reservation: int) -> None:
        reserved = self._reservations.held(reservation)
        self._reservations.remove(reservation)
        self._unreserve(reserved.blocks, reserved.tenant)

    def _unreserve(self, blocks: int, tenant: int) -> None:
        self._pool.reserved -= blocks
        if self._pool.accounts:
            self._pool.accounts.reserved[tenant] -= blocks


def reservations() -> Terms[Reserved]:
    """None yet, by id."""
    return Terms(_not_found)


def _not_found(reservation: int) -> NotFound:
    return NotFound(
        "RESERVATION_NOT_FOUND",
        f"reservation {reservation} is not held: its time is over, it is used up, or it never was",
        reservation=reservation,
    )
