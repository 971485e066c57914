"""The executor's pools, read and written as numbers: what was written where is seen in the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_executor.pool.device_pool import DevicePool, HostPool
from gpu_executor.pool.storage import BlockStorage


class Slots:
    """The slots of both pools (float64), in the core's numbering: one 64-bit number each, the same in K and V of all
    layers, heads and dims."""

    def __init__(self, device: DevicePool, host: HostPool) -> None:
        self._pools = device, host
        self._size = device.geometry.block_size
        self._layers = device.geometry.num_layers

    def __setitem__(self, at: int | slice, value: Any) -> None:
        slots, values = (range(at, at + 1), [value]) if isinstance(at, int) else (range(at.start, at.stop), value)
        for slot, each in zip(slots, values, strict=True):
            for plane in self._planes(slot):
                plane.copy_(torch.from_numpy(np.full(plane.shape, each, np.int64)).view(torch.float64))

    def __getitem__(self, at: slice) -> list[int]:
        """AssertionError if a slot holds several numbers."""
        found = []
        for slot in range(at.start, at.stop):
            values = {int(v) for plane in self._planes(slot) for v in plane.contiguous().view(torch.int64).flatten()}
            assert len(values) == 1, f"slot {slot} holds {values}"
            found.append(values.pop())
        return found

    def _planes(self, slot: int) -> list[torch.Tensor]:
        place, offset = divmod(slot, self._size)
        device, host = self._pools
        pool: BlockStorage = device
        if place >= device.num_blocks:
            pool, place = host, place - device.num_blocks
        return [view(layer)[place, offset] for layer in range(self._layers) for view in (pool.k_view, pool.v_view)]
