from __future__ import annotations

import numpy as np
import pytest

from gpu_executor.errors import StepInvalid
from gpu_executor.step import Batch, BlockOps, Geometry, OpKind, Samples, Step, TableDeltas
from gpu_executor.validate import Admission, Limits, delta_entries

GEOMETRY = Geometry(
    num_blocks=16,
    num_host_blocks=4,
    block_size=4,
    num_layers=1,
    num_kv_heads=1,
    key_head_dim=8,
    value_head_dim=8,
    dtype="float32",
)
LIMITS = Limits(max_rows=4, max_batch_tokens=32, max_blocks_per_row=5, vocab_size=100, max_context=18)


def ints(values: object) -> np.ndarray:
    return np.array(values, np.int32).reshape(-1)


def deltas(*rows: tuple[int, int, list[int]]) -> TableDeltas:
    """(row, first, blocks) each."""
    return TableDeltas(
        ints([r for r, _, _ in rows]),
        ints([f for _, f, _ in rows]),
        ints([len(b) for _, _, b in rows]),
        ints([block for _, _, blocks in rows for block in blocks]),
    )


def batch(*rows: tuple[int, int, list[int]]) -> Batch:
    """(row, start, token ids) each."""
    return Batch(
        ints([r for r, _, _ in rows]),
        ints([s for _, s, _ in rows]),
        ints([len(t) for _, _, t in rows]),
        ints([token for _, _, tokens in rows for token in tokens]),
    )


def samples(source: list[int], **changed: object) -> Samples:
    n = len(source)
    columns = {
        "index": np.zeros(n, np.int32),
        "seed": np.zeros(n, np.uint64),
        "temperature": np.zeros(n, np.float32),
        "top_p": np.ones(n, np.float32),
        "top_k": np.zeros(n, np.int32),
        "logprobs": np.full(n, -1, np.int32),
    }
    for name, value in changed.items():
        columns[name] = np.array([value] * n, columns[name].dtype)
    return Samples(ints(source), **columns)


def ops(*each: tuple[int, int, int]) -> BlockOps:
    return BlockOps(
        np.array([k for k, _, _ in each], np.uint8), ints([s for _, s, _ in each]), ints([d for *_, d in each])
    )


def step(
    step_ops: BlockOps | None = None,
    step_deltas: TableDeltas | None = None,
    step_batch: Batch | None = None,
    step_samples: Samples | None = None,
) -> Step:
    return Step(1, step_ops or ops(), step_deltas or deltas(), step_batch or batch(), step_samples or samples([]))


ROW_0 = deltas((0, 0, [1, 2]))  # eight tokens

REFUSED = {
    "an op of unknown kind": (step(ops((9, 1, 2))), "OP_UNKNOWN"),
    "a copy from outside the pool": (step(ops((OpKind.COPY, 16, 2))), "OP_OUT_OF_RANGE"),
    "a copy onto the null block": (step(ops((OpKind.COPY, 1, 0))), "NULL_BLOCK_WRITTEN"),
    "a swap to a host slot that is not there": (step(ops((OpKind.SWAP_OUT, 1, 4))), "OP_OUT_OF_RANGE"),
    "a delta's row too high": (step(None, deltas((4, 0, [1]))), "ROW_OUT_OF_RANGE"),
    "a delta's row negative": (step(None, deltas((-1, 0, [1]))), "ROW_OUT_OF_RANGE"),
    "a delta past the table's end": (step(None, deltas((0, 4, [1, 2]))), "DELTA_OUT_OF_RANGE"),
    "a delta's first negative": (step(None, deltas((0, -1, [1]))), "DELTA_OUT_OF_RANGE"),
    "a delta's count negative": (
        step(None, TableDeltas(ints([0, 0]), ints([0, 0]), ints([-1, 2]), ints([1]))),
        "DELTA_OUT_OF_RANGE",
    ),
    "a delta that names the null block": (step(None, deltas((0, 0, [0]))), "BLOCK_OUT_OF_RANGE"),
    "a delta that names a block past the pool": (step(None, deltas((0, 0, [16]))), "BLOCK_OUT_OF_RANGE"),
    "a batch's row too high": (step(None, ROW_0, batch((4, 0, [1]))), "ROW_OUT_OF_RANGE"),
    "a row twice": (step(None, ROW_0, batch((0, 0, [1]), (0, 1, [1]))), "ROW_REPEATED"),
    "a row without tokens": (step(None, ROW_0, batch((0, 0, []))), "COUNT_OUT_OF_RANGE"),
    "too many tokens": (
        step(
            None,
            deltas((0, 0, [1, 2, 3]), (1, 0, [4, 5, 6]), (2, 0, [7, 8, 9])),
            batch((0, 0, [1] * 11), (1, 0, [1] * 11), (2, 0, [1] * 11)),
        ),
        "BATCH_TOO_LARGE",
    ),
    "a token past the vocabulary": (step(None, ROW_0, batch((0, 0, [1, 100]))), "TOKEN_OUT_OF_RANGE"),
    "a negative token": (step(None, ROW_0, batch((0, 0, [-1]))), "TOKEN_OUT_OF_RANGE"),
    "a negative start": (step(None, ROW_0, batch((0, -1, [1]))), "CONTEXT_EXCEEDED"),
    "an end past the context": (
        step(None, deltas((0, 0, [1, 2, 3, 4, 5])), batch((0, 17, [1, 1]))),
        "CONTEXT_EXCEEDED",
    ),
    "a row whose table is empty": (step(None, None, batch((1, 0, [1]))), "BLOCK_MISSING"),
    "a row whose table is too short": (step(None, ROW_0, batch((0, 8, [1]))), "BLOCK_MISSING"),
    "a row whose table has a hole": (
        step(None, deltas((0, 0, [1]), (0, 2, [3])), batch((0, 0, [1] * 9))),
        "BLOCK_MISSING",
    ),
    "a sample of no row": (step(None, ROW_0, batch((0, 0, [1])), samples([1])), "SAMPLE_SOURCE_OUT_OF_RANGE"),
    "a sample without a batch": (step(None, None, None, samples([0])), "SAMPLE_SOURCE_OUT_OF_RANGE"),
    "a negative sample index": (
        step(None, ROW_0, batch((0, 0, [1])), samples([0], index=-1)),
        "SAMPLE_INDEX_OUT_OF_RANGE",
    ),
    **{
        f"{name} {value}": (
            step(None, ROW_0, batch((0, 0, [1])), samples([0], **{name: value})),
            f"{name.upper()}_OUT_OF_RANGE",
        )
        for name, value in [
            ("temperature", -0.1),
            ("temperature", float("inf")),
            ("temperature", float("nan")),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("top_p", float("nan")),
            ("top_k", -1),
            ("logprobs", -2),
            ("logprobs", 21),
        ]
    },
}


@pytest.mark.parametrize(("bad", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_step_is_refused_and_its_deltas_leave_nothing(bad: Step, reason: str) -> None:
    admission = Admission(GEOMETRY, LIMITS)
    with pytest.raises(StepInvalid) as error:
        admission.admit(bad)
    assert error.value.reason == reason
    for row in range(LIMITS.max_rows):
        with pytest.raises(StepInvalid, match="has 0 blocks"):
            admission.admit(step(None, None, batch((row, 0, [1]))))


def test_the_limits_themselves_are_admitted() -> None:
    Admission(GEOMETRY, LIMITS).admit(
        step(
            ops((OpKind.COPY, 0, 15), (OpKind.ZERO, 0, 1), (OpKind.SWAP_OUT, 15, 3), (OpKind.SWAP_IN, 3, 15)),
            deltas((3, 0, [1, 2, 3, 4, 15]), (0, 0, [5, 6, 7, 8])),
            batch((3, 0, [99] * 18), (0, 2, [0] * 14)),
            samples([0, 1, 1], temperature=100, top_p=1e-6, top_k=2**31 - 1, logprobs=20),
        )
    )
    Admission(GEOMETRY, LIMITS).admit(step())


def test_a_table_grows_over_steps_and_a_reset_empties_it() -> None:
    admission = Admission(GEOMETRY, LIMITS)
    admission.admit(step(None, deltas((2, 0, [1])), batch((2, 0, [1] * 4))))
    admission.admit(step(None, deltas((2, 1, [2])), batch((2, 4, [1]))))
    admission.admit(step(None, deltas((2, 0, [3])), batch((2, 7, [1]))))  # copy-on-write replaces an entry
    with pytest.raises(StepInvalid, match="has 2 blocks"):
        admission.admit(step(None, None, batch((2, 8, [1]))))
    admission.reset()
    with pytest.raises(StepInvalid, match="has 0 blocks"):
        admission.admit(step(None, None, batch((2, 0, [1]))))


def test_deltas_may_come_out_of_order_and_leave_a_hole_for_a_later_step() -> None:
    admission = Admission(GEOMETRY, LIMITS)
    admission.admit(step(None, deltas((0, 1, [2]), (0, 0, [1])), batch((0, 0, [1] * 8))))
    admission.admit(step(None, deltas((0, 3, [4]))))
    with pytest.raises(StepInvalid, match="has 2 blocks"):
        admission.admit(step(None, None, batch((0, 8, [1]))))
    # The hole is filled by a delta that joins what was there: all four count.
    admission.admit(step(None, deltas((0, 2, [3])), batch((0, 8, [1] * 8))))


def test_delta_entries_are_flat_indices_in_the_order_of_the_blocks() -> None:
    assert delta_entries(deltas((1, 0, [7]), (0, 4, [8])), 5).tolist() == [5, 4]
    assert delta_entries(deltas((1, 1, [7, 8]), (0, 0, []), (3, 3, [9])), 5).tolist() == [6, 7, 18]
