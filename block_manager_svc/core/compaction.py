"""Compaction: the highest blocks in use move into the lowest free ones, through ordinary copies.

    before   1 · 3 · · 6 7      moves 7 -> 2, 6 -> 4      after   1 2 3 4 · · ·

A block moves for all its holders or not at all, so it must be theirs only who may be moved: an engine that writes K/V
itself knows its slots. What is cached does not move: it makes room when room is needed.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.moves import entries_of, point
from block_manager_svc.core.pins import Pins
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I64, BlockOps, OpKind


def compact(s: Sequences, pool: BlockPool, pins: Pins, rows: I64, most: int) -> tuple[BlockOps, I64]:
    """Moves at most `most` blocks that no others than `rows` (on the device) hold.

    Returns the copies in decision order, and the rows whose tables changed. Costs time proportional to these tables.
    """
    blocks, named = np.unique(entries_of(s, rows, s.blocks[rows]), return_counts=True)
    candidates = blocks[named == pool.refcount[blocks]][::-1][:most]
    lowest = pool.allocator.allocate(min(candidates.size, len(pool.allocator)))
    worth = int(np.count_nonzero(candidates[: lowest.size] > lowest))  # one falls, the other rises
    old, new = candidates[:worth], lowest[:worth]
    pool.allocator.free(np.concatenate((lowest[worth:], old)))
    pool.move(old, new)
    if pool.has_pins:
        pool.move_pins(old, new)
        pins.move(old, new)
    ops = BlockOps(np.full(worth, OpKind.COPY, np.uint8), old.astype(np.int32), new.astype(np.int32))
    return ops, point(s, rows, old, new)
