"""Admission: whether new sequences get their blocks now, may get them later, or never will.

Some blocks, the watermark, are kept back from those who come for those who are here: a running sequence that finds none
left must be preempted. An idle pool keeps nothing back: there everything is let in that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from block_manager_svc.core.errors import OutOfBlocks, ResourceExhausted
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.step import I64


class Verdict(IntEnum):
    OK = 1
    LATER = 2  # when others have given back what falls short
    NEVER = 3  # the pool is too small


@dataclass(frozen=True, slots=True)
class Admission:
    verdict: Verdict
    cached: int  # tokens whose K/V are there already
    needed: int  # blocks to take: new ones, and those that are found and idle, or charged to others only
    shortfall: int  # blocks that are missing: now for LATER, ever for NEVER


def judge(
    pool: BlockPool, tenant: int, found: I64, *, new: int, cached: int, watermark: int, promised: int
) -> Admission:
    """Of a tenant's sequences that hold the distinct blocks `found`, and `new` ones, once they are here.

    promised: blocks of a reservation that they may draw from.
    """
    total, needed = new + found.size, new + pool.to_take(found, tenant)
    most = pool.most(tenant)
    if total > most:
        return Admission(Verdict.NEVER, cached, needed, total - most)
    short = _shortfall(pool, tenant, found, new, needed, watermark if pool.device.referenced else 0, promised)
    return Admission(Verdict.LATER if short else Verdict.OK, cached, needed, short)


def _shortfall(pool: BlockPool, tenant: int, found: I64, new: int, needed: int, watermark: int, promised: int) -> int:
    accounts = pool.accounts
    if accounts is None or tenant >= len(accounts.caches):
        return max(0, needed - (pool.unpromised() + promised - watermark))
    drawn = min(promised, new)
    change = pool.change(found, tenant)
    change[tenant] += new - drawn
    physical = new - drawn + int(np.count_nonzero(pool.is_evictable(found))) + watermark
    short = accounts.shortfall(change, pool.join(found, tenant), physical, pool.available())
    return max(short, accounts.over_quota(change)[1])


def refusal(pool: BlockPool, tenant: int, admission: Admission) -> ResourceExhausted:
    """Of an admission that is not OK."""
    if admission.verdict == Verdict.LATER:
        return OutOfBlocks(admission.needed, admission.needed - admission.shortfall)
    most = pool.most(tenant)
    return ResourceExhausted(
        "NEVER_FITS",
        f"{most + admission.shortfall} blocks at once, the pool gives {most} at most: ask for less",
        needed=most + admission.shortfall,
        limit=most,
    )
