"""A step as the executor receives it, in columns: see StepBody in executor_link.proto."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


class OpKind(IntEnum):
    COPY = 1  # device block src -> device block dst
    ZERO = 2  # device block dst; src is 0
    SWAP_OUT = 3  # device block src -> host slot dst
    SWAP_IN = 4  # host slot src -> device block dst


@dataclass(frozen=True, slots=True)
class BlockOps:
    kind: NDArray[np.uint8]
    src: I32
    dst: I32


@dataclass(frozen=True, slots=True)
class TableDeltas:
    """table[row[i]][first[i] : first[i] + count[i]] = the next count[i] of blocks."""

    row: I32
    first: I32
    count: I32
    blocks: I32


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to compute: `count[i]` tokens of `row[i]` at positions start[i]..; token_ids one row after another."""

    row: I32
    start: I32
    count: I32
    token_ids: I32


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens to sample, from the logits of the last token of batch row number `source[i]`."""

    source: I32  # index into Batch.row
    index: I32  # which of the call's parallel samples
    seed: U64
    temperature: F32  # 0 is greedy
    top_p: F32
    top_k: I32  # 0 keeps all
    logprobs: I32  # -1 none, 0 the token's own, k also the best k


@dataclass(frozen=True, slots=True)
class Step:
    step_id: int
    ops: BlockOps
    deltas: TableDeltas
    batch: Batch
    samples: Samples


@dataclass(frozen=True, slots=True)
class Outputs:
    """token_ids[S]; logprob[number of samples with logprobs >= 0]; top_*: k for each sample with logprobs = k > 0."""

    token_ids: I32
    logprob: F32
    top_token_ids: I32
    top_logprobs: F32


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the device pool, per layer [num_blocks, 2, block_size, num_kv_heads, head_dim] (NHD)."""

    num_blocks: int  # block 0, the null block, included
    num_host_blocks: int
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: str  # "float32", "bfloat16", "float16", "float64"
