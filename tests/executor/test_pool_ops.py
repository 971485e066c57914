"""Block ops: the effect of one by one in order, on pools of random blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_executor.errors import StepInvalid
from gpu_executor.pool import DevicePool, HostPool, apply_ops, check_ops
from gpu_executor.pool.ops import batches
from gpu_executor.step import BlockOps, Geometry, OpKind

CPU = torch.device("cpu")
BLOCKS, HOST = 7, 5


def geometry(value_dim: int = 4) -> Geometry:
    return Geometry(
        num_blocks=BLOCKS,
        num_host_blocks=HOST,
        block_size=2,
        num_layers=2,
        num_kv_heads=3,
        key_head_dim=4,
        value_head_dim=value_dim,
        dtype="float32",
    )


def ops(*rows: tuple[int, int, int]) -> BlockOps:
    kind, src, dst = zip(*rows, strict=True) if rows else ((), (), ())
    return BlockOps(np.array(kind, np.uint8), np.array(src, np.int32), np.array(dst, np.int32))


def filled_pools(value_dim: int) -> tuple[DevicePool, HostPool]:
    """Every block holds its own number."""
    device, host = DevicePool(geometry(value_dim), CPU), HostPool(geometry(value_dim), CPU)
    for pool, base in ((device, 0), (host, 100)):
        for layer in range(2):
            for block in range(pool.num_blocks):
                pool.k_view(layer)[block] = base + block + 1000 * layer
                pool.v_view(layer)[block] = base + block + 1000 * layer + 500
    return device, host


def contents(pool: DevicePool | HostPool, layer: int, which: str) -> list[float]:
    blocks = getattr(pool, which)(layer)
    assert bool((blocks == blocks[:, :1, :1, :1]).all()), "a block was written in part"
    return blocks[:, 0, 0, 0].tolist()


def one_by_one(rows: list[tuple[int, int, int]], device: list[float], host: list[float]) -> None:
    for kind, src, dst in rows:
        if kind == OpKind.COPY:
            device[dst] = device[src]
        elif kind == OpKind.ZERO:
            device[dst] = 0.0
        elif kind == OpKind.SWAP_OUT:
            host[dst] = device[src]
        else:
            device[dst] = host[src]


block, written, slot = st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS - 1), st.integers(0, HOST - 1)
op = st.one_of(
    st.tuples(st.just(int(OpKind.COPY)), block, written),
    st.tuples(st.just(int(OpKind.ZERO)), st.just(0), written),
    st.tuples(st.just(int(OpKind.SWAP_OUT)), block, slot),
    st.tuples(st.just(int(OpKind.SWAP_IN)), slot, written),
)


@settings(deadline=None, max_examples=200)
@given(rows=st.lists(op, max_size=24), value_dim=st.sampled_from([4, 6]))
def test_any_list_of_ops_equals_one_by_one(rows: list[tuple[int, int, int]], value_dim: int) -> None:
    device, host = filled_pools(value_dim)
    expected = {
        (layer, which): (contents(device, layer, which), contents(host, layer, which))
        for layer in range(2)
        for which in ("k_view", "v_view")
    }
    check_ops(device.geometry, ops(*rows))
    apply_ops(device, host, ops(*rows))
    for (layer, which), (on_device, on_host) in expected.items():
        one_by_one(rows, on_device, on_host)
        assert contents(device, layer, which) == on_device
        assert contents(host, layer, which) == on_host


def test_swap_out_and_in_through_one_slot_moves_the_old_content_first() -> None:
    device, host = filled_pools(4)
    apply_ops(device, host, ops((OpKind.SWAP_OUT, 3, 1), (OpKind.SWAP_IN, 0, 3), (OpKind.SWAP_OUT, 4, 1)))
    assert contents(host, 0, "k_view")[1] == 4.0
    assert contents(device, 0, "k_view")[3] == 100.0


def test_independent_neighbours_of_one_kind_run_at_once() -> None:
    rows = [(OpKind.COPY, 1, 4), (OpKind.COPY, 1, 5), (OpKind.COPY, 2, 6), (OpKind.COPY, 4, 3), (OpKind.ZERO, 0, 1)]
    assert [(kind, len(src)) for kind, src, _ in batches(ops(*rows))] == [
        (OpKind.COPY, 3),
        (OpKind.COPY, 1),  # reads what the first wrote
        (OpKind.ZERO, 1),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((9, 1, 2), "OP_UNKNOWN"),
        ((0, 1, 2), "OP_UNKNOWN"),
        ((OpKind.COPY, 1, 0), "NULL_BLOCK_WRITTEN"),
        ((OpKind.ZERO, 0, 0), "NULL_BLOCK_WRITTEN"),
        ((OpKind.SWAP_IN, 1, 0), "NULL_BLOCK_WRITTEN"),
        ((OpKind.COPY, BLOCKS, 1), "OP_OUT_OF_RANGE"),
        ((OpKind.COPY, -1, 1), "OP_OUT_OF_RANGE"),
        ((OpKind.COPY, 1, BLOCKS), "OP_OUT_OF_RANGE"),
        ((OpKind.ZERO, 1, 1), "OP_OUT_OF_RANGE"),
        ((OpKind.SWAP_OUT, 1, HOST), "OP_OUT_OF_RANGE"),
        ((OpKind.SWAP_OUT, BLOCKS, 1), "OP_OUT_OF_RANGE"),
        ((OpKind.SWAP_IN, HOST, 1), "OP_OUT_OF_RANGE"),
        ((OpKind.SWAP_IN, 1, -3), "OP_OUT_OF_RANGE"),
    ],
)
def test_a_wrong_op_is_refused(row: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(StepInvalid) as refused:
        check_ops(geometry(), ops((OpKind.COPY, 1, 2), row))
    assert refused.value.reason == reason


def test_host_slot_zero_is_a_slot_like_any_other() -> None:
    check_ops(geometry(), ops((OpKind.SWAP_OUT, 1, 0), (OpKind.SWAP_IN, 0, 1)))


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(StepInvalid) as refused:
        check_ops(geometry(), BlockOps(np.ones(2, np.uint8), np.ones(2, np.int32), np.ones(1, np.int32)))
    assert refused.value.reason == "COLUMNS_UNEQUAL"


@pytest.mark.parametrize("value_dim", [4, 6])
def test_a_fresh_pool_is_nan_and_slots_read_back(value_dim: int) -> None:
    pool = DevicePool(geometry(value_dim), CPU)
    assert bool(pool.k_view(1).isnan().all())
    pool.k_view(1)[2, 1] = 7.0
    pool.v_view(1)[2, 1] = 8.0
    k, v = pool.read(1, torch.tensor([5, 4]))
    assert k.shape == (2, 3, 4)
    assert v.shape == (2, 3, value_dim)
    assert bool((k[0] == 7.0).all())
    assert bool((v[0] == 8.0).all())
    assert bool(k[1].isnan().all())
