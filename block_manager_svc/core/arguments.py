"""Checks at the edge of the page table: whatever a caller passes becomes arrays of the right type, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.core.step import I32, I64

Integers = NDArray[np.integer] | Sequence[int]

# numpy makes these once; `is` tells the hot path's arrays from all else.
_I32 = np.dtype(np.int32)
_I64 = np.dtype(np.int64)
_I32_MAX = (1 << 31) - 1


def integers(values: Integers, name: str) -> I64:
    """A flat int64 array of `values`."""
    if type(values) is np.ndarray and values.dtype is _I64 and values.ndim == 1:
        return cast(I64, values)
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidArgument(
            "NOT_A_COLUMN", f"{name} has {array.ndim} dimensions, 1 is asked for", dimensions=array.ndim
        )
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgument(
            "NOT_INTEGERS", f"{name} holds {array.dtype}, integers are asked for", dtype=str(array.dtype)
        )
    return array.astype(np.int64)


def column(values: Integers, name: str, length: int) -> I64:
    """`integers`, one a sequence."""
    array = integers(values, name)
    check_length(array, name, length)
    return array


def count_column(values: Integers, name: str, length: int) -> I64:
    """`column` of counts, each in [0, 2**31)."""
    array = column(values, name, length)
    # Of all bits that are set in any of them, none may be above the lower 31.
    if not 0 <= int(np.bitwise_or.reduce(array)) <= _I32_MAX:
        wrong = (array < 0) | (array > _I32_MAX)
        place = int(wrong.nonzero()[0][0])
        count = int(array[place])
        raise InvalidArgument(
            "COUNT_OUT_OF_RANGE",
            f"{name} has {count} at {place}: at least 0, at most {_I32_MAX}",
            count=count,
            place=place,
        )
    return array


def check_length(array: NDArray[np.integer], name: str, length: int, what: str = "for its sequences") -> None:
    if array.size != length:
        raise InvalidArgument(
            "UNEQUAL_COLUMNS",
            f"{name} has {array.size} values, {length} {what} are asked for",
            values=array.size,
            expected=length,
        )


def token_ids(values: Integers) -> I32:
    """A flat int32 array of token ids, all in [0, 2**31)."""
    array = values if type(values) is np.ndarray and values.dtype is _I32 and values.ndim == 1 else None
    if array is None:
        array = integers(values, "tokens")
        if array.size and int(array.max()) > _I32_MAX:
            raise _refusal(array, array > _I32_MAX)
    if array.size and int(array.min()) < 0:
        raise _refusal(array, array < 0)
    return array.astype(np.int32, copy=False)


def _refusal(tokens: NDArray[np.integer], wrong: NDArray[np.bool_]) -> InvalidArgument:
    place = int(wrong.nonzero()[0][0])
    token = int(tokens[place])
    return InvalidArgument(
        "TOKEN_OUT_OF_RANGE",
        f"token {token} at {place} is outside [0, {_I32_MAX}]",
        token=token,
        place=place,
    )
