"""The random walk of the page table over the executor's own memory: each sequence reads back exactly its own bytes.

What is written into K and V of every layer of a slot is a hash of namespace, tokens and extra keys up to its position.
The executor's pool carries out what the page table says, as it does for steps, and so a swap into the wrong slot, a
missing copy or a block of another tenant is seen in the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from core_model import Device
from core_walk import walk
from support.stamped_pool import Slots

from block_manager_svc.core.step import BlockOps
from gpu_executor.pool import ops as pool_ops
from gpu_executor.pool.device_pool import DevicePool, HostPool
from gpu_executor.step import BlockOps as ExecutorOps
from gpu_executor.step import Geometry, OpKind

LAYERS, HEADS = 2, 2


class RealDevice(Device):
    """The executor's pools on the CPU."""

    def __init__(self, num_blocks: int, block_size: int, num_host: int = 0, value_head_dim: int = 2) -> None:
        super().__init__(0, block_size)
        self.first_slot = num_blocks
        self._geometry = Geometry(num_blocks, num_host, block_size, LAYERS, HEADS, 2, value_head_dim, "float64")
        cpu = torch.device("cpu")
        self._device, self._host = DevicePool(self._geometry, cpu), HostPool(self._geometry, cpu)
        self.slots = Slots(self._device, self._host)

    def apply(self, ops: BlockOps) -> None:
        theirs = ExecutorOps(ops.kind, ops.src, ops.dst)
        pool_ops.check_ops(self._geometry, theirs)
        pool_ops.apply_ops(self._device, self._host, theirs)


def unequal_head_dims(num_blocks: int, block_size: int, num_host: int) -> RealDevice:
    """K and V lie in memory of their own."""
    return RealDevice(num_blocks, block_size, num_host, value_head_dim=3)


def test_every_sequence_reads_back_exactly_its_own_bytes() -> None:
    counts = Counter[str]()
    for seed in range(9001, 9007):
        counts += walk(seed, 700, make_device=RealDevice)
    counts += walk(9007, 700, make_device=unequal_head_dims)
    assert min(counts[what] for what in ("copies", "swapped_out", "swapped_in", "compacted", "evicted", "zeroed")) > 0


def in_another_slot(ops: BlockOps) -> BlockOps:
    """Of several blocks that leave for the host, each into the slot of the next."""
    out = ops.kind == OpKind.SWAP_OUT
    ops.dst[out] = np.roll(ops.dst[out], 1)
    return ops


def without_the_first_copy(ops: BlockOps) -> BlockOps:
    keep = np.ones(ops.kind.size, bool)
    keep[(ops.kind == OpKind.COPY).nonzero()[0][:1]] = False
    return BlockOps(ops.kind[keep], ops.src[keep], ops.dst[keep])


def the_other_way_round(ops: BlockOps) -> BlockOps:
    back = ops.kind == OpKind.SWAP_IN
    ops.src[back] = ops.src[back][::-1]
    return ops


@pytest.mark.parametrize("wrong", [in_another_slot, without_the_first_copy, the_other_way_round])
def test_an_op_that_is_carried_out_wrongly_is_seen_in_the_bytes(
    wrong: Callable[[BlockOps], BlockOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RealDevice.apply

    def apply(self: RealDevice, ops: BlockOps) -> None:
        right(self, wrong(BlockOps(ops.kind.copy(), ops.src.copy(), ops.dst.copy())))

    monkeypatch.setattr(RealDevice, "apply", apply)
    with pytest.raises(AssertionError, match=r"seed 9000, step \d+"):
        walk(9000, 3000, make_device=RealDevice)
