"""SGLang: its paged allocator, its table of slots by request, and its radix cache.

Run by the peer's own Python, which has no package of this project; prints JSON.
"""

from __future__ import annotations

import json
from array import array
from importlib.metadata import version

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from benchmarks.core.clock import best_median, us
from benchmarks.core.work import BLOCK, CONTEXT, FOUND, NUM_BLOCKS, TOUCHED

RNG = np.random.default_rng(0)


def pages() -> PagedTokenToKVPoolAllocator:
    made = PagedTokenToKVPoolAllocator(NUM_BLOCKS * BLOCK, BLOCK, torch.float16, "cpu", None, need_sort=False)
    made.use_triton_kernels = False  # whatever else is on this machine, its tensors are the CPU's
    return made


class Decode:
    """Laps of BLOCK steps over `sequences` with staggered lengths; what a lap takes, it gives back."""

    def __init__(self, sequences: int) -> None:
        self.pages = pages()
        self.rows = torch.arange(sequences)
        self.begin = CONTEXT + 1 + self.rows % BLOCK
        self.slots = torch.zeros((sequences, CONTEXT + 4 * BLOCK), dtype=torch.int32)
        for row, length in enumerate(self.begin.tolist()):
            whole = self.pages.alloc(-(-length // BLOCK) * BLOCK)
            self.slots[row, : whole.numel()] = whole.to(torch.int32)
        self.free_pages = self.pages.free_pages
        self.lengths = self.begin.clone()

    def step(self) -> None:
        last = self.slots[self.rows, self.lengths - 1].to(torch.int64)
        self.lengths += 1
        new = self.pages.alloc_decode(self.lengths, self.lengths, last)
        self.slots[self.rows, self.lengths - 1] = new.to(torch.int32)

    def lap(self) -> float:
        self.pages.free_pages = self.free_pages
        self.lengths = self.begin.clone()
        return us(lambda: [self.step() for _ in range(BLOCK)]) / BLOCK


def allocate_free() -> float:
    made = pages()
    return best_median(lambda: us(lambda: made.free_segment(made.alloc(TOUCHED * BLOCK), start_pos=0)), 100)


def match(nodes: int) -> float:
    """A prompt that came into the tree as so many pieces, each a node."""
    cache = RadixCache.create_simulated(page_size=BLOCK)
    prompt = RNG.integers(0, 1 << 17, FOUND * BLOCK + 1)
    for piece in range(1, nodes + 1):
        upto = FOUND * BLOCK * piece // nodes
        key = RadixKey(array("q", prompt[:upto].tobytes()))
        cache.insert(InsertParams(key=key, value=torch.arange(upto)))

    def find() -> None:
        result = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt.tobytes()))))
        assert result.device_prefix_len == FOUND * BLOCK

    return best_median(lambda: us(find), 50)


def main() -> None:
    torch.set_num_threads(1)
    decode = Decode(256)
    figures = {
        "decode_off": best_median(decode.lap, 15),
        "allocate_free": allocate_free(),
        "match": match(1),
    }
    notes = {
        "decode_off": "slots only: the tokens are tracked nowhere in it",
        "decode_on": "indexes when a request ends, not while it decodes",
        "allocate_free": "no refcounts, no tables",
        "match": f"in the tree as one node; as 128 nodes {match(FOUND):,.0f}",
        "fork": "has none",
        "swap": "has none for what is not cached",
    }
    print(json.dumps({"version": version("sglang"), "figures": figures, "notes": notes}))


main()
