"""What the page table's books weigh: `python -m benchmarks.core.memory`, a process of its own, prints JSON.

Counted by tracemalloc, to which numpy reports its arrays too; so the requested bytes, without what malloc adds.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from benchmarks.core.ours import filled
from benchmarks.core.work import BLOCK, NUM_BLOCKS
from block_manager_svc.core import PageTable

LENGTH = 32 * BLOCK  # of the sequences that fill the pool; the last block of each is full too
T = TypeVar("T")
# What is asked of each figure, in bytes.
TARGETS = {"block": 64, "block with tokens and index": 200, "table entry": 8}


def measure() -> dict[str, float]:
    """Bytes. `block with tokens and index`: cached ones. `… of a sequence`: it has its tokens a second time."""
    tracemalloc.start()
    empty, table = _traced(lambda: PageTable(NUM_BLOCKS, BLOCK))
    fit = (NUM_BLOCKS - 1) // (LENGTH // BLOCK)

    def fill() -> None:
        ids = filled(table, [LENGTH] * fit)
        table.commit(ids, np.full(fit, LENGTH))

    full, _ = _traced(fill)
    blocks = fit * LENGTH // BLOCK
    s = table._sequences  # no command says what the arenas weigh
    held = s.tokens.data.nbytes + s.tables.data.nbytes
    tracemalloc.stop()
    return {
        "block": empty / NUM_BLOCKS,
        "block with tokens and index": empty / NUM_BLOCKS + (full - held) / blocks,
        "block with tokens and index, of a sequence": empty / NUM_BLOCKS + full / blocks,
        "table entry": _table_entry(),
    }


def _table_entry() -> float:
    """Of sequences with lengths of all kinds, whose tables grew block by block."""
    table = PageTable(NUM_BLOCKS, BLOCK)
    rng = np.random.default_rng(0)
    ends = rng.integers(1, 2048, 900)
    ids = np.array([table.create(np.zeros(end, np.int32)) for end in ends], np.int64)
    for upto in range(BLOCK, 2048 + BLOCK, BLOCK):
        some = (ends > upto - BLOCK).nonzero()[0]
        if some.size:
            table.extend(ids[some], np.minimum(ends[some], upto))
    return table._sequences.tables.data.nbytes / table.sharing().table_entries


def _traced(make: Callable[[], T]) -> tuple[int, T]:
    """Bytes that are allocated by `make` and kept, and what it returns."""
    before = tracemalloc.get_traced_memory()[0]
    made = make()
    return tracemalloc.get_traced_memory()[0] - before, made


if __name__ == "__main__":
    print(json.dumps(measure()))
