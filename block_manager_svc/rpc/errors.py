"""How a refusal leaves the service: gRPC status code, google.rpc.ErrorInfo, RetryInfo. One table for all rpcs."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from block_manager_svc.core import errors

DOMAIN = "pagedkv"
# Details travel as metadata, of which gRPC takes 8 KiB; what a caller sent may be echoed in them.
MAX_MESSAGE_CHARS = 1000
MAX_NUMBER_CHARS = 100

_CODES: dict[type[errors.Refused], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
}


def code_of(refused: errors.Refused) -> grpc.StatusCode:
    """The code of the nearest kind in the table."""
    return next(_CODES[kind] for kind in type(refused).__mro__ if kind in _CODES)


def status_of(refused: errors.Refused) -> Status:
    """google.rpc.Status: ErrorInfo with the numbers as strings, and RetryInfo where waiting helps."""
    status = Status(code=code_of(refused).value[0], message=_cut(refused.message, MAX_MESSAGE_CHARS))
    info = ErrorInfo(reason=refused.reason, domain=DOMAIN, metadata=numbers_of(refused))
    status.details.add().Pack(info)
    if (delay := retry_delay(refused)) is not None:
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    return status


def numbers_of(refused: errors.Refused) -> dict[str, str]:
    return {name: _cut(str(value), MAX_NUMBER_CHARS) for name, value in refused.numbers.items()}


def retry_delay(refused: errors.Refused) -> Duration | None:
    """None: waiting does not help."""
    if refused.retry_after is None:
        return None
    delay = Duration()
    delay.FromNanoseconds(round(refused.retry_after * 1e9))
    return delay


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def internal_status() -> Status:
    """For what nobody foresaw. The service's log has the traceback; the caller gets none of it."""
    status = Status(
        code=grpc.StatusCode.INTERNAL.value[0], message="an error inside the service: its log has the traceback"
    )
    status.details.add().Pack(ErrorInfo(reason="INTERNAL", domain=DOMAIN))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], status: Status) -> NoReturn:
    """Ends the call with this status. Raises grpc.aio.AbortError, which the handler must let pass."""
    parts = rpc_status.to_status(status)
    await context.abort(parts.code, parts.details, parts.trailing_metadata)
