"""Is this model right over a paged pool? Found out by running it, before anyone is told that it can be served.

A model may never call the attention function that it was given, or hand it too little (a bias added elsewhere,
attention in chunks): its tokens would be wrong and nothing would say so. So, with a few tokens:

1. the attention calls are counted, and their shapes compared: one a layer, all of one geometry;
2. logits over a scratch pool, from two prefill chunks and a decode step, are compared with those of the model's own
   attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_executor.errors import ModelUnsupported
from gpu_executor.model.attention import IMPLEMENTATION, run, set_attention
from gpu_executor.model.loaded import LoadedModel
from gpu_executor.model.paged_model import PagedModel
from gpu_executor.pool import DTYPES, DevicePool
from gpu_executor.step import Batch, Geometry

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_TOKENS = 24
_PROBE_BLOCK = 8
# Relative to the norm of the logits. The models' own softmax is in float32 at best; half precision rounds, and experts
# may be routed differently.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}


@dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int


def check_config(config: Any) -> None:
    """Raises ModelUnsupported for what a configuration alone shows to be unservable. config: of the text decoder."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported("ENCODER_DECODER", f"{name} is an encoder-decoder: it has two kinds of K/V")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in layer_types or getattr(config, "attention_chunk_size", None):
        raise ModelUnsupported("CHUNKED_ATTENTION", f"{name} attends in chunks, which the paged kernels do not do")
    if other := layer_types - _SERVED_LAYER_TYPES:
        raise ModelUnsupported(
            "LAYER_TYPE_UNSUPPORTED",
            f"{name} has layers of type {', '.join(sorted(other))}: not served from a K/V pool",
        )


def measured_shape(model: Any) -> Shape:
    """Counts the attention calls of a first pass. Leaves the paged attention set. Raises ModelUnsupported."""
    set_attention(model, IMPLEMENTATION)
    config = model.config.get_text_config(decoder=True)
    calls = _Recorder()
    one = torch.zeros(1, dtype=torch.int64, device=model.device)
    run(model, one, one, one, calls)
    layers = config.num_hidden_layers
    if sorted(calls.layers) != list(range(layers)):
        raise ModelUnsupported(
            "ATTENTION_NOT_CALLED",
            f"{config.model_type} has {layers} layers and called the paged attention {len(calls.layers)} times: "
            "it attends elsewhere",
        )
    if len(calls.shapes) != 1:
        raise ModelUnsupported(
            "HEADS_NOT_UNIFORM",
            f"{config.model_type}: (KV heads, key dim, value dim) differ between layers: {sorted(calls.shapes)}",
        )
    if layer_types := getattr(config, "layer_types", None):
        expected = [config.sliding_window if layer_types[i] == "sliding_attention" else 0 for i in calls.layers]
        if calls.windows != expected:
            raise ModelUnsupported(
                "WINDOW_NOT_PASSED",
                f"{config.model_type} does not tell its attention of the window that its layers have",
            )
    return Shape(layers, *calls.shapes.pop())


def check_logits(loaded: LoadedModel) -> None:
    """Compares logits over a scratch pool with the model's own. Raises ModelUnsupported when they differ."""
    model: Any = loaded.model
    tokens = torch.arange(_PROBE_TOKENS, device=loaded.device) * 7919 % loaded.vocab_size
    set_attention(model, "eager")
    with torch.inference_mode():
        dense = model(input_ids=tokens[None], use_cache=False, logits_to_keep=1).logits[0, -1].double()
    set_attention(model, IMPLEMENTATION)
    paged = _paged_logits(loaded, tokens).double()
    difference = float((paged - dense).norm() / dense.norm())
    if not difference < _TOLERANCE[loaded.dtype]:  # NaN too
        raise ModelUnsupported(
            "LOGITS_DIFFER",
            f"{loaded.model_id}: logits over a paged pool are {difference:.2g} of their norm away from its own",
        )


class _Recorder:
    """Stands in for attention: notes each call, returns zeros."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: set[tuple[int, int, int]] = set()
        self.windows: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int, **_: Any) -> Tensor:
        self.layers.append(layer)
        self.shapes.add((k.shape[1], k.shape[2], v.shape[2]))
        self.windows.append(window)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


def _paged_logits(loaded: LoadedModel, tokens: Tensor) -> Tensor:
    """Logits of the last token, over a pool of NaN: two prefill chunks that part inside a block, then one token."""
    blocks = -(-_PROBE_TOKENS // _PROBE_BLOCK)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == loaded.dtype)
    geometry = Geometry(
        num_blocks=blocks + 1,
        num_host_blocks=0,
        block_size=_PROBE_BLOCK,
        num_layers=loaded.num_layers,
        num_kv_heads=loaded.num_kv_heads,
        key_head_dim=loaded.key_head_dim,
        value_head_dim=loaded.value_head_dim,
        dtype=dtype,
    )
    model = PagedModel(loaded, DevicePool(geometry, loaded.device))
    tables = torch.arange(blocks, 0, -1, dtype=torch.int32)[None]
    ids = tokens.cpu().numpy().astype(np.int32)
    last = np.zeros(1, np.int32)
    cuts = [0, _PROBE_TOKENS // 2 - 1, _PROBE_TOKENS - 1, _PROBE_TOKENS]
    for begin, end in pairwise(cuts):
        row, start, count = (np.array([n], np.int32) for n in (0, begin, end - begin))
        logits = model.forward(Batch(row, start, count, ids[begin:end]), tables, last)
    return logits[0]
