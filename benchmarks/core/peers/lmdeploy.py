"""LMDeploy: its block manager and block trie, called as its scheduler calls them.

Run by the peer's own Python, which has no package of this project; prints JSON.
"""

from __future__ import annotations

import json
from importlib.metadata import version

import numpy as np
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.messages import SchedulerSequence, SequenceMeta, UpdateTokenMode
from lmdeploy.pytorch.paging import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from benchmarks.core.clock import best_median, us
from benchmarks.core.work import BLOCK, CONTEXT, FOUND, NUM_BLOCKS, SWAPPED, TOUCHED

RNG = np.random.default_rng(0)


def scheduler(*, prefix_cache: bool) -> Scheduler:
    cache = CacheConfig(
        max_batches=512,
        block_size=BLOCK,
        num_cpu_blocks=NUM_BLOCKS // 4,
        num_gpu_blocks=NUM_BLOCKS,
        enable_prefix_caching=prefix_cache,
    )
    limits = SchedulerConfig(max_batches=512, max_session_len=1 << 20, max_request_output_len=1 << 20)
    return Scheduler(limits, cache, seq_meta=SequenceMeta(BLOCK, strategy=ARSequenceStrategy()))


def tokens(count: int) -> np.ndarray:
    return RNG.integers(0, 1 << 17, count)


class Decode:
    """Laps of BLOCK steps; the sequences only grow, as the pool has room for all laps."""

    def __init__(self, sequences: int, *, staggered: bool, prefix_cache: bool) -> None:
        self.scheduler = scheduler(prefix_cache=prefix_cache)
        session = self.scheduler.add_session(0)
        self.sequences = []
        for i in range(sequences):
            one = session.add_sequence(tokens(CONTEXT + 1 + (i % BLOCK if staggered else 0)))
            self.allocate(one)
            self.sequences.append(one)

    def allocate(self, one: SchedulerSequence) -> None:
        self.scheduler.block_manager.allocate(one)
        self.scheduler.block_trie.allocate(one)

    def step(self, new: list[np.ndarray]) -> None:
        allocate, trie = self.scheduler.block_manager.allocate, self.scheduler.block_trie.allocate
        for one, token in zip(self.sequences, new, strict=True):
            one.update_token_ids(token, mode=UpdateTokenMode.DECODE)
            allocate(one)
            trie(one)

    def lap(self) -> list[float]:
        laps = [list(tokens(len(self.sequences)).reshape(-1, 1)) for _ in range(BLOCK)]
        return [us(lambda new=new: self.step(new)) for new in laps]


def allocate_free() -> float:
    allocator = scheduler(prefix_cache=False).block_manager.allocator
    return best_median(lambda: us(lambda: allocator.free(allocator.allocate(TOUCHED))), 200)


def match() -> float:
    made = scheduler(prefix_cache=True)
    session, prompt = made.add_session(0), tokens(FOUND * BLOCK + 1)
    first = session.add_sequence(prompt)
    made.block_manager.allocate(first)
    made.block_trie.allocate(first)
    found: list[SchedulerSequence] = []

    def find() -> None:
        found.append(session.add_sequence(prompt))
        made.block_trie.match(found[-1])
        assert found[-1].num_blocks == FOUND

    def sample() -> float:
        took = us(find)
        made.block_manager.free(found[-1])
        session.remove_sequence(found.pop())
        return took

    return best_median(sample, 50)


def swap() -> float:
    made = scheduler(prefix_cache=False)
    one = made.add_session(0).add_sequence(tokens(SWAPPED * BLOCK))
    made.block_manager.allocate(one)

    def both() -> None:
        assert made.block_manager.try_swap_out(one)[0]
        assert made.block_manager.try_swap_in(one)[0]

    return best_median(lambda: us(both), 100)


def main() -> None:
    off, on = (Decode(256, staggered=True, prefix_cache=cache) for cache in (False, True))
    together = Decode(256, staggered=False, prefix_cache=True)
    figures = {
        "decode_off": best_median(lambda: sum(off.lap()) / BLOCK, 10),
        "decode_on": best_median(lambda: sum(on.lap()) / BLOCK, 10),
        "seal_all": best_median(lambda: together.lap()[BLOCK - 2], 10),
        "allocate_free": allocate_free(),
        "match": match(),
        "swap": swap(),
    }
    notes = {
        "decode_off": "update_token_ids and allocate of each sequence; no scheduler around them",
        "decode_on": "the same, and the trie's allocate",
        "allocate_free": "the logical allocator: refcounts and times of access, no tables",
        "match": "a sequence is made of the array, then the trie's match, which takes the blocks found",
        "fork": "has none",
        "swap": "refuses a sequence that shares a block",
    }
    print(json.dumps({"version": version("lmdeploy"), "figures": figures, "notes": notes}))


main()
