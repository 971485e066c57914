"""The memory behind a pool of K/V blocks.

One allocation holds all layers, the layer outermost:

    head dims equal      kv [layers, blocks, 2, block_size, Hkv, D]       K at [.., 0, ..], V at [.., 1, ..]
    head dims different  k  [layers, blocks, block_size, Hkv, Dk] and v [layers, blocks, block_size, Hkv, Dv]

so each layer is the NHD layout of FlashInfer's paged cache, and one block of every layer moves in one strided copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_executor.step import Geometry

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class BlockStorage:
    """`num_blocks` blocks of all layers. `parts` are the tensors [layers, blocks, ...] that hold them."""

    __slots__ = ("_fill", "geometry", "num_blocks", "parts")

    def __init__(
        self, geometry: Geometry, num_blocks: int, device: torch.device, *, fill: float, pinned: bool = False
    ) -> None:
        g = geometry
        dtype = DTYPES[g.dtype]
        if g.key_head_dim == g.value_head_dim:
            shapes: list[tuple[int, ...]] = [
                (g.num_layers, num_blocks, 2, g.block_size, g.num_kv_heads, g.key_head_dim)
            ]
        else:
            shapes = [
                (g.num_layers, num_blocks, g.block_size, g.num_kv_heads, dim)
                for dim in (g.key_head_dim, g.value_head_dim)
            ]
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.parts = [torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned) for shape in shapes]
        self._fill = fill
        self.clear()

    def clear(self) -> None:
        """As fresh memory: what was written is gone."""
        for part in self.parts:
            part.fill_(self._fill)

    def k_view(self, layer: int) -> Tensor:
        """Keys of one layer: [num_blocks, block_size, Hkv, Dk], a view."""
        return self.parts[0][layer, :, 0] if len(self.parts) == 1 else self.parts[0][layer]

    def v_view(self, layer: int) -> Tensor:
        """Values of one layer: [num_blocks, block_size, Hkv, Dv], a view."""
        return self.parts[0][layer, :, 1] if len(self.parts) == 1 else self.parts[1][layer]
