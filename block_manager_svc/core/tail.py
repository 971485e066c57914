"""The end of a block table: the slots that it offers, and the entries that it gives back.

    positions   |···computed···|··known··|··lookahead··|
    entries     P0   P1   P2   P3        P4       P5
                └─ may be shared ─┘ └─ the sequence's own, never sealed ─┘

Only the entries that hold computed positions can be shared: a fork takes no others, and a truncate gives back what lies
behind its new end.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.ragged import ranges
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I64


def surplus(s: Sequences, rows: I64, pages: I64) -> I64:
    """Blocks of entries pages[i] and above of each row, last entries first. Changes nothing."""
    count = np.maximum(s.blocks[rows] - pages, 0)
    some = count.nonzero()[0]
    if not some.size:
        return np.empty(0, np.int64)
    # Tail before head: a block that is found only behind another goes before that other.
    return s.tables.gather(rows[some], pages[some], count[some])[::-1].astype(np.int64)


def give_back(s: Sequences, pool: BlockPool, rows: I64, pages: I64, blocks: I64) -> None:
    """Cuts each table to pages[i] entries at most; `blocks` is its `surplus`."""
    if blocks.size:
        who = np.repeat(s.tenant[rows], np.maximum(s.blocks[rows] - pages, 0))[::-1]
        s.blocks[rows] = np.minimum(s.blocks[rows], pages)
        if s.windowed:
            blocks, who = blocks[blocks > 0], who[blocks > 0]
        pool.release_repeated(blocks, who)


def slots(s: Sequences, size: int, rows: I64, first: I64, upto: I64) -> I64:
    """block * size + offset of positions [first[i], upto[i]) of each row, one row after another."""
    count = upto - first
    position = ranges(first, count)
    start = s.tables.start[rows]
    if position is not first:
        start = np.repeat(start, count)
    entry = position // size
    # Of the offset within the block, what lies before the entry is the same in position and slot.
    slot: I64 = position + (s.tables.data[start + entry] - entry) * size
    return slot


def check_slots(slots: int, most: int | None) -> None:
    """That an answer may name so many slots; most: None is no bound."""
    if most is not None and slots > most:
        raise InvalidArgument(
            "TOO_MANY_SLOTS",
            f"the answer would name {slots} slots, {most} more fit in: ask in parts",
            slots=slots,
            limit=most,
        )
