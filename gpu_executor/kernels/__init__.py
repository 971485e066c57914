"""Attention over a paged pool, and writing K and V into it.

K and V of a layer come as views [num_blocks, block_size, Hkv, D] with strides of their own (see PagedKv): the pool's
layout is its owner's business. `paged_attention` and `write_kv` are the whole contract; a model that runs many layers
over one batch makes the plan once and calls `run_plan` for each.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_executor.kernels import torch_cpu
from gpu_executor.kernels.plan import Plan
from gpu_executor.kernels.tiles import Layer, PagedKv, decode, join_sinks, merge, prefill

__all__ = ["PagedKv", "Plan", "make_plan", "paged_attention", "run_plan", "write_kv", "write_rows"]


def make_plan(
    kv: PagedKv, block_tables: NDArray[np.int32], ctx_lens: NDArray[np.integer], cu_q: NDArray[np.integer]
) -> Plan:
    """What a batch gathers, for every layer whose K and V have the shapes and strides of these; see paged_attention."""
    num_blocks, block_size, num_kv_heads, key_dim = kv.k_view.shape
    return Plan(
        tables=block_tables,
        contexts=np.asarray(ctx_lens, np.int64),
        first_query=np.asarray(cu_q, np.int64),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        stride=kv.rows,
        slot_bytes=num_kv_heads * (key_dim + kv.v_view.shape[3]) * kv.k_view.element_size(),
        device=kv.k_view.device,
        dtype=kv.k_view.dtype,
        threads=torch.get_num_threads() if kv.k_view.device.type == "cpu" else 1,
    )


def run_plan(
    plan: Plan,
    q: Tensor,
    kv: PagedKv,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one layer over a plan; arguments and result as in paged_attention."""
    layer = Layer(q, kv, scale, window, softcap, sinks)
    work = plan.work(window)
    out = q.new_zeros(*q.shape[:2], kv.v_view.shape[3])
    parts: dict[int, tuple[Tensor, Tensor]] = {}

    def finish(rows: slice | Tensor, result: Tensor, lse: Tensor) -> None:
        out[rows] = result if sinks is None else join_sinks(result, lse, sinks)

    def run_decodes(items: list[int]) -> None:
        for item in (work.decodes[i] for i in items):
            result, lse = decode(item, layer)
            if item.part is None:
                finish(item.query, result, lse)
            else:
                parts[item.part] = result[0], lse[0]

    if work.decodes:
        if q.device.type == "cpu":
            torch_cpu.run_shared(run_decodes, [item.bytes for item in work.decodes])
        else:
            run_decodes(list(range(len(work.decodes))))
        for row, numbers in work.shared.items():
            results, lses = zip(*(parts[number] for number in numbers), strict=True)
            result, lse = merge(torch.stack(results), torch.stack(lses))
            finish(slice(row, row + 1), result[None], lse[None])
    for item in work.prefills:
        prefill(item, plan, layer, out)
    return out


def paged_attention(
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    block_tables: Tensor,
    ctx_lens: Tensor,
    cu_q: Tensor,
    max_q: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed query tokens over their sequences' K and V.

    q:            [T, Hq, Dk]; the tokens of sequence s are q[cu_q[s] : cu_q[s + 1]], its last ones.
    k_view:       [num_blocks, block_size, Hkv, Dk]; v_view: [num_blocks, block_size, Hkv, Dv]. Hq is a multiple of Hkv.
    block_tables: i32[S, M]; entries past a sequence's context are never read.
    ctx_lens:     i32[S], tokens of each sequence, the new ones included; their K and V are in the pool already.
    cu_q:         i32[S + 1]; max_q: the most new tokens of one sequence.
    window:       how many positions a query sees, itself included; 0: all.
    softcap:      scores become softcap * tanh(score / softcap); 0: as they are.
    sinks:        [Hq], a logit a head that takes part in the softmax and has no value.

    Returns [T, Hq, Dv]; zeros for sequences without context. What lies in a block past the context, NaN included, has
    no effect. `max_q` sizes the grid of GPU kernels; this one does not need it.
    """
    kv = PagedKv(k_view, v_view)
    plan = make_plan(kv, block_tables.cpu().numpy(), ctx_lens.cpu().numpy(), cu_q.cpu().numpy())
    return run_plan(plan, q, kv, scale=scale, window=window, softcap=softcap, sinks=sinks)


def write_kv(k_view: Tensor, v_view: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes k [T, Hkv, Dk] and v [T, Hkv, Dv] into `slots` (int64[T], block * block_size + offset; -1 is skipped)."""
    keep = slots >= 0
    if not bool(keep.all()):
        slots, k, v = slots[keep], k[keep], v[keep]
    kv = PagedKv(k_view, v_view)
    kv.write(k, v, write_rows(kv, slots // k_view.shape[1], slots % k_view.shape[1]))


def write_rows(kv: PagedKv, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Rows int64[T * Hkv] that PagedKv.write takes, of slots (blocks, offsets), int64[T] each."""
    heads = torch.arange(kv.num_kv_heads, device=blocks.device) * kv.rows.head
    return ((blocks * kv.rows.block + offsets * kv.rows.slot)[:, None] + heads).reshape(-1)
