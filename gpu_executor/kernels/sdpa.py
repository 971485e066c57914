"""One group of a plan: gather its K and V, then scaled dot product attention. Plain torch, on any device."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_executor.kernels.plan import QUERY_TILE, Group, Plan


class Scratch(threading.local):
    """Buffers that gathered K and V lie in, one pair a thread, grown to the largest group seen.

    Fresh buffers for every call would cost their page faults each time: several times the attention itself.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, Tensor] = {}

    def take(self, which: int, rows: int, like: Tensor) -> Tensor:
        """[rows, width of like], uninitialised."""
        width = like.shape[1]
        buffer = self.buffers.get(which)
        if (
            buffer is None
            or buffer.numel() < rows * width
            or buffer.dtype != like.dtype
            or buffer.device != like.device
        ):
            buffer = torch.empty(rows * width, dtype=like.dtype, device=like.device)
            self.buffers[which] = buffer
        return buffer[: rows * width].view(rows, width)


_scratch = Scratch()


def slot_rows(view: Tensor) -> Tensor:
    """A layer's K or V view [blocks, block_size, H, D] as rows [*, H * D] in units of slots; see Plan.slot_index."""
    blocks, block_size, heads, dim = view.shape
    per_block = view.stride(0) // view.stride(1)
    return view.as_strided(((blocks - 1) * per_block + block_size, heads * dim), (view.stride(1), 1))


def attend(
    group: Group,
    plan: Plan,
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    out: Tensor,
    *,
    num_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Writes the group's rows of out [T, Hq, Dv]; q [T, Hq, D]."""
    rows = group.size * group.length
    k_flat, v_flat = _scratch.take(0, rows, k_rows), _scratch.take(1, rows, v_rows)
    torch.index_select(k_rows, 0, group.index, out=k_flat)
    torch.index_select(v_rows, 0, group.index, out=v_flat)
    k = k_flat.view(group.size, group.length, num_kv_heads, -1).transpose(1, 2)
    v = v_flat.view(group.size, group.length, num_kv_heads, -1).transpose(1, 2)
    query = q[group.query]
    plain = not softcap and sinks is None
    if group.new == 1:
        # The heads that share a KV head stand as query tokens: [B, Hkv, G, D] reads each K and V once.
        grouped = query.view(group.size, num_kv_heads, -1, query.shape[-1])
        if plain:
            result = scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=scale)
        else:
            sink = None if sinks is None else sinks.view(1, num_kv_heads, -1, 1)
            result = _attend_explicitly(grouped, k, v, group.mask, scale, softcap, sink)
        out[group.query] = result.reshape(group.size, q.shape[1], -1)
        return

    # Heads of a group stand beside each other over one K and V with stride 0: [Hkv, G, new, D].
    heads = query.view(group.new, num_kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
    per_group = heads.shape[1]
    k, v = k[0][:, None], v[0][:, None]
    target = out[group.query].view(group.new, num_kv_heads, per_group, -1).permute(1, 2, 0, 3)
    earlier = group.length - group.new
    if plain and earlier == 0 and (window == 0 or window >= group.length):
        k, v = k.expand(-1, per_group, -1, -1), v.expand(-1, per_group, -1, -1)
        target.copy_(scaled_dot_product_attention(heads, k, v, is_causal=True, scale=scale))
        return
    for first in range(0, group.new, QUERY_TILE):
        last = min(first + QUERY_TILE, group.new)
        end = earlier + last
        begin = max(0, earlier + first - window + 1) if window else 0
        mask = plan.causal_mask(last - first, end - begin, window)
        tile, tile_k, tile_v = heads[:, :, first:last], k[:, :, begin:end], v[:, :, begin:end]
        if plain:
            tile_k, tile_v = tile_k.expand(-1, per_group, -1, -1), tile_v.expand(-1, per_group, -1, -1)
            result = scaled_dot_product_attention(tile, tile_k, tile_v, attn_mask=mask, scale=scale)
        else:
            sink = None if sinks is None else sinks.view(num_kv_heads, per_group, 1, 1)
            result = _attend_explicitly(tile, tile_k, tile_v, mask, scale, softcap, sink)
        target[:, :, first:last] = result


def _attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, sink: Tensor | None
) -> Tensor:
    """Attention with what SDPA lacks: softcap, and a sink logit that takes weight and gives no value."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    score = torch.matmul(q, k.transpose(-1, -2)).to(exact) * scale
    if softcap:
        score = torch.tanh(score / softcap) * softcap
    if mask is not None:
        score = score + mask
    peak = score.amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(exact)
        peak = torch.maximum(peak, sink)
    weight = torch.exp(score - peak)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    return torch.matmul((weight / total).to(v.dtype), v)
