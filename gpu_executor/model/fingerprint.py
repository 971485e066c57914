"""Which model this is, by what it computes with and not by its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

_VALUES = 256  # of each tensor, evenly spread: other weights differ everywhere, and reading all would take long


def fingerprint(model: Any, files: Mapping[str, bytes]) -> bytes:
    """SHA-256 of configuration, names, shapes, types and some values of all weights, and the model's text files."""
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // _VALUES)].to(torch.float64).cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(values.numpy().tobytes())
    for name, data in sorted(files.items()):
        digest.update(f"{name} {len(data)}".encode())
        digest.update(data)
    return digest.digest()
