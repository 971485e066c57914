"""The border of every rpc of pagedkv: what a handler raises, and what it is called with, gets its status here.

A Refused becomes the status of the error table. Anything else unexpected becomes INTERNAL, with the traceback
in the log and nothing of it on the wire. Nothing leaves as UNKNOWN.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from block_manager_svc.core.errors import InvalidArgument, Refused, ResourceExhausted
from block_manager_svc.rpc.errors import abort, internal_status, status_of

log = structlog.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """max_request_bytes: serialized size up to which a single request is read; gRPC's own limit lies above it."""

    def __init__(self, max_request_bytes: int) -> None:
        self._max_request_bytes = max_request_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/pagedkv."):
            return handler
        # The stubs describe the handlers of the threaded server; those of the asyncio one are coroutines.
        behaviour: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
        assert handler.request_deserializer is not None
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _streaming(method, behaviour), _decode_item(handler.request_deserializer), handler.response_serializer
            )
        decode = _decode_single(handler.request_deserializer, self._max_request_bytes)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _streaming(method, behaviour), decode, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(_single(method, behaviour), decode, handler.response_serializer)


def _decode_single(decode: Callable[[bytes], Any], limit: int) -> Callable[[bytes], Any]:
    """gRPC turns what a deserializer raises into UNKNOWN; so a refusal is returned, and raised by the handler."""

    def read(data: bytes) -> Any:
        if len(data) > limit:
            return ResourceExhausted(
                "MESSAGE_TOO_LARGE",
                f"the request has {len(data)} bytes, the limit is {limit}",
                size=len(data),
                limit=limit,
            )
        try:
            return decode(data)
        except DecodeError as error:
            return _malformed(error)

    return read


def _decode_item(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """In a stream of requests, what the deserializer raises comes out where the handler reads."""

    def read(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            raise _malformed(error) from error

    return read


def _malformed(error: DecodeError) -> InvalidArgument:
    return InvalidArgument(
        "MESSAGE_MALFORMED", f"the request is no message of this contract, or has text that is not UTF-8: {error}"
    )


def _single(method: str, behave: Callable[[Any, _Context], Awaitable[Any]]) -> Callable[[Any, _Context], Any]:
    async def call(request: Any, context: _Context) -> Any:
        try:
            _admit(request)
            return await behave(request, context)
        except Exception as error:
            await _end(method, context, error)

    return call


def _streaming(method: str, behave: Callable[[Any, _Context], Any]) -> Callable[[Any, _Context], Any]:
    """The behaviour is an async generator, or a coroutine that writes to the context."""
    generates = inspect.isasyncgenfunction(behave)

    async def call(request: Any, context: _Context) -> None:
        try:
            _admit(request)
            if generates:
                async for response in behave(request, context):
                    await context.write(response)
            else:
                await behave(request, context)
        except Exception as error:
            await _end(method, context, error)

    return call


def _admit(request: Any) -> None:
    if isinstance(request, Refused):
        raise request


async def _end(method: str, context: _Context, error: Exception) -> None:
    """Turns what a handler raised into the call's status. A cancelled call (CancelledError) never comes here."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, Refused):
        log.info("call refused", method=method, reason=error.reason, message=error.message)
        status = status_of(error)
    elif isinstance(error, grpc.aio.InternalError) or context.cancelled() or context.done():
        # Writing to a caller that has just gone fails; there is nobody to tell.
        raise asyncio.CancelledError from error
    else:
        log.error("unexpected error in a call", method=method, exc_info=error)
        status = internal_status()
    try:
        await abort(context, status)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone
