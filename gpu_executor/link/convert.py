"""Columns of a step out of their wire form, results and attachments into it; past `link/` there is no protobuf."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from gpu_executor.errors import StepInvalid
from gpu_executor.memory import block_bytes, layout_hash
from gpu_executor.step import Batch, BlockOps, Geometry, Outputs, Samples, Step, TableDeltas
from pagedkv.v1 import executor_link_pb2 as pb

PIECE_BYTES = 1 << 20
"""Attachments and K/V travel in pieces of at most this size."""

_Columns = Mapping[str, np.dtype[Any]]

_U8 = np.dtype("u1")
_I32 = np.dtype("<i4")
_U64 = np.dtype("<u8")
_F32 = np.dtype("<f4")


def _column(body: pb.StepBody, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    data: bytes = getattr(body, name)
    if len(data) % dtype.itemsize:
        raise StepInvalid(
            "COLUMN_LENGTH", f"{name} has {len(data)} bytes, which is no multiple of {dtype.itemsize} bytes an entry"
        )
    return np.frombuffer(data, dtype)


def _group(body: pb.StepBody, columns: _Columns) -> list[NDArray[Any]]:
    arrays = [_column(body, name, dtype) for name, dtype in columns.items()]
    if len({len(array) for array in arrays}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in zip(columns, arrays, strict=True))
        raise StepInvalid("COLUMNS_UNEQUAL", f"columns of one group differ in length: {lengths}")
    return arrays


_OPS: _Columns = {"op_kind": _U8, "op_src": _I32, "op_dst": _I32}
_DELTAS: _Columns = {"delta_row": _I32, "delta_first": _I32, "delta_count": _I32}
_BATCH: _Columns = {"row": _I32, "start": _I32, "count": _I32}
_SAMPLES: _Columns = {
    "sample_from": _I32,
    "sample_index": _I32,
    "seed": _U64,
    "temperature": _F32,
    "top_p": _F32,
    "top_k": _I32,
    "logprobs": _I32,
}


def step_from_body(step_id: int, data: bytes) -> Step:
    """Parses a serialized StepBody; the columns are read-only views of its bytes.

    Raises StepInvalid: BODY_MALFORMED, STEP_ID_MISMATCH, COLUMN_LENGTH, COLUMNS_UNEQUAL, DELTA_BLOCKS_MISMATCH,
    TOKEN_IDS_MISMATCH. What the numbers mean is checked later, by `Admission`.
    """
    try:
        body = pb.StepBody.FromString(data)
    except DecodeError as error:
        raise StepInvalid("BODY_MALFORMED", f"the body of step {step_id} is no StepBody: {error}") from error
    if body.step_id != step_id:
        raise StepInvalid("STEP_ID_MISMATCH", f"step {step_id} carries the body of step {body.step_id}")
    row, first, count = _group(body, _DELTAS)
    deltas = TableDeltas(row, first, count, _column(body, "delta_blocks", _I32))
    row, start, count = _group(body, _BATCH)
    batch = Batch(row, start, count, _column(body, "token_ids", _I32))
    if (total := int(deltas.count.sum(dtype=np.int64))) != len(deltas.blocks):
        raise StepInvalid("DELTA_BLOCKS_MISMATCH", f"delta_count adds up to {total}, delta_blocks {len(deltas.blocks)}")
    if (total := int(batch.count.sum(dtype=np.int64))) != len(batch.token_ids):
        raise StepInvalid("TOKEN_IDS_MISMATCH", f"count adds up to {total}, token_ids {len(batch.token_ids)}")
    return Step(step_id, BlockOps(*_group(body, _OPS)), deltas, batch, Samples(*_group(body, _SAMPLES)))


def result_message(step_id: int, rank: int, outputs: Outputs, *, ops_us: int, compute_us: int) -> pb.StepResult:
    return pb.StepResult(
        step_id=step_id,
        rank=rank,
        token_ids=outputs.token_ids.astype(_I32, copy=False).tobytes(),
        logprob=outputs.logprob.astype(_F32, copy=False).tobytes(),
        top_token_ids=outputs.top_token_ids.astype(_I32, copy=False).tobytes(),
        top_logprobs=outputs.top_logprobs.astype(_F32, copy=False).tobytes(),
        ops_us=ops_us,
        compute_us=compute_us,
    )


def geometry_message(geometry: Geometry) -> pb.Geometry:
    return pb.Geometry(
        num_blocks=geometry.num_blocks,
        num_host_blocks=geometry.num_host_blocks,
        block_size=geometry.block_size,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        key_head_dim=geometry.key_head_dim,
        value_head_dim=geometry.value_head_dim,
        dtype=geometry.dtype,
        block_bytes=block_bytes(geometry),
        layout_hash=layout_hash(geometry),
    )


def attachments(files: Mapping[str, bytes]) -> list[pb.Attachment]:
    """What a hello announces of the model's files; none of them is empty."""
    return [
        pb.Attachment(name=name, size=len(data), sha256=hashlib.sha256(data).digest()) for name, data in files.items()
    ]


def attachment_pieces(files: Mapping[str, bytes]) -> Iterator[pb.AttachmentPiece]:
    """The announced files in order, in pieces of at most PIECE_BYTES."""
    for name, data in files.items():
        for offset in range(0, len(data), PIECE_BYTES):
            yield pb.AttachmentPiece(name=name, offset=offset, data=data[offset : offset + PIECE_BYTES])
