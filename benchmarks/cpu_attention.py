"""Decode attention over the paged pool against dense attention, on the CPU, in one run.

Dense is what a contiguous cache costs: K and V [B, Hkv, context, D] and one scaled_dot_product_attention, q reshaped
reshaped to [B, Hkv, G, D]; for ragged contexts one such call a sequence, no padding. Both sides run in alternation, so
that what else the machine does meets both; the ratio is the median over the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_executor.kernels import PagedKv, make_plan, run_plan

BATCH, HEADS, KV_HEADS, DIM, BLOCK = 32, 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    dtype: str
    contexts: str
    dense_ms: float
    paged_ms: float
    ratio: float
    paged_gb_per_s: float


def measure(dtype: str, contexts: str, mean_context: int, rounds: int) -> Row:
    rng = np.random.default_rng(0)
    if contexts == "equal":
        lengths = np.full(BATCH, mean_context)
    else:
        lengths = rng.integers(mean_context // 8, mean_context * 15 // 8, BATCH)
    paged, dense = cases(DTYPES[dtype], lengths, rng)
    difference = float((paged().float() - dense().float()).abs().max())
    if difference > (1e-4 if dtype == "f32" else 3e-2):
        raise AssertionError(f"paged and dense attention differ by {difference}")
    pairs = [(seconds(dense), seconds(paged)) for _ in range(rounds)]
    dense_s, paged_s = (min(side) for side in zip(*pairs, strict=True))
    moved = int(lengths.sum()) * KV_HEADS * DIM * 2 * DTYPES[dtype].itemsize
    return Row(
        dtype=dtype,
        contexts=contexts,
        dense_ms=dense_s * 1e3,
        paged_ms=paged_s * 1e3,
        ratio=statistics.median(p / d for d, p in pairs),
        paged_gb_per_s=moved / paged_s / 1e9,
    )


def cases(
    dtype: torch.dtype, lengths: np.ndarray, rng: np.random.Generator
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """(paged, dense) over the same K and V."""
    blocks = -(-lengths // BLOCK)
    pool = torch.zeros(int(blocks.sum()) + 1, 2, BLOCK, KV_HEADS, DIM, dtype=dtype)
    shuffled = rng.permutation(np.arange(1, len(pool))).astype(np.int32)
    tables = np.zeros((BATCH, int(blocks.max())), np.int32)
    q = torch.randn(BATCH, HEADS, DIM, dtype=dtype)
    scale = DIM**-0.5
    keys, values = [], []
    for row, own in enumerate(np.split(shuffled, np.cumsum(blocks)[:-1])):
        tables[row, : len(own)] = own
        keys.append(torch.randn(KV_HEADS, int(lengths[row]), DIM, dtype=dtype))
        values.append(torch.randn(KV_HEADS, int(lengths[row]), DIM, dtype=dtype))
        for b, block in enumerate(own):
            part = slice(b * BLOCK, min((b + 1) * BLOCK, int(lengths[row])))
            pool[block, 0, : part.stop - part.start] = keys[row][:, part].transpose(0, 1)
            pool[block, 1, : part.stop - part.start] = values[row][:, part].transpose(0, 1)
    kv = PagedKv(pool[:, 0], pool[:, 1])
    plan = make_plan(kv, tables, lengths, np.arange(BATCH + 1))

    def paged() -> Tensor:
        return run_plan(plan, q, kv, scale=scale)

    grouped = q.view(BATCH, KV_HEADS, GROUP, DIM)
    if len(set(lengths.tolist())) == 1:
        k, v = torch.stack(keys), torch.stack(values)

        def dense() -> Tensor:
            return scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(BATCH, HEADS, DIM)
    else:

        def dense() -> Tensor:
            rows = [
                scaled_dot_product_attention(grouped[row : row + 1], keys[row][None], values[row][None], scale=scale)
                for row in range(BATCH)
            ]
            return torch.cat(rows).reshape(BATCH, HEADS, DIM)

    return paged, dense


def seconds(call: Callable[[], Tensor]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def run(context: int = 1024, rounds: int = 30) -> list[Row]:
    with torch.inference_mode():
        return [measure(dtype, contexts, context, rounds) for dtype in DTYPES for contexts in ("equal", "ragged")]


def table(rows: list[Row]) -> tuple[str, list[str], list[list[str]]]:
    return (
        f"CPU decode attention, B{BATCH}, {HEADS}q/{KV_HEADS}kv, D{DIM}, block {BLOCK}, context 1,024, shuffled tables",
        ["dtype", "contexts", "dense, ms", "paged, ms", "paged / dense", "paged, GB/s"],
        [
            [
                row.dtype,
                row.contexts,
                f"{row.dense_ms:.2f}",
                f"{row.paged_ms:.2f}",
                f"{row.ratio:.2f}",
                f"{row.paged_gb_per_s:.1f}",
            ]
            for row in rows
        ],
    )


def to_json(rows: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
