"""Paged attention as its definition reads: one query token at a time, in float64. For tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    block_tables: Tensor,
    ctx_lens: Tensor,
    cu_q: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same contract as `gpu_executor.kernels.paged_attention`; returns float64."""
    tokens, num_heads, _ = q.shape
    block_size, num_kv_heads, value_dim = v_view.shape[1:]
    group = num_heads // num_kv_heads
    out = torch.zeros(tokens, num_heads, value_dim, dtype=torch.float64)
    for s, context in enumerate(ctx_lens.tolist()):
        first, last = int(cu_q[s]), int(cu_q[s + 1])
        for t in range(first, last):
            position = context - (last - t)  # of the query token
            begin = max(0, position - window + 1) if window else 0
            places = [(int(block_tables[s, p // block_size]), p % block_size) for p in range(begin, position + 1)]
            if not places:
                continue
            k = torch.stack([k_view[b, o] for b, o in places]).double()  # [n, Hkv, D]
            v = torch.stack([v_view[b, o] for b, o in places]).double()
            for h in range(num_heads):
                score = k[:, h // group] @ q[t, h].double() * scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                peak = float(score.max()) if sinks is None else max(float(score.max()), float(sinks[h]))
                weight = torch.exp(score - peak)
                total = weight.sum() + (0.0 if sinks is None else math.exp(float(sinks[h]) - peak))
                out[t, h] = (weight / total) @ v[:, h // group]
    return out
