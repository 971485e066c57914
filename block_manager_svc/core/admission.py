"""Admission: whether new sequences get their blocks now, may get them later, or never will.

Some blocks, the watermark, are kept back from those who come for those who are here: a running sequence that finds none
left must be preempted. An idle pool keeps nothing back: there everything is let in that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from block_manager_svc.core.errors import OutOfBlocks, ResourceExhausted
from block_manager_svc.core.pool import BlockPool


class Verdict(IntEnum):
    OK = 1
    LATER = 2  # when others have given back what falls short
    NEVER = 3  # the pool is too small


@dataclass(frozen=True, slots=True)
class Admission:
    verdict: Verdict
    cached: int  # tokens whose K/V are there already
    needed: int  # blocks to take: new ones, and those that are found and idle
    shortfall: int  # blocks that are missing: now for LATER, ever for NEVER


def judge(pool: BlockPool, *, needed: int, total: int, cached: int, watermark: int, promised: int) -> Admission:
    """Of sequences that hold `total` blocks once they are here, of which `needed` are to be taken.

    promised: blocks of a reservation that they may draw from.
    """
    limit = pool.num_blocks - 1 - pool.withheld
    if total > limit:
        return Admission(Verdict.NEVER, cached, needed, total - limit)
    room = pool.available() + promised
    if pool.device.referenced:
        room -= watermark
    if needed > room:
        return Admission(Verdict.LATER, cached, needed, needed - room)
    return Admission(Verdict.OK, cached, needed, 0)


def refusal(pool: BlockPool, admission: Admission) -> ResourceExhausted:
    """Of an admission that is not OK."""
    if admission.verdict == Verdict.LATER:
        return OutOfBlocks(admission.needed, admission.needed - admission.shortfall)
    limit = pool.num_blocks - 1 - pool.withheld
    return ResourceExhausted(
        "NEVER_FITS",
        f"{limit + admission.shortfall} blocks at once, the pool gives {limit} at most: ask for less",
        needed=limit + admission.shortfall,
        limit=limit,
    )
