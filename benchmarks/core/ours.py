"""The rows of the table, by this project's page table. Everything through its public commands but one:

`allocate_free` takes blocks from the pool below it and gives them back, with their refcounts, as the peers' pools do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.core.clock import best_median, us
from benchmarks.core.work import BLOCK, CHILDREN, CONTEXT, FORKED, FOUND, NUM_BLOCKS, SWAPPED, TOUCHED
from block_manager_svc.core import PageTable
from block_manager_svc.core.eviction import LRU
from block_manager_svc.core.pool import BlockPool

I64 = NDArray[np.int64]
RNG = np.random.default_rng(0)


def tokens(count: int) -> NDArray[np.int32]:
    return RNG.integers(0, 1 << 17, count, dtype=np.int32)


def filled(table: PageTable, lengths: list[int]) -> I64:
    """Sequences of these lengths, different from one another, computed but for the last token."""
    ids = np.array([table.create(tokens(length)) for length in lengths], np.int64)
    upto = np.array(lengths, np.int64)
    table.extend(ids, upto)
    table.commit(ids, upto - 1)
    return ids


class Decode:
    """Laps of BLOCK decode steps: in each step the last token of every sequence is computed, and the next one known."""

    def __init__(
        self,
        sequences: int,
        *,
        context: int = CONTEXT,
        staggered: bool,
        prefix_cache: bool,
        num_blocks: int = NUM_BLOCKS,
        idle: int = 0,
    ) -> None:
        """prefix_cache: off by a reset, behind which nothing that these sequences compute is indexed.

        idle: sequences beside them, of one block each, that no step names.
        """
        self.table = PageTable(num_blocks, BLOCK)
        if idle:
            filled(self.table, [BLOCK] * idle)
        self.begin = np.array([context + 1 + (i % BLOCK if staggered else 0) for i in range(sequences)], np.int64)
        self.ids = filled(self.table, self.begin.tolist())
        if not prefix_cache:
            self.table.reset_cache()

    def rewind(self, way: Callable[[int], None]) -> None:
        """Back to where the laps begin, with other tokens to come; the blocks that the last lap took are given back.

        The first step after that asks of what was cut whether it is shared or sealed; it is no part of the lap.
        """
        self.table.truncate(self.ids, self.begin)
        self.next = [tokens(self.ids.size) for _ in range(1 + BLOCK)]
        self.known = self.begin.copy()
        way(BLOCK)

    def extend(self, step: int) -> None:
        """As the service's own step loop does."""
        self.table.append(self.ids, self.next[step])
        self.known += 1
        self.table.extend(self.ids, self.known)
        self.table.commit(self.ids, self.known)

    def grow(self, step: int) -> None:
        """As an engine that calls StepBatch does."""
        self.table.grow(self.ids, None, self.next[step], None)
        self.known += 1
        self.table.commit(self.ids, self.known)

    def mean(self, way: Callable[[int], None], laps: int = 15) -> float:
        """Of a step, over laps of BLOCK steps: each sequence fills one block in each lap."""

        def lap() -> float:
            self.rewind(way)
            return us(lambda: [way(step) for step in range(BLOCK)]) / BLOCK

        return best_median(lap, laps)

    def sealing(self, way: Callable[[int], None], laps: int = 15) -> float:
        """Of the step that fills a block of every sequence, where their lengths are equal."""

        def lap() -> float:
            self.rewind(way)
            took = [us(lambda step=step: way(step)) for step in range(BLOCK)]
            return took[BLOCK - 3]  # lengths begin at 2 above a whole block

        return best_median(lap, laps)


def allocate_free(num_blocks: int = NUM_BLOCKS, count: int = TOUCHED) -> float:
    pool, who = pool_of(num_blocks), np.zeros(count, np.int64)
    return best_median(lambda: us(lambda: pool.release(pool.take(who)[0], who)), 200)


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, 0, BLOCK, lambda blocks, _: LRU(blocks), zero_crossing=True)


def match() -> float:
    table = PageTable(NUM_BLOCKS, BLOCK)
    prompt = tokens(FOUND * BLOCK + 1)
    first = np.array([table.create(prompt)], np.int64)
    table.extend(first, [prompt.size])
    table.commit(first, [prompt.size])
    made: list[int] = []

    def find() -> None:
        made.append(table.create(prompt))
        assert table.match(made[-1]).blocks == FOUND

    def sample() -> float:
        took = us(find)
        table.free([made.pop()])
        return took

    return best_median(sample, 200)


def fork(count: int) -> float:
    """One child, of `count` that are made at once."""
    table = PageTable(NUM_BLOCKS, BLOCK)
    (parent,) = filled(table, [FORKED * BLOCK + 1]).tolist()
    children: list[I64] = []

    def sample() -> float:
        took = us(lambda: children.append(table.fork(parent, count)))
        table.free(children.pop())
        return took / count

    return best_median(sample, 100)


def swap() -> float:
    table = PageTable(NUM_BLOCKS, BLOCK, num_host=NUM_BLOCKS // 4)
    ids, none = filled(table, [SWAPPED * BLOCK + 1]), np.empty(0, np.int64)

    def both() -> None:
        table.swap(ids, none)
        table.swap(none, ids)

    return best_median(lambda: us(both), 100)


def run() -> dict[str, float]:
    """µs by name of the row; and `grow …` where a decode step is another command's."""
    off, on, together = (
        Decode(256, staggered=staggered, prefix_cache=cache)
        for staggered, cache in ((True, False), (True, True), (False, True))
    )
    many = Decode(4096, context=6 * BLOCK, staggered=True, prefix_cache=False)
    return {
        "decode_off": off.mean(off.extend),
        "decode_on": on.mean(on.extend),
        "seal_all": together.sealing(together.extend),
        "decode_off_4096": many.mean(many.extend, laps=5),
        "grow decode_off": off.mean(off.grow),
        "grow decode_on": on.mean(on.grow),
        "grow seal_all": together.sealing(together.grow),
        "grow decode_off_4096": many.mean(many.grow, laps=5),
        "allocate_free": allocate_free(),
        "match": match(),
        "fork": fork(1),
        "fork_batch": fork(CHILDREN),
        "swap": swap(),
    }
