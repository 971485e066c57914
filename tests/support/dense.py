"""What the model says without any paging: Hugging Face over a dense cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# float32 runs may part only where the two best logits are this close, as a share of max |logit|.
TIE = 1e-5


@dataclass(frozen=True)
class Greedy:
    """A greedy run; for each token the logits [vocab], and how far the best two are apart, in shares of max |logit|."""

    token_ids: list[int]
    logits: list[torch.Tensor]
    margins: list[float]


@lru_cache(maxsize=4)
def dense_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> Greedy:
    """`generate` with a dense cache, past end-of-sequence tokens."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = [step[0] for step in out.logits]
    best = [step.double().topk(2).values for step in logits]
    margins = [float((two[0] - two[1]) / step.abs().max()) for two, step in zip(best, logits, strict=True)]
    return Greedy(out.sequences[0, len(prompt) :].tolist(), logits, margins)


def assert_same_tokens(got: list[int], dense: Greedy, *, tie: float = TIE) -> bool:
    """Equal, or parting first where the dense run was a tie within `tie`. True when equal throughout."""
    assert len(got) == len(dense.token_ids)
    for at, (ours, theirs) in enumerate(zip(got, dense.token_ids, strict=True)):
        if ours != theirs:
            assert dense.margins[at] < tie, (
                f"token {at} is {ours}, dense {theirs}, where the best two were {dense.margins[at]:.2e} apart"
            )
            return False
    return True


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """`tokens` are the greedy continuation: each is the argmax after the prompt and the tokens before it.

    One dense pass over all of it, so long runs are cheap to check. For float64 models: no tie is let through.
    """
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    margin = (best.values[:, 0] - best.values[:, 1]) / logits.abs().amax(1)
    assert float(margin.min()) > 1e-9, "this prompt proves nothing: a tie"
    assert best.indices[:, 0].tolist() == tokens
