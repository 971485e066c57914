"""Pins: a prefix that stays findable until a moment, whoever references it.

A pin is no reference: it holds no block in a table and never causes a copy. A pinned block that nothing references is
cached and in no order of eviction. One that its only holder writes again (after a truncate) leaves the index, and its
pins with it; so a pin remembers the serial of each block's node, which is never used for other content.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.errors import NotFound
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.step import I64
from block_manager_svc.core.terms import Terms


class Pins:
    """Pins by id."""

    __slots__ = ("_terms",)

    def __init__(self) -> None:
        self._terms: Terms[list[tuple[int, int]]] = Terms(_not_found)  # (block, serial), the prefix's last block first

    def add(self, pool: BlockPool, blocks: I64, until: int, owner: int) -> int:
        """Pins findable blocks, given in logical order."""
        serials = [(block, pool.index.serial(pool.index.node(block))) for block in blocks[::-1].tolist()]
        pool.pin(blocks)
        return self._terms.add(serials, until, owner)

    def remove(self, pool: BlockPool, pins: list[int], owner: int) -> None:
        """NotFound PIN_NOT_FOUND: one was removed, its time is over, it is another owner's, or it never was."""
        self._terms.check(pins, owner)
        for pin in pins:
            self._end(pool, pin, self._terms.get(pin, owner))

    def end(self, pool: BlockPool, now: int) -> None:
        """Removes the pins whose time is over, the earliest first."""
        for pin, held in self._terms.over(now):
            self._end(pool, pin, held)

    def move(self, old: I64, new: I64) -> None:
        """What lay in old[i] lies in new[i] from now on. Costs time proportional to all that is pinned."""
        to = dict(zip(old.tolist(), new.tolist(), strict=True))
        for held in self._terms.values():
            held[:] = [(to.get(block, block), serial) for block, serial in held]

    def counts(self, pool: BlockPool) -> I64:
        """How many pins hold each block, for audits."""
        pinned = [self._blocks(pool, held) for held in self._terms.values()]
        return np.bincount(np.concatenate(pinned) if pinned else np.empty(0, np.int64), minlength=pool.num_blocks)

    def _end(self, pool: BlockPool, pin: int, held: list[tuple[int, int]]) -> None:
        self._terms.remove(pin)
        pool.unpin(self._blocks(pool, held))

    def _blocks(self, pool: BlockPool, held: list[tuple[int, int]]) -> I64:
        index = pool.index
        return np.array([block for block, serial in held if index.serial(index.node(block)) == serial], np.int64)


def _not_found(pin: int) -> NotFound:
    return NotFound("PIN_NOT_FOUND", f"pin {pin} is not held: its time is over, or it never was", pin=pin)
