"""Steps to and from their wire form: packed little-endian columns, as executor_link.proto names them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from block_manager_svc.core.step import StepOutputs, StepPlan
from pagedkv.v1 import executor_link_pb2 as link


def _i32(column: NDArray[np.int32]) -> bytes:
    return column.astype("<i4", copy=False).tobytes()


def _f32(column: NDArray[np.float32]) -> bytes:
    return column.astype("<f4", copy=False).tobytes()


def step_body(plan: StepPlan, step_id: int) -> bytes:
    """The serialized StepBody: what is digested, kept and sent."""
    ops, deltas, batch, samples = plan.ops, plan.deltas, plan.batch, plan.samples
    return link.StepBody(
        step_id=step_id,
        op_kind=ops.kind.tobytes(),
        op_src=_i32(ops.src),
        op_dst=_i32(ops.dst),
        delta_row=_i32(deltas.row),
        delta_first=_i32(deltas.first),
        delta_count=_i32(deltas.count),
        delta_blocks=_i32(deltas.blocks),
        row=_i32(batch.row),
        start=_i32(batch.start),
        count=_i32(batch.count),
        token_ids=_i32(batch.token_ids),
        sample_from=_i32(samples.source),
        sample_index=_i32(samples.index),
        seed=samples.seed.astype("<u8", copy=False).tobytes(),
        temperature=_f32(samples.temperature),
        top_p=_f32(samples.top_p),
        top_k=_i32(samples.top_k),
        logprobs=_i32(samples.logprobs),
    ).SerializeToString()


def step_outputs(result: link.StepResult) -> StepOutputs:
    """Raises ValueError for a column that is not a whole number of values."""
    return StepOutputs(
        token_ids=np.frombuffer(result.token_ids, "<i4"),
        logprob=np.frombuffer(result.logprob, "<f4"),
        top_token_ids=np.frombuffer(result.top_token_ids, "<i4"),
        top_logprobs=np.frombuffer(result.top_logprobs, "<f4"),
    )
