"""What a write needs: the blocks that tables grow by, and copies of the blocks that they share.

    table of A:  P0  P1  P2                     P1 has refcount 2, P2 is A's alone
    positions    |···|·c·|···|··u               A writes [c, u)
                      copy    new
    after:       P0  Q1  P2  Q3                 ops: Copy(P1 -> Q1); P1 loses one reference

A block is copied exactly if its refcount is above 1 when its turn comes, so if all its holders are in a batch, the last
writes in place. A block that is written in place is not findable meanwhile, even if another had sealed it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.ragged import ranges
from block_manager_svc.core.results import Extended
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I64

_NONE = np.empty(0, np.int64)
_NONE_I32 = np.empty(0, np.int32)


class Plan(NamedTuple):
    """What is decided and not done yet. Indices count the sequences of the batch."""

    rows: I64
    blocks: I64  # entries of each table before
    pages: I64  # that the positions up to `upto` need
    new: I64  # blocks that each table grows by
    needed: I64  # new, and copies
    total: int  # sum of needed
    copied: I64  # index of each entry that is shared and copied, in decision order;
    copied_entry: I64  # its logical block,
    copied_block: I64  # and the block there
    rewritten: I64  # sealed blocks that are written in place


def decide(s: Sequences, pool: BlockPool, size: int, rows: I64, computed: I64, upto: I64) -> Plan:
    """The plan that makes positions [computed[i], upto[i]) of row rows[i] writable, in order. Changes nothing.

    size: tokens a block.
    """
    blocks = s.blocks[rows]
    pages = (upto + (size - 1)) // size
    new = pages - blocks
    new *= new > 0
    # Of the entries that exist and are written, only the first can be shared or sealed: those behind it hold nothing
    # that is computed.
    first = computed // size
    at = ((first < blocks) & (computed < upto)).nonzero()[0]
    needed = new
    copied = copied_entry = copied_block = rewritten = _NONE
    if at.size:
        entry = first[at]
        block = s.tables.data[s.tables.start[rows[at]] + entry].astype(np.int64)
        refcount = pool.refcount[block]
        shared = refcount > 1
        sealed = pool.sealed[block]
        if b"\1" in (shared | sealed).tobytes():
            copies = shared & (refcount - _occurrence(block) > 1)
            copied, copied_entry, copied_block = at[copies], entry[copies], block[copies]
            rewritten = block[sealed & ~copies]
            needed = new + np.bincount(copied, minlength=rows.size)
    total = int(np.add.reduce(needed))
    return Plan(rows, blocks, pages, new, needed, total, copied, copied_entry, copied_block, rewritten)


def carry_out(plan: Plan, s: Sequences, pool: BlockPool) -> Extended:
    """Takes the blocks and puts them into the tables. `plan.total` are available; nothing changed since `decide`."""
    if plan.rewritten.size:
        pool.unseal(plan.rewritten)
    grown = plan.new.nonzero()[0]
    if grown.size:
        rows, before, new = plan.rows[grown], plan.blocks[grown], plan.new[grown]
        s.tables.reserve(rows, before, before + new)
        s.blocks[rows] = before + new
    place = _place_with_copies if plan.copied.size else _place
    return place(plan, grown, s, pool)


def _place(plan: Plan, grown: I64, s: Sequences, pool: BlockPool) -> Extended:
    """Gives tables the new blocks at their ends; nothing is copied."""
    if not grown.size:
        return Extended(*[_NONE_I32] * 7)
    rows, count, first = plan.rows[grown], plan.new[grown], plan.blocks[grown]
    at, who = s.tables.start[rows] + first, s.tenant[rows]
    if plan.total > grown.size:  # some grow by several
        at, who = ranges(at, count), np.repeat(who, count)
    blocks, crossed = pool.take(who)
    s.tables.data[at] = taken = blocks.astype(np.int32)
    zeroed = blocks[crossed].astype(np.int32) if crossed is not None else _NONE_I32
    return Extended(
        _NONE_I32,
        _NONE_I32,
        grown.astype(np.int32),
        first.astype(np.int32),
        count.astype(np.int32),
        taken,
        zeroed,
    )


def _place_with_copies(plan: Plan, grown: I64, s: Sequences, pool: BlockPool) -> Extended:
    """As `_place`, and puts copies in the place of shared blocks; a sequence's entries in logical order."""
    at = np.concatenate((plan.copied, np.repeat(grown, plan.new[grown])))
    entry = np.concatenate((plan.copied_entry, ranges(plan.blocks[grown], plan.new[grown])))
    source = np.concatenate((plan.copied_block, np.zeros(at.size - plan.copied.size, np.int64)))
    order = np.lexsort((entry, at))
    at, entry, source = at[order], entry[order], source[order]
    rows = plan.rows[at]
    who = s.tenant[rows]
    taken, crossed = pool.take(who)
    s.tables.data[s.tables.start[rows] + entry] = taken
    is_copy = source > 0
    pool.release_repeated(source[is_copy], who[is_copy])
    pool.counters.copies_on_write += plan.copied.size
    changed, start, entries = np.unique(at, return_index=True, return_counts=True)
    first = entry[start]
    count = entry[start + entries - 1] - first + 1
    return Extended(
        source[is_copy].astype(np.int32),
        taken[is_copy].astype(np.int32),
        changed.astype(np.int32),
        first.astype(np.int32),
        count.astype(np.int32),
        s.tables.gather(plan.rows[changed], first, count),
        # A copy overwrites its block as a whole.
        taken[crossed & ~is_copy].astype(np.int32) if crossed is not None else _NONE_I32,
    )


def _occurrence(values: I64) -> I64:
    """How often each value occurred before it, in order."""
    order = values.argsort(kind="stable")
    ordered = values[order]
    start = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    before = np.empty(values.size, np.int64)
    before[order] = np.arange(values.size) - np.repeat(start, np.diff(start, append=values.size))
    return before
