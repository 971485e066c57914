"""Folding: a table's block that doubles a canonical one gives way to it.

    A  P1 P2    both have computed the same prompt at once: P2 is indexed, P5 is its double
    B  P4 P5    ─►  B  P1 P2, and P4, P5 are free

What was computed twice may differ in its last bits, and then what B reads of its prefix changes by them: so it is off
unless it is asked for.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.prefix_index import NO_NODE
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I64


def fold(s: Sequences, pool: BlockPool, rows: I64, parents: list[int], paths: list[I64], first: I64) -> I64:
    """Rows have sealed entries first[i] .. of their tables behind node parents[i]; paths[i] is what the index has.

    Takes the canonical block in the place of each double, if it lies on the device. Returns the rows that changed.
    """
    changed: list[int] = []
    doubles: list[int] = []
    who: list[int] = []
    for row, parent, path, start in zip(rows.tolist(), parents, paths, first.tolist(), strict=True):
        entries = s.tables.values(row, start + path.size)[start:]
        folds = ((entries != path) & (path < pool.num_blocks)).nonzero()[0]
        if parent == NO_NODE or not folds.size:
            continue
        tenant = int(s.tenant[row])
        pool.share(path[folds], tenant)
        doubles += entries[folds].tolist()
        who += [tenant] * folds.size
        entries[folds] = path[folds]
        changed.append(row)
    if doubles:
        pool.release_repeated(np.array(doubles, np.int64), np.array(who, np.int64))
    return np.array(changed, np.int64)
