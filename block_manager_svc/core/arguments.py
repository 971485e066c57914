"""Checks at the edge of the page table: whatever a caller passes becomes arrays of the right type, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.core.step import I32, I64

Integers = NDArray[np.integer] | Sequence[int]

_I32_MAX = (1 << 31) - 1


def integers(values: Integers, name: str) -> I64:
    """A flat int64 array of `values`."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidArgument(
            "NOT_A_COLUMN", f"{name} has {array.ndim} dimensions, 1 is asked for", dimensions=array.ndim
        )
    if array.dtype == np.int64:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgument(
            "NOT_INTEGERS", f"{name} holds {array.dtype}, integers are asked for", dtype=str(array.dtype)
        )
    return array.astype(np.int64)


def column(values: Integers, name: str, length: int) -> I64:
    """`integers`, one a sequence."""
    array = integers(values, name)
    if array.size != length:
        raise InvalidArgument(
            "UNEQUAL_COLUMNS",
            f"{name} has {array.size} values for {length} sequences",
            values=array.size,
            sequences=length,
        )
    return array


def token_ids(values: Integers, name: str = "tokens") -> I32:
    """A flat int32 array of token ids, all in [0, 2**31)."""
    array = np.asarray(values)
    if array.dtype != np.int32 or array.ndim != 1:
        wide = integers(values, name)
        if wide.size and int(wide.max()) > _I32_MAX:
            _refuse_token(wide, wide > _I32_MAX)
        array = wide.astype(np.int32) if not wide.size or int(wide.min()) >= 0 else wide
    if array.size and int(array.min()) < 0:
        _refuse_token(array, array < 0)
    return array


def _refuse_token(tokens: NDArray[np.integer], wrong: NDArray[np.bool_]) -> None:
    place = int(wrong.nonzero()[0][0])
    token = int(tokens[place])
    raise InvalidArgument(
        "TOKEN_OUT_OF_RANGE",
        f"token {token} at {place} is outside [0, {_I32_MAX}]",
        token=token,
        place=place,
    )
