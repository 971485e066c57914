"""Tokens a second, end to end, against Hugging Face `generate` of the same model and batch, in one run.

Ours: both programs as real processes, prompts sent at once, tokens streamed to a client. Theirs: `generate` with a
dense cache in a process of its own, the batch left-padded, as its users run it. Both float32, all cores, the same
prompts and the same number of new tokens each; the sides take turns, and the ratio is of the medians.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.stack import running
from pagedkv import AsyncClient

BATCHES = (1, 8, 32)
REPEATS = 2
EQUAL_PROMPT, EQUAL_NEW = 128, 64


@dataclass(frozen=True, slots=True)
class Row:
    requests: int
    lengths: str
    tokens_per_s: float
    dense_tokens_per_s: float
    ratio: float


def workload(requests: int, lengths: str) -> tuple[list[list[int]], list[int]]:
    """(prompts, new tokens of each). Ragged: prompts of 16-512 and 16-112 new tokens, the same mean as equal ones."""
    draw = random.Random(requests)
    if lengths == "equal":
        sizes, new = [EQUAL_PROMPT] * requests, [EQUAL_NEW] * requests
    else:
        sizes = [draw.choice([16, 32, 64, 128, 256, 512]) for _ in range(requests)]
        new = [draw.randrange(16, 113) for _ in range(requests)]
    return [draw.choices(range(20, 40_000), k=size) for size in sizes], new


async def _ours(address: str, prompts: list[list[int]], new: list[int]) -> float:
    async with AsyncClient(address) as client:
        begin = time.perf_counter()
        completions = await asyncio.gather(
            *(
                client.complete(token_ids=prompt, max_tokens=count, ignore_eos=True)
                for prompt, count in zip(prompts, new, strict=True)
            )
        )
        elapsed = time.perf_counter() - begin
    assert [len(completion.token_ids) for completion in completions] == new
    return sum(new) / elapsed


class _Dense:
    """`generate` in a process of its own that waits for work on a pipe."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.end_to_end", "dense", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tokens_per_s(self, prompts: list[list[int]], new: list[int]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([prompts, new]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _serve_dense(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        prompts, new = json.loads(line)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        begin = time.perf_counter()
        with torch.inference_mode():
            # A batch runs until its longest member is done; only the tokens that were asked for count.
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(new),
                min_new_tokens=max(new),
                eos_token_id=None,
                pad_token_id=0,
            )
        print(sum(new) / (time.perf_counter() - begin), flush=True)


def run(model: Path, cache: Path) -> list[Row]:
    from gpu_executor.model.gguf import converted_folder

    rows = []
    dense = _Dense(converted_folder(model, cache))
    try:
        flags = ("--dtype", "float32", "--model-cache", str(cache))
        with running(model, blocks=2048, flags=flags) as address:
            for lengths in ("equal", "ragged"):
                for requests in BATCHES:
                    prompts, new = workload(requests, lengths)
                    ours, theirs = [], []
                    for repeat in range(REPEATS + 1):
                        # Other tokens each time, or the prefix cache would answer; the first round warms up.
                        fresh = [[(token + repeat * 7) % 40_000 for token in prompt] for prompt in prompts]
                        theirs.append(dense.tokens_per_s(fresh, new))
                        ours.append(asyncio.run(_ours(address, fresh, new)))
                    mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
                    rows.append(Row(requests, lengths, mine, other, mine / other))
    finally:
        dense.close()
    return rows


def table(rows: list[Row]) -> tuple[str, list[str], list[list[str]]]:
    return (
        "End to end, SmolLM2-135M float32, prefill included",
        ["requests", "lengths", "tokens/s", "Hugging Face generate, tokens/s", "ratio"],
        [
            [str(r.requests), r.lengths, f"{r.tokens_per_s:,.1f}", f"{r.dense_tokens_per_s:,.1f}", f"{r.ratio:.2f}"]
            for r in rows
        ],
    )


def to_json(rows: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    _serve_dense(sys.argv[2])
