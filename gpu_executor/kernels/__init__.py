"""Attention over a paged pool, and writing K and V into it.

Layouts are NHD. K and V of a layer come as views [num_blocks, block_size, Hkv, D] with any block stride and any slot
stride; a slot's heads lie together (H and D contiguous), and the block stride is a whole number of slot strides.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_executor.kernels import torch_cpu
from gpu_executor.kernels.plan import Plan
from gpu_executor.kernels.sdpa import attend, slot_rows

__all__ = ["Plan", "make_plan", "paged_attention", "run_plan", "write_kv"]


def make_plan(
    k_view: Tensor,
    v_view: Tensor,
    block_tables: NDArray[np.int32],
    ctx_lens: NDArray[np.integer],
    cu_q: NDArray[np.integer],
) -> Plan:
    """What a batch gathers, for every layer whose views have the shapes and strides of these; see paged_attention."""
    for view in (k_view, v_view):
        if view.stride(3) != 1 or view.stride(2) != view.shape[3] or view.stride(0) % view.stride(1):
            raise ValueError(f"a K/V view of shape {tuple(view.shape)} has strides {view.stride()}: not NHD")
    if k_view.stride(0) // k_view.stride(1) != v_view.stride(0) // v_view.stride(1):
        raise ValueError("K and V views differ in their block stride, counted in slots")
    return Plan(
        tables=block_tables,
        contexts=np.asarray(ctx_lens, np.int64),
        first_query=np.asarray(cu_q, np.int64),
        block_size=k_view.shape[1],
        slots_per_block=k_view.stride(0) // k_view.stride(1),
        slot_bytes=(k_view.shape[2] * k_view.shape[3] + v_view.shape[2] * v_view.shape[3]) * k_view.element_size(),
        device=k_view.device,
        dtype=k_view.dtype,
    )


def run_plan(
    plan: Plan,
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one layer over a plan; arguments and result as in paged_attention."""
    num_kv_heads = k_view.shape[2]
    k_rows, v_rows = slot_rows(k_view), slot_rows(v_view)
    out = q.new_zeros(q.shape[0], q.shape[1], v_view.shape[3])
    groups = plan.groups(window)

    def work(items: list[int]) -> None:
        for i in items:
            attend(
                groups[i],
                plan,
                q,
                k_rows,
                v_rows,
                out,
                num_kv_heads=num_kv_heads,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )

    decode = [i for i, group in enumerate(groups) if group.new == 1]
    if decode and q.device.type == "cpu":
        torch_cpu.run_shared(work, [groups[i].size * groups[i].length * plan.slot_bytes for i in decode])
    else:
        work(decode)
    work(list(range(len(decode), len(groups))))
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
    plan = make_plan(k_view, v_view, block_tables.cpu().numpy(), ctx_lens.cpu().numpy(), cu_q.cpu().numpy())
    return run_plan(plan, q, k_view, v_view, scale=scale, window=window, softcap=softcap, sinks=sinks)


def write_kv(k_view: Tensor, v_view: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes k [T, Hkv, Dk] and v [T, Hkv, Dv] into `slots` (int64[T], block * block_size + offset; -1 is skipped)."""
    keep = slots >= 0
    if not bool(keep.all()):
        slots, k, v = slots[keep], k[keep], v[keep]
    block_size = k_view.shape[1]
    per_block = k_view.stride(0) // k_view.stride(1)
    write_rows(k_view, v_view, k, v, slots // block_size * per_block + slots % block_size)


def write_rows(k_view: Tensor, v_view: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> None:
    """write_kv with rows already counted in slot strides (Plan.slots_per_block a block), none negative."""
    slot_rows(k_view).index_copy_(0, rows, k.reshape(len(rows), -1))
    slot_rows(v_view).index_copy_(0, rows, v.reshape(len(rows), -1))
