"""The attention function that Hugging Face models call in place of their own.

`AttentionInterface` hands it q, k and v of one layer for the packed tokens of the whole batch; what the batch is comes
along as the keyword argument `paged`, which models pass through to their attention untouched.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION = "pagedkv"


class LayerAttention(Protocol):
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [T, Hq, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv] of the new tokens -> [T, Hq, Dv]."""
        ...


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: LayerAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None)."""
    out = paged.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Which positions a token sees is said by the block tables; without this entry models raise KeyError."""


AttentionInterface.register(IMPLEMENTATION, _forward)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def set_attention(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)


def run(model: Any, token_ids: Tensor, positions: Tensor, wanted: Tensor, paged: LayerAttention) -> Tensor:
    """One pass over packed tokens: token_ids and positions int64[T], wanted int64[W] -> logits [W, vocab]."""
    with torch.inference_mode():
        result = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,  # the head is computed for these alone
            paged=paged,
        )
    return result.logits[0]
