"""Blocks that move, and the tables that follow them."""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I64


def entries_of(s: Sequences, rows: I64, count: I64) -> I64:
    """Of the first count[i] entries of each row's table those that are not null, one row after another."""
    if not rows.size:
        return np.empty(0, np.int64)
    entries: I64 = s.tables.gather(rows, np.zeros_like(count), count).astype(np.int64)
    return entries[entries > 0]


def distinct(places: I64) -> I64:
    """Each place once, in the order of first mention."""
    once: I64 = places[np.sort(np.unique(places, return_index=True)[1])]
    return once


def point(s: Sequences, rows: I64, old: I64, new: I64) -> I64:
    """Replaces old[i] by new[i] in the tables of rows. Returns the rows that had any of them."""
    if not old.size:
        return np.empty(0, np.int64)
    order = old.argsort()
    ordered, target = old[order], new[order]
    changed = []
    for row in dict.fromkeys(rows.tolist()):
        table = s.tables.values(row, int(s.blocks[row]))
        at = np.minimum(ordered.searchsorted(table), old.size - 1)
        moved = ordered[at] == table
        if moved.any():
            table[moved] = target[at[moved]]
            changed.append(row)
    return np.array(changed, np.int64)
