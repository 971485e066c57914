"""Attention over gathered tiles of K and V, in plain torch, on any device.

Every result comes with its log-sum-exp, so that the results of a sequence's tiles can be merged and a sink joined to
them: Dao et al., Flash-Decoding (2023); Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_executor.kernels.plan import Decode, Plan, Prefill, Rows, Tile

# Query tokens of a prefill that are scored at once, against the keys that the last of them sees.
QUERY_TILE = 256

# The operator behind torch's scaled_dot_product_attention on CPUs: that one does not give the log-sum-exp.
_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# numpy has no bfloat16; a gather only moves bits.
_BITS = {2: torch.int16, 4: torch.float32, 8: torch.float64}


class PagedKv:
    """K and V of one layer, as views [num_blocks, block_size, Hkv, D] of any strides that are multiples of D.

    Both are seen as rows of D numbers, one head of one slot each, so that one gather brings tiles into the order
    [sequence, head, position] that attention reads fastest. NHD and HND, together or apart: the strides say it all.
    """

    __slots__ = ("arrays", "k_rows", "k_view", "num_kv_heads", "rows", "v_rows", "v_view")

    def __init__(self, k_view: Tensor, v_view: Tensor) -> None:
        strides = {self._strides(k_view), self._strides(v_view)}
        if len(strides) != 1:
            raise ValueError(f"K and V are laid out differently: {k_view.stride()} and {v_view.stride()}")
        self.rows = strides.pop()
        self.k_view, self.v_view = k_view, v_view
        self.num_kv_heads = k_view.shape[2]
        self.k_rows, self.v_rows = self._as_rows(k_view), self._as_rows(v_view)
        self.arrays: tuple[NDArray[np.generic], ...] = ()
        if k_view.device.type == "cpu":
            self.arrays = tuple(rows.view(_BITS[rows.element_size()]).numpy() for rows in (self.k_rows, self.v_rows))

    @staticmethod
    def _strides(view: Tensor) -> Rows:
        dim = view.shape[3]
        if view.stride(3) != 1 or any(stride % dim for stride in view.stride()[:3]):
            raise ValueError(f"a view of shape {tuple(view.shape)} has strides {view.stride()}: not rows of {dim}")
        return Rows(*(stride // dim for stride in view.stride()[:3]))

    @staticmethod
    def _as_rows(view: Tensor) -> Tensor:
        dim = view.shape[3]
        last = sum((size - 1) * stride for size, stride in zip(view.shape[:3], view.stride()[:3], strict=True))
        return view.as_strided((last // dim + 1, dim), (dim, 1))

    def write(self, k: Tensor, v: Tensor, rows: Tensor) -> None:
        """k [T, Hkv, Dk] and v [T, Hkv, Dv] into rows int64[T * Hkv]."""
        self.k_rows.index_copy_(0, rows, k.reshape(-1, k.shape[2]))
        self.v_rows.index_copy_(0, rows, v.reshape(-1, v.shape[2]))

    def gather(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """K and V of a tile, [size, Hkv, length, D] each; on the CPU in this thread's scratch until its next gather."""
        if not self.arrays:
            shape = (tile.size, self.num_kv_heads, tile.length, -1)
            k, v = (rows.index_select(0, tile.index).view(shape) for rows in (self.k_rows, self.v_rows))
            return k, v
        (k_array, k), (v_array, v) = _scratch.take(tile, self)
        # "clip" spares the copy that "raise" makes of the output; Plan.slots has checked the bounds.
        self.arrays[0].take(tile.index, 0, k_array, "clip")
        self.arrays[1].take(tile.index, 0, v_array, "clip")
        return k, v


class _Scratch(threading.local):
    """Buffers for gathered K and V, one pair a thread, grown to the largest tile seen.

    Fresh buffers for every call would cost their page faults each time: several times the attention itself.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self.shaped: dict[tuple[object, ...], tuple[tuple[NDArray[np.generic], Tensor], ...]] = {}

    def take(self, tile: Tile, kv: PagedKv) -> tuple[tuple[NDArray[np.generic], Tensor], ...]:
        """For K and for V the same memory twice: rows of bits to gather into, and [size, Hkv, length, D]."""
        key = (tile.size, tile.length, kv.num_kv_heads, kv.k_rows.shape[1], kv.v_rows.shape[1], kv.k_rows.dtype)
        shaped = self.shaped.get(key)
        if shaped is None:
            if len(self.shaped) >= 1024:  # shapes come and go with the lengths of contexts
                self.shaped.clear()
            shaped = tuple(self._shape(which, tile, kv, rows) for which, rows in enumerate((kv.k_rows, kv.v_rows)))
            self.shaped[key] = shaped
        return shaped

    def _shape(self, which: int, tile: Tile, kv: PagedKv, like: Tensor) -> tuple[NDArray[np.generic], Tensor]:
        size = tile.size * kv.num_kv_heads * tile.length * like.shape[1]
        buffer = self.buffers.get((which, like.dtype))
        if buffer is None or buffer.numel() < size:
            self.shaped.clear()  # they are views of the buffer that goes
            buffer = self.buffers[which, like.dtype] = torch.empty(size, dtype=like.dtype)
        rows = buffer[:size].view(-1, like.shape[1])
        return rows.view(_BITS[like.element_size()]).numpy(), rows.view(tile.size, kv.num_kv_heads, tile.length, -1)


_scratch = _Scratch()


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's call: q [T, Hq, Dk], its K and V, and what the model says of its attention."""

    q: Tensor
    kv: PagedKv
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None


def decode(item: Decode, layer: Layer) -> tuple[Tensor, Tensor]:
    """Results [B, Hq, Dv] of the item's sequences and their log-sum-exp [B, Hq], sinks not counted."""
    query = layer.q[item.query]
    # The heads that share a KV head stand as query tokens: [B, Hkv, G, D] reads each K and V once.
    grouped = query.view(query.shape[0], layer.kv.num_kv_heads, -1, query.shape[2])
    gather, scale, softcap = layer.kv.gather, layer.scale, layer.softcap
    results = [_attend(grouped, *gather(tile), tile.mask, scale, softcap) for tile in item.tiles]
    if len(results) == 1:
        out, lse = results[0]
    else:
        outs, lses = zip(*results, strict=True)
        out, lse = merge(torch.cat(outs), torch.cat(lses))
    return out.reshape(*query.shape[:2], -1), lse.reshape(query.shape[:2])


def merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins results over different keys: out [N, ..., D] and lse [N, ...] -> [..., D], [...]."""
    total = torch.logsumexp(lse, 0)
    weight = torch.exp(lse - total)
    return (out * weight[..., None]).sum(0).to(out.dtype), total


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The share of the weight that out keeps when a logit `sinks` [Hq], without a value, joins: out [..., Hq, D]."""
    return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype)


def prefill(item: Prefill, plan: Plan, layer: Layer, out: Tensor) -> None:
    """Writes the item's rows of out [T, Hq, Dv]."""
    query = layer.q[item.query]
    new, length, window = query.shape[0], item.tile.length, layer.window
    k, v = (part[0][:, None] for part in layer.kv.gather(item.tile))
    # Heads stand beside each other over one K and V of stride 0: [Hkv, G, new, D].
    heads = query.view(new, layer.kv.num_kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3)
    target = out[item.query].view(new, layer.kv.num_kv_heads, heads.shape[1], -1).permute(1, 2, 0, 3)
    sinks = None if layer.sinks is None else layer.sinks.view(layer.kv.num_kv_heads, -1, 1)
    earlier = length - new
    # From the first token on, the operator's own causal mask does: it skips what is hidden.
    whole = earlier == 0 and not (window and window < length) and _fused(query, v, layer.softcap)
    step = new if whole else QUERY_TILE
    for first in range(0, new, step):
        last = min(first + step, new)
        end = earlier + last
        begin = max(0, earlier + first - window + 1) if window else 0
        mask = None if whole else plan.causal_mask(last - first, end - begin, window)
        result, lse = _attend(
            heads[:, :, first:last], k[:, :, begin:end], v[:, :, begin:end], mask, layer.scale, layer.softcap, whole
        )
        target[:, :, first:last] = result if sinks is None else join_sinks(result, lse, sinks)


def _fused(q: Tensor, v: Tensor, softcap: float) -> bool:
    """Whether torch's fused CPU operator can do it. Its public face, SDPA, does not give the log-sum-exp."""
    return q.device.type == "cpu" and not softcap and q.shape[-1] == v.shape[-1]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """q [.., H, L, Dk], k [.., H, N, Dk], v [.., H, N, Dv] -> [.., H, L, Dv] and the log-sum-exp [.., H, L]."""
    if _fused(q, v, softcap):
        if k.shape[1] != q.shape[1]:
            k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
        out, lse = _fused_attention(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    score = torch.matmul(q, k.transpose(-1, -2)).to(exact) * scale
    if softcap:
        score = torch.tanh(score / softcap) * softcap
    if mask is not None:
        score = score + mask
    lse = torch.logsumexp(score, -1)
    return torch.matmul(torch.exp(score - lse[..., None]).to(v.dtype), v), lse
