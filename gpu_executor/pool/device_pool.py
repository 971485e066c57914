"""The pool that attention reads and writes, and its counterpart in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_executor.pool.storage import BlockStorage
from gpu_executor.step import Geometry


class DevicePool(BlockStorage):
    """K/V of `geometry.num_blocks` blocks on the compute device.

    Fresh memory is filled with NaN: what was never written must never reach an output, and NaN makes it seen.
    """

    def __init__(self, geometry: Geometry, device: torch.device, *, fill: float = float("nan")) -> None:
        super().__init__(geometry, geometry.num_blocks, device, fill=fill)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K [n, Hkv, Dk] and V [n, Hkv, Dv] of `slots` (int64[n], block * block_size + offset), copied."""
        slots = slots.to(self.parts[0].device)
        size = self.geometry.block_size
        block, offset = torch.div(slots, size, rounding_mode="floor"), slots % size
        return self.k_view(layer)[block, offset], self.v_view(layer)[block, offset]


class HostPool(BlockStorage):
    """K/V of `geometry.num_host_blocks` swapped-out blocks, laid out as on the device; pinned when that is a GPU."""

    def __init__(self, geometry: Geometry, device: torch.device, *, fill: float = float("nan")) -> None:
        super().__init__(
            geometry, geometry.num_host_blocks, torch.device("cpu"), fill=fill, pinned=device.type == "cuda"
        )
