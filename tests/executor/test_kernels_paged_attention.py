"""Paged attention against its definition in float64, over pools whose every unwritten number is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_executor.kernels import paged_attention, plan, reference, torch_cpu, write_kv

CPU = torch.device("cpu")


@dataclass
class Case:
    """Sequences of given (context, new tokens) over shuffled blocks."""

    lengths: list[tuple[int, int]]
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float64
    head_major: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        torch.manual_seed(1)
        blocks = [-(-context // self.block_size) for context, _ in self.lengths]
        num_blocks = sum(blocks) + 1
        if self.head_major:
            pool = torch.full((num_blocks, 2, self.kv_heads, self.block_size, self.dim), float("nan"), dtype=self.dtype)
            self.k, self.v = pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2)
        else:
            pool = torch.full((num_blocks, 2, self.block_size, self.kv_heads, self.dim), float("nan"), dtype=self.dtype)
            self.k, self.v = pool[:, 0], pool[:, 1]
        free = rng.permutation(np.arange(1, num_blocks)).tolist()
        # What lies past a context's blocks must not even be looked at.
        self.tables = torch.full((len(blocks), max(blocks) + 1), -(2**31), dtype=torch.int32)
        for row, count in enumerate(blocks):
            self.tables[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        self.contexts = torch.tensor([context for context, _ in self.lengths], dtype=torch.int32)
        self.cu_q = torch.tensor([0, *np.cumsum([new for _, new in self.lengths])], dtype=torch.int32)
        self.q = torch.randn(int(self.cu_q[-1]), self.heads, self.dim, dtype=self.dtype)
        for row, (context, _) in enumerate(self.lengths):
            k = torch.randn(context, self.kv_heads, self.dim, dtype=self.dtype)
            v = torch.randn(context, self.kv_heads, self.dim, dtype=self.dtype)
            write_kv(self.k, self.v, k, v, self.slots(row, range(context)))

    def slots(self, row: int, positions: range) -> Tensor:
        at = torch.tensor(list(positions), dtype=torch.int64)
        return self.tables[row].long()[at // self.block_size] * self.block_size + at % self.block_size

    def difference(self, **how: object) -> float:
        arguments = (self.q, self.k, self.v, self.tables, self.contexts, self.cu_q)
        out = paged_attention(*arguments, max(new for _, new in self.lengths), scale=self.dim**-0.5, **how)
        expected = reference.paged_attention(*arguments, scale=self.dim**-0.5, **how)
        assert out.dtype == self.dtype
        return float((out.double() - expected).abs().max())


# Prefill from the start, prefill with context, decode rows of unequal and of equal lengths, one token in all.
MIXED = [(33, 33), (40, 7), (29, 1), (48, 1), (29, 1), (1, 1), (17, 16)]


@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (7, 1, 80), (4, 4, 96)])
def test_head_groups_head_sizes_and_block_sizes(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    assert Case(MIXED, heads, kv_heads, dim, block_size).difference() < 1e-12


@pytest.mark.parametrize("window", [0, 5, 32, 1000])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks_together(window: int, softcap: float, with_sinks: bool) -> None:
    case = Case(MIXED)
    sinks = torch.randn(case.heads, dtype=case.dtype) if with_sinks else None
    assert case.difference(window=window, softcap=softcap, sinks=sinks) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_accuracy_of_each_dtype(dtype: torch.dtype, tolerance: float, softcap: float) -> None:
    assert Case(MIXED, dtype=dtype).difference(softcap=softcap) < tolerance


def test_head_major_blocks_need_no_other_kernel() -> None:
    assert Case(MIXED, head_major=True).difference() < 1e-12


def test_value_heads_may_differ_in_size_from_key_heads() -> None:
    case = Case(MIXED)
    values = torch.full((*case.v.shape[:3], 24), float("nan"), dtype=case.dtype)
    for row, (context, _) in enumerate(case.lengths):
        slots = case.slots(row, range(context))
        v = torch.randn(context, case.kv_heads, 24, dtype=case.dtype)
        values[slots // case.block_size, slots % case.block_size] = v
    case.k, case.v = case.k.contiguous(), values
    assert case.difference() < 1e-12
    assert case.difference(window=9, sinks=torch.randn(case.heads, dtype=case.dtype)) < 1e-12


def test_a_context_of_nothing_gives_zeros() -> None:
    case = Case([(0, 1), (20, 1), (0, 3)])
    out = paged_attention(case.q, case.k, case.v, case.tables, case.contexts, case.cu_q, 3, scale=1.0)
    assert torch.equal(out[[0, 2, 3, 4]], torch.zeros(4, case.heads, case.dim, dtype=case.dtype))
    assert case.difference() < 1e-12


def test_a_block_outside_the_pool_is_refused() -> None:
    case = Case([(20, 1)])
    case.tables[0, 1] = len(case.k)
    with pytest.raises(IndexError, match="outside"):
        case.difference()


def test_the_causal_tiles_of_a_long_prefill_join_up() -> None:
    """More new tokens than one tile of queries, from the start, with context, and inside a window."""
    case = Case([(600, 600), (700, 300)], heads=2, kv_heads=1, dim=8)
    assert case.difference() < 1e-12
    assert case.difference(window=50) < 1e-12


# K and V of 4 KiB a slot make two megabytes a sequence: several tiles each, enough for the threads to be used.
LONG = [(500, 1), (430, 1), (512, 1), (511, 1)]


@pytest.mark.parametrize("with_sinks", [False, True])
def test_tiles_of_long_contexts_merge_in_several_threads(monkeypatch: pytest.MonkeyPatch, with_sinks: bool) -> None:
    monkeypatch.setattr(plan, "CPU_TILING", plan.Tiling(long=64 << 10, short=64 << 10, padding=4 << 10))
    case = Case(LONG, heads=4, kv_heads=4, dim=64)
    sinks = torch.randn(4, dtype=case.dtype) if with_sinks else None
    assert sum(context for context, _ in LONG) * 4 * 64 * 16 > torch_cpu.MIN_BYTES
    assert case.difference(sinks=sinks) < 1e-12
    assert case.difference(sinks=sinks, window=300) < 1e-12
    assert case.difference(sinks=sinks, softcap=4.0) < 1e-12


def test_one_long_sequence_is_shared_between_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CPU_TILING", plan.Tiling(long=64 << 10, short=64 << 10, padding=4 << 10))
    case = Case([(900, 1)], heads=4, kv_heads=4, dim=64)
    assert case.difference() < 1e-12
    assert case.difference(sinks=torch.randn(4, dtype=case.dtype)) < 1e-12


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    def fail(_: list[int]) -> None:
        raise RuntimeError("in the thread")

    with pytest.raises(RuntimeError, match="in the thread"):
        torch_cpu.run_shared(fail, [torch_cpu.MIN_BYTES, torch_cpu.MIN_BYTES])


def test_the_threads_leave_the_callers_setting_alone() -> None:
    before = torch.get_num_threads()
    torch_cpu.run_shared(lambda _: None, [torch_cpu.MIN_BYTES] * 4)
    assert torch.get_num_threads() == before


def test_every_item_is_done_once_whatever_its_cost() -> None:
    done: list[int] = []
    torch_cpu.run_shared(done.extend, [torch_cpu.MIN_BYTES * (i + 1) for i in range(13)])
    assert sorted(done) == list(range(13))


def test_write_skips_slots_of_minus_one() -> None:
    k = torch.zeros(3, 4, 2, 8)
    v = torch.zeros(3, 4, 2, 8)
    new_k, new_v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(k, v, new_k, new_v, torch.tensor([5, -1, 11]))
    assert torch.equal(k[1, 1], new_k[0])
    assert torch.equal(v[2, 3], new_v[2])
    assert int((k != 0).any(-1).any(-1).sum()) == 2
    assert int((v != 0).any(-1).any(-1).sum()) == 2
