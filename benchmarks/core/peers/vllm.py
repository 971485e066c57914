"""vLLM: its KVCacheManager and BlockPool, called as its scheduler calls them.

Run by the peer's own Python, which has no package of this project; prints JSON.
"""

from __future__ import annotations

import itertools
import json
import random
from importlib.metadata import version

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.core.clock import best_median, us
from benchmarks.core.work import BLOCK, CONTEXT, FOUND, NUM_BLOCKS, TOUCHED

VOCABULARY = 1 << 17
SAMPLING = SamplingParams(max_tokens=1 << 20)
draw, serial = random.Random(0), itertools.count()
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)


def manager(*, prefix_cache: bool) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_caching=prefix_cache,
    )


def request(tokens: list[int], *, prefix_cache: bool) -> Request:
    return Request(str(next(serial)), tokens, SAMPLING, None, block_hasher=HASHER if prefix_cache else None)


def tokens(count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


class Decode:
    """Laps of BLOCK steps; the sequences only grow, as the pool has room for all laps."""

    def __init__(self, sequences: int, *, staggered: bool, prefix_cache: bool) -> None:
        self.manager = manager(prefix_cache=prefix_cache)
        self.requests = []
        for i in range(sequences):
            length = CONTEXT + 1 + (i % BLOCK if staggered else 0)
            one = request(tokens(length), prefix_cache=prefix_cache)
            assert self.manager.allocate_slots(one, length) is not None
            one.num_computed_tokens = length
            self.requests.append(one)

    def step(self, new: list[int]) -> None:
        allocate = self.manager.allocate_slots
        for one, token in zip(self.requests, new, strict=True):
            one.append_output_token_ids(token)
            allocate(one, 1)
            one.num_computed_tokens += 1

    def lap(self) -> list[float]:
        new = [tokens(len(self.requests)) for _ in range(BLOCK)]
        return [us(lambda some=some: self.step(some)) for some in new]


def allocate_free() -> float:
    pool = BlockPool(NUM_BLOCKS, enable_caching=False, hash_block_size=BLOCK)
    return best_median(lambda: us(lambda: pool.free_blocks(pool.get_new_blocks(TOUCHED))), 50)


def match() -> float:
    made = manager(prefix_cache=True)
    prompt = torch.tensor(tokens(FOUND * BLOCK + 1), dtype=torch.int32).numpy()
    first = request(prompt.tolist(), prefix_cache=True)
    assert made.allocate_slots(first, prompt.size) is not None

    def find() -> None:
        _, found, *_ = made.get_computed_blocks(request(prompt.tolist(), prefix_cache=True))
        assert found == FOUND * BLOCK

    return best_median(lambda: us(find), 50)


def main() -> None:
    off, on = (Decode(256, staggered=True, prefix_cache=cache) for cache in (False, True))
    together = Decode(256, staggered=False, prefix_cache=True)
    figures = {
        "decode_off": best_median(lambda: sum(off.lap()) / BLOCK, 10),
        "decode_on": best_median(lambda: sum(on.lap()) / BLOCK, 10),
        "seal_all": best_median(lambda: together.lap()[BLOCK - 2], 10),
        "allocate_free": allocate_free(),
        "match": match(),
    }
    notes = {
        "decode_off": "request.append_output_token_ids and allocate_slots of each request; no scheduler around them",
        "decode_on": "the same with SHA-256 of each block that becomes full; indexed before it is computed",
        "allocate_free": "BlockPool alone: refcounts and the order of eviction, no tables",
        "match": "a Request is made of the array (its blocks hashed), then get_computed_blocks",
        "fork": "has none any more",
        "swap": "has none any more",
    }
    print(json.dumps({"version": version("vllm"), "figures": figures, "notes": notes}))


main()
