"""What the loop does to columns: share a budget, pick rows, join deltas."""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.step import I32, I64, TableDeltas


def share(wanted: I32, budget: int) -> I32:
    """Tokens for each, at most what it wants, `budget` in all: single tokens first, then in order."""
    total = int(wanted.sum())
    if total <= budget:
        return wanted
    order = np.argsort(wanted > 1, kind="stable")
    before = np.cumsum(wanted[order]) - wanted[order]
    share = np.empty_like(wanted)
    share[order] = np.clip(budget - before, 0, wanted[order])
    return share


def without_idle(rows: I32, sequences: I64, chunk: I32) -> tuple[I32, I64, I32]:
    busy = chunk > 0
    return (rows, sequences, chunk) if busy.all() else (rows[busy], sequences[busy], chunk[busy])


def keep(deltas: TableDeltas, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> TableDeltas:
    blocks = deltas.blocks[np.repeat(mask, deltas.count)]
    return TableDeltas(deltas.row[mask], deltas.first[mask], deltas.count[mask], blocks)


def join(a: TableDeltas, b: TableDeltas) -> TableDeltas:
    return TableDeltas(
        np.concatenate([a.row, b.row]),
        np.concatenate([a.first, b.first]),
        np.concatenate([a.count, b.count]),
        np.concatenate([a.blocks, b.blocks]),
    )
