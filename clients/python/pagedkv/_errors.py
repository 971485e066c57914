"""Every failure that the SDK raises, as one tree.

    PagedKvError            reason, message, numbers, retry_after, code
    ├── InvalidArgument     the caller can mend it
    ├── NotFound            it names a model or a sequence that is not there
    ├── AlreadyExists       its place, such as a request id, is taken
    ├── FailedPrecondition  right in itself, not in this state
    ├── ResourceExhausted   a limit or the pool; retry_after says when waiting helps
    ├── Unavailable         nobody is there to do it now
    ├── DeadlineExceeded    `timeout` passed first
    ├── Cancelled           the call was ended before its time, by the service or by closing the client
    ├── Aborted             the service gave the call up
    └── Internal            the service broke its contract, or answered with a code not named above

A refused call changed nothing. Where the service sends them, `reason`, `numbers` and `retry_after` are those of its
google.rpc.ErrorInfo and RetryInfo; the tables in protos/pagedkv/v1 list the reasons of each call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar, Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

Number = int | float | str


class PagedKvError(Exception):
    """A call that failed.

    reason:      UPPER_SNAKE, part of the contract; stable, meant for `if`.
    message:     one sentence for people.
    numbers:     what the message is about, as exact values (text where it is no number).
    retry_after: seconds after which trying again makes sense; None: the service did not say that waiting helps.
    code:        the gRPC status code's name, such as "INVALID_ARGUMENT".
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        numbers: Mapping[str, Number] | None = None,
        retry_after: float | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message
        self.numbers: dict[str, Number] = dict(numbers or {})
        self.retry_after = retry_after
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class InvalidArgument(PagedKvError):
    """The request is wrong in itself: mend it. Also raised before anything is sent."""

    default_code = "INVALID_ARGUMENT"


class NotFound(PagedKvError):
    """The request names a model that is not served, or a sequence that is not alive."""

    default_code = "NOT_FOUND"


class AlreadyExists(PagedKvError):
    """Its place is taken, for instance by another request with the same id."""

    default_code = "ALREADY_EXISTS"


class FailedPrecondition(PagedKvError):
    """The request is right, and the service (or this client) is not in a state to do it."""

    default_code = "FAILED_PRECONDITION"


class ResourceExhausted(PagedKvError):
    """A limit was met; when `retry_after` is set, waiting helps."""

    default_code = "RESOURCE_EXHAUSTED"


class Unavailable(PagedKvError):
    """Nobody is there to do it now. Reason UNREACHABLE: no service answers at the address, which the message names."""

    default_code = "UNAVAILABLE"


class DeadlineExceeded(PagedKvError):
    """The call's timeout passed before its end."""

    default_code = "DEADLINE_EXCEEDED"


class Cancelled(PagedKvError):
    """The call was ended early: by the service, or because the client was closed meanwhile."""

    default_code = "CANCELLED"


class Aborted(PagedKvError):
    """The service gave the call up, for instance because its stream was not read."""

    default_code = "ABORTED"


class Internal(PagedKvError):
    """The service broke its contract, or answered with a code that has no class of its own (see `code`)."""

    default_code = "INTERNAL"


_CLASSES: dict[str, type[PagedKvError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,  # gRPC's narrower kind of it
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": FailedPrecondition,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "ABORTED": Aborted,
}

_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}

# gRPC itself, on either side, refuses a message over the limit in these words and with no details.
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")


class _FailedCall(Protocol):
    """What a failed call of grpc and of grpc.aio have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


def from_rpc_error(error: grpc.RpcError, address: str, timeout: float | None) -> PagedKvError:
    """The tree's error for a failed call to `address` that had `timeout` seconds (None: no limit)."""
    call = cast("_FailedCall", error)
    code = call.code().name
    message = call.details() or "the service gave no message"
    kind = _CLASSES.get(code, Internal)
    info, retry_after = _details(error)
    if info is not None:
        numbers = {key: _number(value) for key, value in info.metadata.items()}
        return kind(info.reason, message, numbers=numbers, retry_after=retry_after, code=code)
    # No details: the words are gRPC's own, or a proxy's.
    if kind is Unavailable:
        return Unavailable("UNREACHABLE", f"no service answers at {address} ({message})", code=code)
    if kind is DeadlineExceeded and timeout is not None:
        return DeadlineExceeded(
            code, f"{address} did not finish within {timeout:g} s", numbers={"timeout": timeout}, code=code
        )
    if kind is ResourceExhausted and (sizes := _TOO_LARGE.search(message)):
        size, limit = map(int, sizes.groups())
        return ResourceExhausted(
            "MESSAGE_TOO_LARGE",
            f"a message of {size} bytes is over the limit of {limit}",
            numbers={"size": size, "limit": limit},
            code=code,
        )
    return kind(code, message, retry_after=retry_after, code=code)


def from_item_error(code: int, reason: str, message: str, metadata: Mapping[str, str], delay: float) -> PagedKvError:
    """The tree's error for one item of a call that was OK. code: google.rpc.Code; delay: seconds, 0: none was given."""
    name = _CODE_NAMES.get(code, "UNKNOWN")
    numbers = {key: _number(value) for key, value in metadata.items()}
    return _CLASSES.get(name, Internal)(reason, message, numbers=numbers, retry_after=delay or None, code=name)


def _details(error: grpc.RpcError) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """ErrorInfo and the seconds of RetryInfo, where the call carries them."""
    try:
        # Details that cannot be read, or contradict the status, count as absent: the status itself still tells.
        status = cast("status_pb2.Status | None", rpc_status.from_call(cast("grpc.Call", error)))
    except (DecodeError, ValueError):
        return None, None
    info: error_details_pb2.ErrorInfo | None = None
    retry_after: float | None = None
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return info, retry_after


def _number(text: str) -> Number:
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text
