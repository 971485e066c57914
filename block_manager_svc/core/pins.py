"""Pins: a prefix that stays findable until a moment, whoever references it.

A pin is no reference: it holds no block in a table and never causes a copy. A pinned block that nothing references is
cached and in no order of eviction. One that its only holder writes again (after a truncate) leaves the index, and its
pins with it; so a pin remembers each block's node, which is never used for other content.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from block_manager_svc.core.errors import NotFound
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.step import I64


class Pins:
    """Pins by id. Ids are never used again."""

    __slots__ = ("_due", "_ids", "_nodes")

    def __init__(self) -> None:
        self._ids = count(1)
        self._nodes: dict[int, list[tuple[int, int]]] = {}  # pin -> (block, its node), the prefix's last block first
        self._due: list[tuple[int, int]] = []  # a heap of (until, pin), with those that are gone

    def add(self, pool: BlockPool, blocks: I64, until: int) -> int:
        """Pins findable blocks, given in logical order."""
        pin = next(self._ids)
        self._nodes[pin] = [(block, pool.index.node(block)) for block in blocks[::-1].tolist()]
        heapq.heappush(self._due, (until, pin))
        pool.pin(blocks)
        return pin

    def check(self, pins: list[int]) -> None:
        """That all of these are held, and distinct. NotFound PIN_NOT_FOUND as `remove`."""
        seen: set[int] = set()
        for pin in pins:
            if pin not in self._nodes or pin in seen:
                raise _not_held(pin)
            seen.add(pin)

    def remove(self, pool: BlockPool, pin: int) -> None:
        """NotFound PIN_NOT_FOUND: it was removed, its time is over, or it never was."""
        if pin not in self._nodes:
            raise _not_held(pin)
        pool.unpin(self._held(pool, self._nodes.pop(pin)))

    def end(self, pool: BlockPool, now: int) -> None:
        """Removes the pins whose time is over, the earliest first."""
        while self._due and self._due[0][0] <= now:
            _, pin = heapq.heappop(self._due)
            if pin in self._nodes:
                self.remove(pool, pin)

    def counts(self, pool: BlockPool) -> I64:
        """How many pins hold each block, for audits."""
        held = [self._held(pool, nodes) for nodes in self._nodes.values()]
        return np.bincount(np.concatenate(held) if held else np.empty(0, np.int64), minlength=pool.num_blocks)

    def _held(self, pool: BlockPool, nodes: list[tuple[int, int]]) -> I64:
        return np.array([block for block, node in nodes if pool.index.node(block) == node], np.int64)


def _not_held(pin: int) -> NotFound:
    return NotFound("PIN_NOT_FOUND", f"pin {pin} is not held: its time is over, or it never was", pin=pin)
