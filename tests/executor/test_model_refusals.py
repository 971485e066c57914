"""Models that would be wrong over a paged pool are refused at load, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from gpu_executor.errors import ModelUnsupported
from gpu_executor.model import load_model
from gpu_executor.model.loader import describe

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
CPU = torch.device("cpu")


def bloom() -> Any:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))


def llama4() -> Any:
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SHAPE, intermediate_size_mlp=48, num_local_experts=2))


def stablelm() -> Any:
    return hf.StableLmForCausalLM(hf.StableLmConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"}))


def mamba() -> Any:
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2))


def encoder_decoder() -> Any:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))
    model.config.is_encoder_decoder = True
    return model


def llama_with_heads_of_two_kinds() -> Any:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, torch.nn.Linear(32, 8, bias=False))
    return model


class BiasedAttention(torch.nn.Module):
    """Queries change with what only the model's own attention is told of."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = self.inner(*args, **kwargs)
        return (out, weights) if "paged" in kwargs else (out * 1.5, weights)


def llama_that_differs_silently() -> Any:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))
    model.model.layers[0].self_attn = BiasedAttention(model.model.layers[0].self_attn)
    return model


def qwen3_that_keeps_its_window_to_itself() -> Any:
    model = hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention"] * 2)
    )
    model.model.layers[1].self_attn.sliding_window = None
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (bloom, "ATTENTION_NOT_CALLED"),
        (llama4, "CHUNKED_ATTENTION"),
        (stablelm, "PROBE_FAILED"),
        (mamba, "LAYER_TYPE_UNSUPPORTED"),
        (encoder_decoder, "ENCODER_DECODER"),
        (llama_with_heads_of_two_kinds, "HEADS_NOT_UNIFORM"),
        (llama_that_differs_silently, "LOGITS_DIFFER"),
        (qwen3_that_keeps_its_window_to_itself, "WINDOW_NOT_PASSED"),
    ],
)
def test_it_is_refused(build: Callable[[], Any], reason: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelUnsupported) as refused:
        describe(build(), "tiny", {})
    assert refused.value.reason == reason


def test_a_folder_is_refused_by_its_config_before_its_weights_are_read(tmp_path: Path) -> None:
    llama4().config.save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported) as refused:
        load_model(tmp_path, dtype=torch.float32, device=CPU, cache_dir=tmp_path)
    assert refused.value.reason == "CHUNKED_ATTENTION"


def test_a_path_of_nothing_and_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "none", dtype=torch.float32, device=CPU, cache_dir=tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelUnsupported, match=r"^MODEL_FORMAT_UNKNOWN: "):  # as the command line says it
        load_model(tmp_path / "model.onnx", dtype=torch.float32, device=CPU, cache_dir=tmp_path)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_types_that_depend_on_the_batch_are_kept_to_where_they_do_not(rope_type: str) -> None:
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4} if rope_type == "longrope" else {}
    config = hf.LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 256},
        rope_parameters={
            "rope_type": rope_type,
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            **factors,
        },
    )
    assert describe(hf.LlamaForCausalLM(config), "tiny", {}).max_context == 64
