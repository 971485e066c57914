"""Columns on the wire: raw little-endian values. What is no whole number of them is InvalidArgument COLUMN_LENGTH."""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.core.extra_keys import ExtraKeys
from block_manager_svc.core.step import I32, I64
from block_manager_svc.rpc.authentication import caller
from pagedkv.v1 import block_manager_pb2 as pb


def u64(column: bytes, name: str) -> I64:
    """Ids and references; a reference, with the top bit set, becomes negative, as core.commands has it."""
    _check_width(column, name, 8)
    return np.frombuffer(column, "<i8")


def wire_id(value: int) -> int:
    """As `u64`, of a single one."""
    return value - (1 << 64) if value >> 63 else value


def u32(column: bytes, name: str) -> I64:
    """Counts and positions."""
    _check_width(column, name, 4)
    return np.frombuffer(column, "<u4").astype(np.int64)


def i32(column: bytes, name: str) -> I32:
    """Tokens."""
    _check_width(column, name, 4)
    return np.frombuffer(column, "<i4")


def _check_width(column: bytes, name: str, width: int) -> None:
    if len(column) % width:
        raise InvalidArgument(
            "COLUMN_LENGTH",
            f"{name} has {len(column)} bytes: its values have {width} each",
            field=name,
            bytes=len(column),
            width=width,
        )


def engine_namespace(adapter: str) -> bytes:
    """Of the caller, apart from the namespace of the executor's own model: an engine computes its own K/V."""
    return caller().tenant.realm + b"\0engine\0" + adapter.encode()


def extra_keys(m: pb.CreateCommand | pb.AppendCommand | pb.PinCommand | pb.MatchRequest) -> ExtraKeys | None:
    """None where there are none."""
    if not m.HasField("extra_keys"):
        return None
    extra = m.extra_keys
    return ExtraKeys(u32(extra.of, "extra_keys.of"), u32(extra.positions, "extra_keys.positions"), extra.keys)


def as_u64(column: I64) -> bytes:
    return column.astype("<i8", copy=False).tobytes() if column.size else b""


def as_u32(column: I64 | I32) -> bytes:
    return column.astype("<i4").tobytes() if column.size else b""
