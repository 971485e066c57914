"""Rows of the executor's batch state, as columns: who sits in each, and how its tokens are sampled."""

from __future__ import annotations

import heapq

import numpy as np

from block_manager_svc.core.step import F32, I32, I64, U64, Samples
from block_manager_svc.scheduling.request import Sample


class Rows:
    """Up to `capacity` rows, lowest numbers first. Columns are indexed by row."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity))  # a heap
        self.occupant: list[Sample | None] = [None] * capacity
        self.sequence: I64 = np.zeros(capacity, np.int64)
        self.stale = np.zeros(capacity, np.bool_)  # its whole table has yet to be sent
        self._index: I32 = np.zeros(capacity, np.int32)
        self._seed: U64 = np.zeros(capacity, np.uint64)
        self._temperature: F32 = np.zeros(capacity, np.float32)
        self._top_p: F32 = np.zeros(capacity, np.float32)
        self._top_k: I32 = np.zeros(capacity, np.int32)
        self._logprobs: I32 = np.zeros(capacity, np.int32)

    def take(self, sample: Sample) -> None:
        """Seats a sample whose sequence is set."""
        row = heapq.heappop(self._free)
        sampling = sample.call.sampling
        sample.row = row
        self.occupant[row] = sample
        self.sequence[row] = sample.sequence
        self.stale[row] = True
        self._index[row] = sample.index
        self._seed[row] = sampling.seed
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k
        self._logprobs[row] = sampling.logprobs

    def seated(self, rows: I32) -> list[Sample]:
        """Who sits in these rows; all MUST be taken."""
        return [sample for row in rows.tolist() if (sample := self.occupant[row]) is not None]

    def release(self, sample: Sample) -> None:
        heapq.heappush(self._free, sample.row)
        self.occupant[sample.row] = None
        sample.row = -1

    def samples(self, rows: I32, source: I32, fan_out: list[tuple[int, int]]) -> Samples:
        """The sampling columns of `rows`, batch rows number `source`.

        fan_out: (position in `rows`, n) of calls that have yet to fork: that row is sampled n times, as samples 0..n-1.
        """
        index = self._index[rows]
        if fan_out:
            repeats = np.ones(len(rows), np.int64)
            for position, n in fan_out:
                repeats[position] = n
            ends = np.cumsum(repeats)
            rows, source, index = np.repeat(rows, repeats), np.repeat(source, repeats), np.repeat(index, repeats)
            for position, n in fan_out:
                index[ends[position] - n : ends[position]] = np.arange(n)
        return Samples(
            source=source,
            index=index,
            seed=self._seed[rows],
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            logprobs=self._logprobs[rows],
        )
