"""A batch of rows through the model in one pass, K and V in the pool."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_executor.kernels import PagedKv, make_plan, run_plan, write_rows
from gpu_executor.model.attention import run
from gpu_executor.model.loaded import LoadedModel
from gpu_executor.pool import DevicePool
from gpu_executor.step import I32, Batch


class PagedModel:
    """A loaded model over a pool of its geometry. Keeps nothing between two calls: pool and tables say it all."""

    def __init__(self, loaded: LoadedModel, pool: DevicePool) -> None:
        self.loaded = loaded
        self.pool = pool
        self.layers = [PagedKv(pool.k_view(layer), pool.v_view(layer)) for layer in range(pool.geometry.num_layers)]

    def forward(self, batch: Batch, tables: Tensor, rows_wanted: I32) -> Tensor:
        """Computes a batch: writes K and V of its tokens into the pool and returns logits [len(rows_wanted), vocab].

        batch:       rows to compute; a row at most once. Rows may mix prefill chunks and single tokens.
        tables:      i32[max_rows, M] on the CPU, by row; entries past a row's context are never read.
        rows_wanted: indexes into batch.row (not row numbers), in any order, repeats allowed: the logits of the last
                     token of each. The model's head is computed for these alone.
        """
        if not len(batch.row):
            return torch.empty(0, self.loaded.vocab_size, dtype=self.loaded.dtype, device=self.loaded.device)
        device = self.loaded.device
        packing = _Packing(batch)
        used = -(-int(packing.context.max()) // self.pool.geometry.block_size)
        paged = _PagedBatch(self.layers, packing, tables[:, :used].numpy()[packing.row])
        return run(
            self.loaded.model,
            torch.from_numpy(packing.token_ids).to(device),
            torch.from_numpy(packing.position).to(device),
            torch.from_numpy(packing.last_of[rows_wanted]).to(device),
            paged,
        )


class _Packing:
    """The order that the rows' tokens stand in: rows with one new token first, longest context first.

    Rows that attention takes in one group are then neighbours, and their queries a slice.
    """

    def __init__(self, batch: Batch) -> None:
        start, count = batch.start.astype(np.int64), batch.count.astype(np.int64)
        order = np.lexsort((-(start + count), count > 1))
        self.row = batch.row[order]
        self.context = (start + count)[order]
        ordered = count[order]
        self.first = np.zeros(len(order) + 1, np.int64)
        np.cumsum(ordered, out=self.first[1:])
        # Where in the batch each packed token comes from, and where it stands in its sequence.
        within = np.arange(self.first[-1]) - np.repeat(self.first[:-1], ordered)
        source = np.repeat((np.cumsum(count) - count)[order], ordered) + within
        self.token_ids = batch.token_ids.astype(np.int64)[source]
        self.position = np.repeat(start[order], ordered) + within
        self.place = np.repeat(np.arange(len(order)), ordered)  # packed row of each token
        self.last_of = np.empty(len(order), np.int64)  # by index into batch.row
        self.last_of[order] = self.first[1:] - 1


class _PagedBatch:
    """What attention needs of a batch, the same for every layer."""

    __slots__ = ("layers", "plan", "rows")

    def __init__(self, layers: list[PagedKv], packing: _Packing, tables: I32) -> None:
        self.layers = layers
        self.plan = make_plan(layers[0], tables, packing.context, packing.first)
        size = self.plan.block_size
        blocks = tables[packing.place, packing.position // size].astype(np.int64)
        rows = write_rows(layers[0], torch.from_numpy(blocks), torch.from_numpy(packing.position % size))
        self.rows = rows.to(self.plan.device)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        kv = self.layers[layer]
        kv.write(k, v, self.rows)
        return run_plan(self.plan, q, kv, scale=scale, window=window, softcap=softcap, sinks=sinks)
