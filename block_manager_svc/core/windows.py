"""Windows and sinks: a sequence whose attention never looks back further gives its old blocks up early.

    window 6, sinks 2, blocks of 4; 17 positions are computed, and position 17 is next: it sees 12 ··· 17 and the sinks

    logical block   0           1           2           3           4
    positions       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16
    entry           P0          0           0           P3          P4
                    └sinks┘     └── given up: null ──┘  └── in sight ──┘

A table keeps its logical order: what is given up becomes the null block, so that positions and slots do not shift. Who
comes to a cached prefix takes references to what it will see of it and to nothing else.

Sliding windows: Beltagy, Peters, Cohan: Longformer (2020), section 3.1. Sinks: Xiao, Tian, Chen, Han, Lewis: Efficient
streaming language models with attention sinks (ICLR 2024), section 3.2.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.ragged import ranges
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I64

NULL: Final = 0
_MOST: Final = (1 << 31) - 1


def check_window(window: int, sinks: int) -> None:
    """InvalidArgument WINDOW_OUT_OF_RANGE: not within 0 and 2**31 - 1."""
    if not (0 <= window <= _MOST and 0 <= sinks <= _MOST):
        raise InvalidArgument(
            "WINDOW_OUT_OF_RANGE",
            f"a window of {window} tokens, sinks of {sinks}: each at least 0, at most {_MOST}",
            window=window,
            sinks=sinks,
        )


def set_window(s: Sequences, rows: I64, window: int, sinks: int) -> None:
    """Of new rows. window: positions that each position sees, itself among them; 0: all. sinks: those seen by all."""
    if window:
        s.window[rows], s.sinks[rows] = window, sinks
        s.windowed += rows.size


def in_sight(size: int, window: int, sinks: int, blocks: I64) -> I64:
    """Of the full blocks of a prefix, those that what comes behind still sees; null in the place of the others."""
    if not window:
        return blocks
    first, end = -(-sinks // size), (blocks.size * size + 1 - window) // size
    seen = blocks.copy()
    seen[first : max(first, end)] = NULL
    return seen


def give_up(s: Sequences, pool: BlockPool, size: int, rows: I64, computed: I64) -> I64:
    """Gives up the blocks that no position from computed[i] on sees. Returns the rows whose tables changed."""
    window = s.window[rows]
    first = np.maximum(s.gone[rows], -(-s.sinks[rows] // size))
    end = np.where(window > 0, (computed + 1 - window) // size, 0)
    some = (end > first).nonzero()[0]
    rows, first, end = rows[some], first[some], end[some]
    if not rows.size:
        return rows
    count = end - first
    at = ranges(s.tables.start[rows] + first, count)
    # Tail before head, as `release` has it: a block that is found only behind another goes before that other.
    order = np.lexsort((-at, np.repeat(np.arange(rows.size), count)))
    blocks = s.tables.data[at].astype(np.int64)[order]
    s.tables.data[at] = NULL
    s.gone[rows] = end
    pool.release_repeated(blocks, np.repeat(s.tenant[rows], count))
    return rows


def check_in_sight(s: Sequences, size: int, rows: I64, lengths: I64) -> None:
    """That what sequences see is still there when they go on from lengths[i].

    FailedPrecondition WINDOW_PASSED: some of it was given up.
    """
    least = np.maximum((lengths + 1 - s.window[rows]) // size, -(-s.sinks[rows] // size))
    passed = least < np.minimum(s.gone[rows], (lengths + (size - 1)) // size)
    for i in passed.nonzero()[0].tolist():
        row = int(rows[i])
        sequence, length, enough = int(s.id[row]), int(lengths[i]), int(s.gone[row] * size + s.window[row] - 1)
        raise FailedPrecondition(
            "WINDOW_PASSED",
            f"sequence {sequence} cut to {length} tokens would see blocks that it gave up: at least {enough}, "
            "or create it anew",
            sequence=sequence,
            length=length,
            least=enough,
        )
