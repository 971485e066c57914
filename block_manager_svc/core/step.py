"""A step as the block manager decides it: block ops, table deltas, rows to compute, tokens to sample.

Plain columns; `rpc/convert.py` turns them into the wire form of docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


class OpKind(IntEnum):
    """Kinds of block op, numbered as on the wire."""

    COPY = 1  # device block src -> device block dst
    ZERO = 2  # device block dst; src is 0
    SWAP_OUT = 3  # device block src -> host slot dst
    SWAP_IN = 4  # host slot src -> device block dst


def _i32() -> I32:
    return np.empty(0, np.int32)


@dataclass(slots=True)
class BlockOps:
    """Block ops in decision order; equal lengths. kind: u8, src and dst: i32."""

    kind: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    src: I32 = field(default_factory=_i32)
    dst: I32 = field(default_factory=_i32)


@dataclass(slots=True)
class TableDeltas:
    """table[row[i]][first[i] : first[i] + count[i]] = the next count[i] of blocks."""

    row: I32 = field(default_factory=_i32)
    first: I32 = field(default_factory=_i32)
    count: I32 = field(default_factory=_i32)
    blocks: I32 = field(default_factory=_i32)


@dataclass(slots=True)
class Batch:
    """Rows to compute: `count[i]` tokens of `row[i]` at positions start[i]..; token_ids one row after another."""

    row: I32 = field(default_factory=_i32)
    start: I32 = field(default_factory=_i32)
    count: I32 = field(default_factory=_i32)
    token_ids: I32 = field(default_factory=_i32)


@dataclass(slots=True)
class Samples:
    """Tokens to sample, from the logits of the last token of batch row number `source[i]`."""

    source: I32 = field(default_factory=_i32)  # index into Batch.row
    index: I32 = field(default_factory=_i32)  # which of the call's parallel samples
    seed: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    temperature: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    top_p: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    top_k: I32 = field(default_factory=_i32)  # 0 keeps all
    logprobs: I32 = field(default_factory=_i32)  # -1 none, 0 the token's own, k also the best k


@dataclass(slots=True)
class StepPlan:
    ops: BlockOps = field(default_factory=BlockOps)
    deltas: TableDeltas = field(default_factory=TableDeltas)
    batch: Batch = field(default_factory=Batch)
    samples: Samples = field(default_factory=Samples)


@dataclass(slots=True)
class StepOutputs:
    """What the executor answers: see StepResult in executor_link.proto.

    token_ids[S] i32, one a sample; logprob[number of samples with logprobs >= 0] f32;
    top_token_ids and top_logprobs: k for each sample with logprobs = k > 0.
    """

    token_ids: I32
    logprob: F32
    top_token_ids: I32
    top_logprobs: F32
