"""The compute side of the executor: pools, block tables and the model, driven by one thread."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_executor.model import LoadedModel, PagedModel, sample
from gpu_executor.pool import DevicePool, HostPool, apply_ops
from gpu_executor.step import Batch, Geometry, Outputs, Samples, Step
from gpu_executor.validate import Limits, delta_entries

_NOTHING = Outputs(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class Timings:
    """Microseconds; on a GPU ops are timed to their launch, the batch to its end."""

    ops_us: int
    compute_us: int


class Engine:
    """Executes steps that were validated. Not thread-safe: all calls come from one thread.

    tables: i32 [max_rows, max_blocks_per_row] on the host; the model carries what it needs of it to the device.
    """

    def __init__(self, loaded: LoadedModel, geometry: Geometry, limits: Limits, device: torch.device) -> None:
        self.geometry = geometry
        self._limits = limits
        self._device = device
        self._pool = DevicePool(geometry, device)
        self._host_pool = HostPool(geometry, device)
        self._model = PagedModel(loaded, self._pool)
        self._tables = torch.zeros((limits.max_rows, limits.max_blocks_per_row), dtype=torch.int32)
        self._entries = self._tables.numpy().reshape(-1)  # the same memory, flat

    def reset(self) -> None:
        """Clears the block tables, and the blocks: the service counts on it that nobody's K/V are left there."""
        self._tables.zero_()
        self._pool.clear()
        self._host_pool.clear()

    def execute(self, step: Step) -> tuple[Outputs, Timings]:
        """Applies ops, then deltas, then computes the batch; returns when the device has finished.

        Whatever is raised here leaves the pool in an unknown state: the process must end.
        """
        begin = perf_counter_ns()
        apply_ops(self._pool, self._host_pool, step.ops)
        if len(step.deltas.blocks):
            self._entries[delta_entries(step.deltas, self._limits.max_blocks_per_row)] = step.deltas.blocks
        applied = perf_counter_ns()
        outputs = self._compute(step.batch, step.samples) if len(step.batch.row) else _NOTHING
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        done = perf_counter_ns()
        return outputs, Timings((applied - begin) // 1000, (done - applied) // 1000)

    def _compute(self, batch: Batch, samples: Samples) -> Outputs:
        wanted, which = np.unique(samples.source, return_inverse=True)
        logits = self._model.forward(batch, self._tables, wanted)
        if len(wanted) == 0:
            return _NOTHING
        return sample(logits, samples, (batch.start + batch.count)[samples.source], which)

    def read_kv(self, layer: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """K and V of slots of one layer, as bytes: u8 [len(slots), num_kv_heads * head_dim * itemsize] each."""
        k, v = self._pool.read(layer, torch.from_numpy(slots))
        return _bytes(k), _bytes(v)


def _bytes(values: torch.Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = values.cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    return flat
