"""Which sequences say how long their blocks are to stay findable, and when they say it."""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.eviction.retention import Retention
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I64


class Retentions:
    """Costs nothing while no sequence has a retention."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[int, Retention] = {}  # sequence -> what it says

    def begin(self, sequences: I64, retention: Retention | None) -> None:
        if retention:
            self._of.update(dict.fromkeys(sequences.tolist(), retention))

    def fork(self, parent: int, children: I64) -> None:
        self.begin(children, self._of.get(parent))

    def end(self, sequences: I64) -> None:
        if self._of:
            for sequence in sequences.tolist():
                self._of.pop(sequence, None)

    def priority(self, sequence: int) -> int | None:
        """None: it has said nothing."""
        retention = self._of.get(sequence)
        return retention.priority if retention else None

    def apply(self, s: Sequences, pool: BlockPool, rows: I64, first: I64, count: I64) -> None:
        """Rows have just sealed, found or moved entries first[i] .. + count[i] of their tables."""
        if not self._of:
            return
        for row, start, n in zip(rows.tolist(), first.tolist(), count.tolist(), strict=True):
            if retention := self._of.get(int(s.id[row])):
                blocks = s.tables.values(row, start + n)[start:].astype(np.int64)
                pool.cached.retain(blocks[pool.indexed[blocks]], retention)
