"""What a GPU changes: pools on two sides of a bus, kernels on the device. Runs wherever there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.dense import assert_greedy, dense_model
from support.inline import Inline

from gpu_executor.model import load_model
from gpu_executor.pool import DevicePool, HostPool, apply_ops
from gpu_executor.step import BlockOps, Geometry, OpKind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GPU = torch.device("cuda")


def test_block_ops_across_the_bus_equal_one_by_one() -> None:
    geometry = Geometry(
        num_blocks=6,
        num_host_blocks=4,
        block_size=2,
        num_layers=2,
        num_kv_heads=3,
        key_head_dim=4,
        value_head_dim=4,
        dtype="float32",
    )
    device, host = DevicePool(geometry, GPU), HostPool(geometry, GPU)
    for layer in range(2):
        for block in range(6):
            device.k_view(layer)[block] = 10 * layer + block
            device.v_view(layer)[block] = 10 * layer + block
    # Out to the host, its place taken by another, and back in elsewhere: right only in this order.
    ops = [
        (OpKind.SWAP_OUT, 1, 2),
        (OpKind.COPY, 3, 1),
        (OpKind.SWAP_IN, 2, 4),
        (OpKind.ZERO, 0, 3),
        (OpKind.SWAP_OUT, 4, 0),
        (OpKind.SWAP_IN, 0, 5),
    ]
    kind, src, dst = zip(*ops, strict=True)
    apply_ops(device, host, BlockOps(np.array(kind, np.uint8), np.array(src, np.int32), np.array(dst, np.int32)))
    torch.cuda.synchronize()
    for layer in range(2):
        for view in (device.k_view(layer), device.v_view(layer)):
            assert [float(view[block].mean()) for block in range(1, 6)] == [
                10 * layer + 3,
                10 * layer + 2,
                0,
                10 * layer + 1,
                10 * layer + 1,
            ]


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_a_mixed_batch_on_the_gpu_equals_the_dense_model(tiny_llama_dir: Path, tmp_path: Path, block_size: int) -> None:
    loaded = load_model(tiny_llama_dir, dtype=torch.float64, device=GPU, cache_dir=tmp_path)
    inline = Inline(loaded, dtype="float64", blocks=600, block_size=block_size, token_budget=64, device=GPU)
    prompts = [[(7 * i + length) % 300 + 10 for i in range(length)] for length in (1, 15, 16, 40, 100)]
    for prompt, generated in zip(prompts, inline.generate(prompts, 20), strict=True):
        assert_greedy(dense_model(tiny_llama_dir, torch.float64), prompt, generated.token_ids)
