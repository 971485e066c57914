"""The engine by itself: what a step does to the pool and what it gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_executor.engine import Engine
from gpu_executor.model import LoadedModel, load_model
from gpu_executor.pool import DTYPES
from gpu_executor.step import Batch, BlockOps, Geometry, OpKind, Outputs, Samples, Step, TableDeltas
from gpu_executor.validate import Limits

BLOCK_SIZE = 4
PROMPT = [5, 6, 7, 8, 9, 10]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype=torch.float64, device=CPU, cache_dir=tmp_path_factory.mktemp("cache"))


def engine_of(loaded: LoadedModel, dtype: str = "float64") -> Engine:
    geometry = Geometry(
        num_blocks=32,
        num_host_blocks=4,
        block_size=BLOCK_SIZE,
        num_layers=loaded.num_layers,
        num_kv_heads=loaded.num_kv_heads,
        key_head_dim=loaded.key_head_dim,
        value_head_dim=loaded.value_head_dim,
        dtype=dtype,
    )
    limits = Limits(
        max_rows=4,
        max_batch_tokens=64,
        max_blocks_per_row=8,
        vocab_size=loaded.vocab_size,
        max_context=loaded.max_context,
    )
    return Engine(loaded, geometry, limits, CPU)


@pytest.fixture
def engine(loaded: LoadedModel) -> Engine:
    return engine_of(loaded)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def step(
    *,
    ops: list[tuple[int, int, int]] | None = None,
    deltas: list[tuple[int, int, list[int]]] | None = None,
    rows: list[tuple[int, int, list[int]]] | None = None,
    source: list[int] | None = None,
    temperature: float = 0.0,
    logprobs: int = -1,
) -> Step:
    """ops (kind, src, dst), deltas (row, first, blocks), rows (row, start, token ids), samples by source."""
    ops, deltas, rows, source = ops or [], deltas or [], rows or [], source or []
    n = len(source)
    return Step(
        1,
        BlockOps(np.array([k for k, *_ in ops], np.uint8), ints(*(s for _, s, _ in ops)), ints(*(d for *_, d in ops))),
        TableDeltas(
            ints(*(r for r, *_ in deltas)),
            ints(*(f for _, f, _ in deltas)),
            ints(*(len(b) for *_, b in deltas)),
            ints(*(block for *_, blocks in deltas for block in blocks)),
        ),
        Batch(
            ints(*(r for r, *_ in rows)),
            ints(*(s for _, s, _ in rows)),
            ints(*(len(t) for *_, t in rows)),
            ints(*(token for *_, tokens in rows for token in tokens)),
        ),
        Samples(
            ints(*source),
            np.arange(n, dtype=np.int32),
            np.full(n, 7, np.uint64),
            np.full(n, temperature, np.float32),
            np.ones(n, np.float32),
            np.zeros(n, np.int32),
            np.full(n, logprobs, np.int32),
        ),
    )


def run(engine: Engine, step: Step) -> Outputs:
    outputs, timings = engine.execute(step)
    assert timings.ops_us >= 0
    assert timings.compute_us >= 0
    return outputs


def test_greedy_decoding_follows_the_model(engine: Engine, loaded: LoadedModel, tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float64)
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    tokens = list(PROMPT)
    out = run(engine, step(deltas=[(2, 0, [9, 3, 20, 11, 4])], rows=[(2, 0, PROMPT)], source=[0]))
    for _ in range(11):
        tokens.append(int(out.token_ids[0]))
        out = run(engine, step(rows=[(2, len(tokens) - 1, tokens[-1:])], source=[0]))
    tokens.append(int(out.token_ids[0]))
    assert tokens == expected


def test_several_samples_of_one_row_differ_by_their_index(engine: Engine) -> None:
    out = run(
        engine,
        step(
            deltas=[(0, 0, [1, 2]), (1, 0, [3, 4])],
            rows=[(0, 0, PROMPT), (1, 0, PROMPT[::-1])],
            source=[1, 0, 0, 0, 0, 0, 0, 0],
            temperature=2.0,
            logprobs=0,
        ),
    )
    assert len(out.token_ids) == len(out.logprob) == 8
    assert len(set(out.token_ids[1:].tolist())) > 1


def test_samples_name_their_rows_in_any_order(engine: Engine) -> None:
    rows = {0: PROMPT, 1: PROMPT[::-1], 3: PROMPT[:3]}
    alone = {
        row: int(run(engine, step(deltas=[(row, 0, [1, 2])], rows=[(row, 0, tokens)], source=[0])).token_ids[0])
        for row, tokens in rows.items()
    }
    out = run(
        engine,
        step(
            deltas=[(0, 0, [11, 12]), (1, 0, [13, 14]), (3, 0, [15])],
            rows=[(row, 0, tokens) for row, tokens in rows.items()],
            source=[2, 0, 1, 2],
        ),
    )
    assert out.token_ids.tolist() == [alone[3], alone[0], alone[1], alone[3]]


def test_a_chunk_without_samples_gives_nothing_and_writes_its_kv(engine: Engine) -> None:
    out = run(engine, step(deltas=[(0, 0, [1, 2])], rows=[(0, 0, PROMPT[:3])]))
    assert len(out.token_ids) == len(out.logprob) == len(out.top_token_ids) == len(out.top_logprobs) == 0
    k, v = engine.read_kv(1, np.arange(4, 12))
    assert np.isfinite(k.view(np.float64)[:3]).all()
    assert np.isfinite(v.view(np.float64)[:3]).all()
    assert np.isnan(k.view(np.float64)[3:]).all()


def test_ops_come_before_deltas_and_deltas_before_the_batch(engine: Engine) -> None:
    first = run(engine, step(deltas=[(0, 0, [1, 2])], rows=[(0, 0, PROMPT)], source=[0])).token_ids[0]
    straight = run(engine, step(rows=[(0, 6, [int(first)])], source=[0])).token_ids[0]
    # Out to the host, the device blocks zeroed, and back into others, all in the step that reads them.
    swapped = run(
        engine,
        step(
            ops=[
                (OpKind.SWAP_OUT, 1, 3),
                (OpKind.SWAP_OUT, 2, 0),
                (OpKind.ZERO, 0, 1),
                (OpKind.ZERO, 0, 2),
                (OpKind.SWAP_IN, 3, 21),
                (OpKind.SWAP_IN, 0, 22),
            ],
            deltas=[(3, 0, [21, 22])],
            rows=[(3, 6, [int(first)])],
            source=[0],
        ),
    ).token_ids[0]
    assert swapped == straight


def test_reset_clears_the_tables_and_both_pools(engine: Engine) -> None:
    run(engine, step(deltas=[(0, 0, [1, 2])], rows=[(0, 0, PROMPT)]))
    run(engine, step(ops=[(OpKind.SWAP_OUT, 1, 1)]))
    assert not all(part[:, 1].isnan().all() for part in engine._host_pool.parts)
    engine.reset()
    assert not engine._tables.any()
    assert all(part.isnan().all() for pool in (engine._pool, engine._host_pool) for part in pool.parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_kv_are_read_as_the_bytes_of_the_pools_dtype(tiny_llama_dir: Path, tmp_path: Path, dtype: str) -> None:
    loaded = load_model(tiny_llama_dir, dtype=DTYPES[dtype], device=CPU, cache_dir=tmp_path)
    engine = engine_of(loaded, dtype)
    run(engine, step(deltas=[(0, 0, [1, 2])], rows=[(0, 0, PROMPT)]))
    k, v = engine.read_kv(1, np.array([9, 4]))
    for got, view in ((k, engine._pool.k_view(1)), (v, engine._pool.v_view(1))):
        expected = view.reshape(-1, loaded.num_kv_heads, loaded.key_head_dim)[[9, 4]]
        assert got.shape == (2, expected[0].nbytes)
        assert torch.equal(torch.from_numpy(got).view(DTYPES[dtype]).reshape(expected.shape), expected)
