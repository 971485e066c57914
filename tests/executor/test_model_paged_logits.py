"""Logits of packed mixed batches over a paged pool against the dense model: tiny random models of five families."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpu_executor.model import LoadedModel, PagedModel
from gpu_executor.model.attention import IMPLEMENTATION, set_attention
from gpu_executor.model.loader import describe
from gpu_executor.pool import DevicePool
from gpu_executor.step import Batch, Geometry

VOCAB = 97
WINDOW = 12

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Weights large enough that attention is far from uniform and every part of the model matters.
    "initializer_range": 0.3,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def gemma2() -> Gemma2ForCausalLM:
    return Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, sliding_window=WINDOW, attn_logit_softcapping=20.0, final_logit_softcapping=5.0)
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
    )


def gpt_oss() -> GptOssForCausalLM:
    model = GptOssForCausalLM(
        GptOssConfig(**SHAPE, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None)
    )
    model.set_experts_implementation("eager")  # the default has no float64
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def windowed_llama_like() -> Qwen3ForCausalLM:
    """Every layer sees WINDOW positions."""
    return Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, layer_types=["sliding_attention"] * 2)
    )


def dense_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention under the mask that transformers makes, all in the model's dtype (its own softmax is float32)."""
    groups = query.shape[1] // key.shape[1]
    score = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score + attention_mask
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, sinks], -1)
    weight = torch.softmax(score, -1)[..., : key.shape[2]]
    return (weight @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


DENSE = "dense-in-the-models-dtype"
AttentionInterface.register(DENSE, dense_attention)
AttentionMaskInterface.register(DENSE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@dataclass(frozen=True)
class Family:
    build: Callable[[], Any]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9


FAMILIES = {
    "llama": Family(llama),
    "qwen3": Family(qwen3),
    "gemma2": Family(gemma2),
    "gpt2": Family(gpt2),
    "gpt-oss": Family(gpt_oss),
    "windowed": Family(windowed_llama_like),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@functools.cache
def load(family: Family) -> LoadedModel:
    torch.manual_seed(0)
    return describe(family.build().to(family.dtype), "tiny", {})


class Sequences:
    """Sequences with tables over shuffled blocks of a pool of NaN; feeds them to the model in batches."""

    def __init__(self, loaded: LoadedModel, lengths: list[int], block_size: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        blocks = [-(-length // block_size) for length in lengths]
        self.block_size = block_size
        self.loaded = loaded
        # Token 0 pads in some families: its embedding is zero, and so would its queries be.
        self.tokens = [self.rng.integers(1, VOCAB, length).astype(np.int32) for length in lengths]
        self.done = [0] * len(lengths)
        geometry = Geometry(
            num_blocks=sum(blocks) + 1,
            num_host_blocks=0,
            block_size=block_size,
            num_layers=loaded.num_layers,
            num_kv_heads=loaded.num_kv_heads,
            key_head_dim=loaded.key_head_dim,
            value_head_dim=loaded.value_head_dim,
            dtype=str(loaded.dtype).removeprefix("torch."),
        )
        self.pool = DevicePool(geometry, torch.device("cpu"))
        self.model = PagedModel(loaded, self.pool)
        free = self.rng.permutation(np.arange(1, geometry.num_blocks)).astype(np.int32)
        # Entries that no one may read: far outside the pool.
        self.tables = torch.full((len(lengths), max(blocks) + 2), 2**30, dtype=torch.int32)
        at = 0
        for row, count in enumerate(blocks):
            self.tables[row, :count] = torch.from_numpy(free[at : at + count])
            at += count

    def step(self, work: dict[int, int]) -> torch.Tensor:
        """Computes the next work[row] tokens of each row, all in one batch; the last tokens' logits in that order."""
        rows = list(work)
        batch = Batch(
            row=np.array(rows, np.int32),
            start=np.array([self.done[row] for row in rows], np.int32),
            count=np.array([work[row] for row in rows], np.int32),
            token_ids=np.concatenate([self.tokens[row][self.done[row] :][: work[row]] for row in rows]),
        )
        for row in rows:
            self.done[row] += work[row]
        return self.model.forward(batch, self.tables, np.arange(len(rows), dtype=np.int32))

    def dense(self, row: int, attention: str = DENSE) -> torch.Tensor:
        """Logits after the tokens that were computed, by the model's own attention without any cache."""
        model: Any = self.loaded.model
        set_attention(model, attention)
        try:
            with torch.inference_mode():
                ids = torch.from_numpy(self.tokens[row][: self.done[row]].astype(np.int64))
                return model(input_ids=ids[None], use_cache=False).logits[0, -1]
        finally:
            set_attention(model, IMPLEMENTATION)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
def test_packed_mixed_batches_give_the_dense_logits(family: Family, block_size: int) -> None:
    sequences = Sequences(load(family), [60, 33, 17, 48, 9, 40], block_size)
    steps = [
        {0: 25, 1: 32, 2: 1},  # first chunks
        {1: 1, 0: 20, 2: 15, 3: 47},  # decode between a chunk with context and a first chunk
        {4: 8, 3: 1, 0: 1, 2: 1, 5: 39},  # decode rows of unequal lengths, out of order
        {0: 14, 4: 1, 5: 1},
    ]
    for work in steps:
        logits = sequences.step(work)
        for i, row in enumerate(work):
            assert relative(logits[i], sequences.dense(row)) < family.tolerance, (work, row)


def test_the_models_own_attention_agrees_to_its_rounding(family: Family) -> None:
    sequences = Sequences(load(family), [33, 20], 8)
    sequences.step({0: 20, 1: 11})
    logits = sequences.step({0: 13, 1: 1})
    for row in (0, 1):
        assert relative(logits[row], sequences.dense(row, "eager")) < 1e-5


def test_bfloat16_and_float32_stay_within_their_rounding() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)):
        sequences = Sequences(load(Family(llama, dtype)), [40, 21], 8)
        sequences.step({0: 30, 1: 20})
        logits = sequences.step({1: 1, 0: 10})
        assert logits.dtype == dtype
        for i, row in enumerate((1, 0)):
            assert relative(logits[i].double(), sequences.dense(row).double()) < tolerance


def test_corrupting_any_one_block_changes_the_output(family: Family) -> None:
    """Each K and each V block that lies inside the window of some layer, alone."""
    loaded = load(family)
    length, block_size = 45, 8

    def logits_with(corrupt: Callable[[Sequences], None]) -> torch.Tensor:
        sequences = Sequences(loaded, [length], block_size)
        sequences.step({0: length - 1})
        corrupt(sequences)
        return sequences.step({0: 1})[0]

    clean = logits_with(lambda _: None)
    for layer in range(loaded.num_layers):
        window = WINDOW if layer_window(loaded, layer) else length
        for block in range(-(-length // block_size)):
            seen = (block + 1) * block_size > length - window
            for view in ("k_view", "v_view"):

                def corrupt(s: Sequences, layer: int = layer, block: int = block, view: str = view) -> None:
                    getattr(s.pool, view)(layer)[int(s.tables[0, block])] *= -1

                changed = not torch.equal(logits_with(corrupt), clean)
                assert changed == seen, (layer, block, view)


def layer_window(loaded: LoadedModel, layer: int) -> bool:
    config: Any = loaded.model.config
    types = getattr(config, "layer_types", None)
    return bool(types) and types[layer] == "sliding_attention"


def test_nan_everywhere_outside_the_contexts_never_reaches_an_output(family: Family) -> None:
    """What was never written is NaN already; here a freed block's stale tail is, too."""
    loaded = load(family)
    sequences = Sequences(loaded, [20, 13], 8)
    sequences.step({0: 19, 1: 12})
    for layer in range(loaded.num_layers):
        for row, done in enumerate(sequences.done):
            last = int(sequences.tables[row, done // 8])
            sequences.pool.k_view(layer)[last, done % 8 :] = float("nan")
            sequences.pool.v_view(layer)[last, done % 8 :] = float("nan")
    logits = sequences.step({0: 1, 1: 1})
    for row in (0, 1):
        assert relative(logits[row], sequences.dense(row)) < family.tolerance


def test_logits_come_for_the_rows_wanted_in_the_order_wanted() -> None:
    sequences = Sequences(load(FAMILIES["llama"]), [20, 13, 5], 8)
    batch = Batch(
        row=np.array([2, 0, 1], np.int32),
        start=np.zeros(3, np.int32),
        count=np.array([5, 20, 13], np.int32),
        token_ids=np.concatenate([sequences.tokens[row] for row in (2, 0, 1)]),
    )
    sequences.done = [20, 13, 5]
    logits = sequences.model.forward(batch, sequences.tables, np.array([1, 0, 1], np.int32))
    for i, row in enumerate((0, 2, 0)):
        assert relative(logits[i], sequences.dense(row)) < 1e-9
    none = sequences.model.forward(batch, sequences.tables, np.empty(0, np.int32))
    assert none.shape == (0, VOCAB)


def test_an_empty_batch_computes_nothing() -> None:
    sequences = Sequences(load(FAMILIES["llama"]), [4], 8)
    empty = np.empty(0, np.int32)
    assert sequences.model.forward(Batch(empty, empty, empty, empty), sequences.tables, empty).shape == (0, VOCAB)
