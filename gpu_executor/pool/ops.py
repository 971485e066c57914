"""Block ops: checked whole, then applied with the effect of one by one in order.

Neighbours of one kind run as one transfer as long as none of them writes what another of them reads or writes
(docs/protocol.md, Order, rule 2):

    copy 3→7  copy 4→8  copy 7→9  zero 3
    └─ one transfer ─┘  └ reads 7, so after it
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_executor.errors import StepInvalid
from gpu_executor.pool.device_pool import DevicePool, HostPool
from gpu_executor.pool.storage import BlockStorage
from gpu_executor.step import BlockOps, Geometry, OpKind

# On a GPU, more separate runs than this are moved by one gather and scatter instead of one launch a run.
MAX_RUNS_OF_SLICES = 8

_KINDS = frozenset(int(kind) for kind in OpKind)


def check_ops(geometry: Geometry, ops: BlockOps) -> None:
    """Raises StepInvalid unless every op has a known kind and stays inside the pools; block 0 is never written."""
    count = len(ops.kind)
    if len(ops.src) != count or len(ops.dst) != count:
        raise StepInvalid(
            "COLUMNS_UNEQUAL", f"block ops have {count} kinds, {len(ops.src)} sources, {len(ops.dst)} destinations"
        )
    if count == 0:
        return
    kind, src, dst = ops.kind, ops.src, ops.dst
    for value in np.unique(kind):
        if int(value) not in _KINDS:
            raise StepInvalid("OP_UNKNOWN", f"op kind {int(value)} is none of {sorted(_KINDS)}")
    to_host, from_host, zero = kind == OpKind.SWAP_OUT, kind == OpKind.SWAP_IN, kind == OpKind.ZERO
    dst_limit = np.where(to_host, geometry.num_host_blocks, geometry.num_blocks)
    src_limit = np.where(from_host, geometry.num_host_blocks, np.where(zero, 1, geometry.num_blocks))
    _check(ops, (src < 0) | (src >= src_limit), "OP_OUT_OF_RANGE", "its source lies outside the pool")
    _check(ops, (dst < 0) | (dst >= dst_limit), "OP_OUT_OF_RANGE", "its destination lies outside the pool")
    _check(ops, (dst == 0) & ~to_host, "NULL_BLOCK_WRITTEN", "block 0 is never written")


def _check(ops: BlockOps, wrong: NDArray[np.bool_], reason: str, why: str) -> None:
    if wrong.any():
        i = int(np.argmax(wrong))
        name = OpKind(int(ops.kind[i])).name
        raise StepInvalid(reason, f"op {i}, {name} {int(ops.src[i])} -> {int(ops.dst[i])}: {why}")


def apply_ops(device: DevicePool, host: HostPool, ops: BlockOps) -> None:
    """Applies checked ops to the pools. On a GPU everything is queued on the current stream, in order."""
    for kind, src, dst in batches(ops):
        if kind == OpKind.COPY:
            _move(device, device, src, dst)
        elif kind == OpKind.SWAP_OUT:
            _move(device, host, src, dst)
        elif kind == OpKind.SWAP_IN:
            _move(host, device, src, dst)
        else:
            _zero(device, dst)


def batches(ops: BlockOps) -> Iterator[tuple[OpKind, list[int], list[int]]]:
    """Splits ops into (kind, sources, destinations) that may run at once, in order."""
    kinds, sources, destinations = ops.kind.tolist(), ops.src.tolist(), ops.dst.tolist()
    i = 0
    while i < len(kinds):
        kind = OpKind(kinds[i])
        first = i
        read: set[int] = set()
        written: set[int] = set()
        while i < len(kinds) and kinds[i] == kind:
            src, dst = sources[i], destinations[i]
            # Only a copy reads and writes the same memory; a swap's source and destination are different pools.
            if dst in written or (kind == OpKind.COPY and (dst in read or src in written)):
                break
            read.add(src)
            written.add(dst)
            i += 1
        yield kind, sources[first:i], destinations[first:i]


def _runs(src: list[int], dst: list[int]) -> list[tuple[int, int, int]]:
    """(source, destination, length) of stretches where both rise by one: each is one contiguous copy a layer."""
    runs: list[tuple[int, int, int]] = []
    for s, d in sorted(zip(src, dst, strict=True)):
        if runs and s == runs[-1][0] + runs[-1][2] and d == runs[-1][1] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((s, d, 1))
    return runs


def _move(source: BlockStorage, target: BlockStorage, src: list[int], dst: list[int]) -> None:
    runs = _runs(src, dst)
    for s_part, d_part in zip(source.parts, target.parts, strict=True):
        if s_part.is_cuda and d_part.is_cuda and len(runs) > MAX_RUNS_OF_SLICES:
            index = torch.tensor([src, dst], device=d_part.device)
            d_part.index_copy_(1, index[1], s_part.index_select(1, index[0]))
            continue
        for s, d, n in runs:
            d_part[:, d : d + n].copy_(s_part[:, s : s + n], non_blocking=True)


def _zero(pool: BlockStorage, dst: list[int]) -> None:
    for part in pool.parts:
        for _, d, n in _runs(dst, dst):
            part[:, d : d + n].zero_()
