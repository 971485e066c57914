"""A causal language model that is ready to be served."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose results over a paged pool were found right (see probe.py).

    max_context: positions that the model takes, prompt and completion together.
    files:       of "tokenizer.json", "chat_template.jinja" and "special_tokens.json" (a JSON map from names such as
                 bos_token to strings) those that the model has, as bytes.
    """

    model_id: str
    fingerprint: bytes  # see fingerprint.py
    model: nn.Module = field(repr=False)
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    files: dict[str, bytes] = field(repr=False)
