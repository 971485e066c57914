"""A causal language model from a Hugging Face folder or a GGUF file, and what there is to know of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from gpu_executor.errors import ModelUnsupported
from gpu_executor.model.fingerprint import fingerprint
from gpu_executor.model.gguf import converted_folder
from gpu_executor.model.loaded import LoadedModel
from gpu_executor.model.probe import check_config, check_logits, measured_shape


def load_model(path: Path, *, dtype: torch.dtype, device: torch.device, cache_dir: Path) -> LoadedModel:
    """Loads a Hugging Face folder or a .gguf file (converted once, into cache_dir).

    Raises FileNotFoundError, and ModelUnsupported when the model would not be right over a paged pool.
    """
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    transformers.utils.logging.disable_progress_bar()
    folder = path
    if path.is_file() and path.suffix != ".gguf":
        raise ModelUnsupported("MODEL_FORMAT_UNKNOWN", f"{path} is neither a folder nor a .gguf file")
    with _readable(path):
        if path.is_file():
            folder = converted_folder(path, cache_dir)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    text_config = config.get_text_config(decoder=True)
    check_config(text_config)
    with _readable(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True
        )
    return describe(model.to(device), path.resolve().stem if path.is_file() else path.resolve().name, _files(folder))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """transformers fails in many ways on what is no model; all of them mean this."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise ModelUnsupported(
            "MODEL_UNREADABLE",
            f"{path} is not a model that can be loaded: {type(error).__name__}: {first}; "
            "give a Hugging Face folder with config.json and weights, or a .gguf file",
        ) from error


def describe(model: Any, model_id: str, files: dict[str, bytes]) -> LoadedModel:
    """Checks a transformers model by running it (see probe.py) and describes it. Leaves it in evaluation mode."""
    text_config = model.config.get_text_config(decoder=True)
    check_config(text_config)
    model.eval()
    try:
        shape = measured_shape(model)
    except ModelUnsupported:
        raise
    except Exception as error:  # whatever a model does with an attention that it was not written for
        raise ModelUnsupported(
            "PROBE_FAILED", f"{text_config.model_type} cannot run over a paged pool: {type(error).__name__}: {error}"
        ) from error
    loaded = LoadedModel(
        model_id=model_id,
        fingerprint=fingerprint(model, files),
        model=model,
        dtype=model.dtype,
        device=model.device,
        vocab_size=text_config.vocab_size,
        max_context=_max_context(text_config),
        eos_token_ids=_eos_token_ids(model),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
        files=files,
    )
    check_logits(loaded)
    return loaded


def _max_context(config: Any) -> int:
    """Positions the model takes.

    Rotary types that change with the longest position of a pass would make a row depend on what it is batched with;
    below the original context they do not change.
    """
    limit = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = min(limit, int(original)) if original else limit
    return limit


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _files(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if (folder / "tokenizer.json").is_file():
        files["tokenizer.json"] = (folder / "tokenizer.json").read_bytes()
    tokenizer_config = _json(folder / "tokenizer_config.json")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        files["chat_template.jinja"] = (folder / "chat_template.jinja").read_bytes()
    elif template:
        files["chat_template.jinja"] = template.encode()
    special = {}
    for name, value in {**_json(folder / "special_tokens_map.json"), **tokenizer_config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    if special:
        files["special_tokens.json"] = json.dumps(special, sort_keys=True).encode()
    return files


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
