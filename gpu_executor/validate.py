"""Validates a step whole, before anything of it is touched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_executor.errors import StepInvalid
from gpu_executor.pool import check_ops
from gpu_executor.step import I32, Batch, Geometry, Samples, Step, TableDeltas

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold; all but the last two come with the hello."""

    max_rows: int
    max_batch_tokens: int
    max_blocks_per_row: int
    vocab_size: int
    max_context: int  # tokens of one sequence


class Admission:
    """Checks steps in their order, each against the block tables as the steps admitted before it leave them.

    A table entry never becomes null again before a reset, so what a batch may name is one number a row: how many
    leading entries are set. It runs ahead of the engine's own tables by the steps that were accepted and still wait.
    """

    def __init__(self, geometry: Geometry, limits: Limits) -> None:
        self._geometry = geometry
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        shape = self._limits.max_rows, self._limits.max_blocks_per_row
        self._present = np.zeros(shape, np.bool_)
        self._leading = np.zeros(shape[0], np.int64)  # entries of each row before its first null one

    def admit(self, step: Step) -> None:
        """Takes the step's deltas into account for the steps after it.

        Raises StepInvalid with the reason and the numbers; nothing has changed then.
        """
        check_ops(self._geometry, step.ops)
        entries, leading = self._check_deltas(step.deltas)
        self._check_batch(step.batch, leading)
        self._check_samples(step.samples, len(step.batch.row))
        self._present.reshape(-1)[entries] = True
        self._leading = leading

    def _check_deltas(self, deltas: TableDeltas) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the flat table entries that are written, and `leading` as it is afterwards."""
        row, first, count = deltas.row, deltas.first, deltas.count
        per_row = self._limits.max_blocks_per_row
        if len(row) == 0:
            return np.empty(0, np.int64), self._leading
        _within("ROW_OUT_OF_RANGE", "delta_row", row, 0, self._limits.max_rows)
        _within("DELTA_OUT_OF_RANGE", "delta_first", first, 0, per_row)
        _within("DELTA_OUT_OF_RANGE", "delta_count", count, 0, per_row + 1)
        end = first.astype(np.int64) + count
        _within("DELTA_OUT_OF_RANGE", "delta_first + delta_count", end, 0, per_row + 1)
        _within("BLOCK_OUT_OF_RANGE", "delta_blocks", deltas.blocks, 1, self._geometry.num_blocks)
        leading = self._leading.copy()
        joined = first <= leading[row]
        np.maximum.at(leading, row[joined], end[joined])
        # Deltas that leave a hole, or reach entries behind one: look at the whole rows.
        reached = (end > self._leading[row]) & (end < per_row) & self._present[row, np.minimum(end, per_row - 1)]
        holed = ~joined | reached
        if holed.any():
            for r in np.unique(row[holed]):
                present = self._present[r].copy()
                for i in np.flatnonzero(row == r):
                    present[first[i] : end[i]] = True
                leading[r] = per_row if present.all() else int(present.argmin())
        return delta_entries(deltas, per_row), leading

    def _check_batch(self, batch: Batch, leading: NDArray[np.int64]) -> None:
        row, start, count = batch.row, batch.start, batch.count
        limits = self._limits
        if len(row) == 0:
            return
        _within("ROW_OUT_OF_RANGE", "row", row, 0, limits.max_rows)
        if np.bincount(row, minlength=1).max() > 1:
            raise StepInvalid("ROW_REPEATED", f"row {int(np.bincount(row).argmax())} appears more than once in a batch")
        _within("COUNT_OUT_OF_RANGE", "count", count, 1, limits.max_batch_tokens + 1)
        if len(batch.token_ids) > limits.max_batch_tokens:
            raise StepInvalid(
                "BATCH_TOO_LARGE",
                f"{len(batch.token_ids)} tokens in the batch, the limit is {limits.max_batch_tokens}",
            )
        _within("TOKEN_OUT_OF_RANGE", "token_ids", batch.token_ids, 0, limits.vocab_size)
        _within("CONTEXT_EXCEEDED", "start", start, 0, limits.max_context)
        end = start.astype(np.int64) + count
        _within("CONTEXT_EXCEEDED", "start + count", end, 0, limits.max_context + 1)
        missing = end > leading[row] * self._geometry.block_size
        if missing.any():
            i = int(missing.argmax())
            raise StepInvalid(
                "BLOCK_MISSING",
                f"row {row[i]} has {leading[row[i]]} blocks of {self._geometry.block_size} tokens in its table, "
                f"its tokens end at {end[i]}",
            )

    def _check_samples(self, samples: Samples, rows: int) -> None:
        if len(samples.source) == 0:
            return
        _within("SAMPLE_SOURCE_OUT_OF_RANGE", "sample_from", samples.source, 0, rows)
        _within("SAMPLE_INDEX_OUT_OF_RANGE", "sample_index", samples.index, 0, 1 << 31)
        temperature, top_p = samples.temperature, samples.top_p
        # NaN compares false with everything, so it is refused with the rest.
        if not ((temperature >= 0) & (temperature < np.inf)).all():
            raise StepInvalid("TEMPERATURE_OUT_OF_RANGE", "temperature must be finite and at least 0")
        if not ((top_p > 0) & (top_p <= 1)).all():
            raise StepInvalid("TOP_P_OUT_OF_RANGE", "top_p must lie in (0, 1]")
        _within("TOP_K_OUT_OF_RANGE", "top_k", samples.top_k, 0, 1 << 31)
        most = min(MAX_LOGPROBS, self._limits.vocab_size)
        _within("LOGPROBS_OUT_OF_RANGE", "logprobs", samples.logprobs, -1, most + 1)


def delta_entries(deltas: TableDeltas, max_blocks_per_row: int) -> NDArray[np.int64]:
    """Flat indices into a [max_rows, max_blocks_per_row] table, one for each of deltas.blocks."""
    count = deltas.count.astype(np.int64)
    start = deltas.row.astype(np.int64) * max_blocks_per_row + deltas.first
    if (count == 1).all():
        return start
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(len(deltas.blocks))


def _within(reason: str, name: str, values: I32 | NDArray[np.int64], low: int, high: int) -> None:
    """Raises StepInvalid unless all values lie in [low, high)."""
    if len(values) and (values.min() < low or values.max() >= high):
        i = int(((values < low) | (values >= high)).argmax())
        raise StepInvalid(reason, f"{name}[{i}] is {values[i]}, it must lie in [{low}, {high})")
