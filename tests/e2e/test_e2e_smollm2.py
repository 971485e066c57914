"""A real model: SmolLM2-135M in float32 gives the tokens and logits of Hugging Face over a dense cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.dense import Greedy, assert_same_tokens, dense_model, greedy
from support.inline import Inline
from support.processes import Stack

from gpu_executor.model import LoadedModel, load_model
from gpu_executor.model.gguf import converted_folder
from pagedkv import AsyncClient

NEW_TOKENS = 32
LENGTHS = [1, 2, 5, 15, 16, 17, 24, 33, 48, 64, 90, 128, 129, 160, 200, 240, 256, 300, 333, 400, 512, 600, 927, 1500]
LOGIT_TOLERANCE = 1e-5  # of max |logit|

assert len(LENGTHS) == 24
assert sum(LENGTHS) == 6000


@pytest.fixture(scope="module")
def loaded(smollm2_gguf: Path, model_cache: Path) -> LoadedModel:
    return load_model(smollm2_gguf, dtype="float32", device=torch.device("cpu"), cache_dir=model_cache)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    draw = random.Random(2)
    return [draw.choices(range(20, loaded.vocab_size), k=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def dense(smollm2_gguf: Path, model_cache: Path, prompts: list[list[int]]) -> list[Greedy]:
    """Its own copy of the model: the paged one has had its attention replaced."""
    model = dense_model(converted_folder(smollm2_gguf, model_cache), torch.float32)
    return [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("token_budget", [256, 512, 2048])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
@pytest.mark.timeout(600)
def test_24_prompts_in_one_batch_equal_the_dense_model_in_tokens_and_logits(
    loaded: LoadedModel, prompts: list[list[int]], dense: list[Greedy], block_size: int, token_budget: int
) -> None:
    # One more for each than it will fill: so much an admission leaves to those that run.
    blocks = 1 + sum(-(-(len(prompt) + NEW_TOKENS) // block_size) + 1 for prompt in prompts)
    inline = Inline(
        loaded, dtype="float32", blocks=blocks, block_size=block_size, token_budget=token_budget, keep_logits=True
    )
    equal = 0
    for generated, expected in zip(inline.generate(prompts, NEW_TOKENS), dense, strict=True):
        equal += assert_same_tokens(generated.token_ids, expected)
        for at, (ours, theirs) in enumerate(zip(generated.logits, expected.logits, strict=True)):
            error = (ours - theirs).abs().max() / theirs.abs().max()
            assert error < LOGIT_TOLERANCE, f"logits of token {at} differ by {error:.1e} of max |logit|"
            if generated.token_ids[at] != expected.token_ids[at]:
                break  # parted at a tie: from here on the texts are two
    assert inline.most_rows == len(prompts)
    assert inline.loop.counters.preemptions == 0
    assert equal >= len(prompts) - 2, "ties are rare: so many are something else"


def test_the_same_through_both_processes(
    stack: Callable[..., Stack], smollm2_gguf: Path, prompts: list[list[int]], dense: list[Greedy]
) -> None:
    both = stack(model=smollm2_gguf, blocks=600, block_size=16)

    async def all_at_once() -> list[list[int]]:
        async with AsyncClient(both.address) as client:
            completions = await asyncio.gather(
                *(client.complete(token_ids=prompt, max_tokens=NEW_TOKENS, ignore_eos=True) for prompt in prompts)
            )
        return [list(completion.token_ids) for completion in completions]

    for tokens, expected in zip(asyncio.run(all_at_once()), dense, strict=True):
        assert_same_tokens(tokens, expected)


def test_text_in_text_out(stack: Callable[..., Stack], smollm2_gguf: Path) -> None:
    client = stack(model=smollm2_gguf, blocks=200).client()
    assert "Paris" in client.complete("The capital of France is", max_tokens=8).text
    chat = client.complete(chat=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=24)
    assert "Paris" in chat.text
    assert "<|im_end|>" not in chat.text
