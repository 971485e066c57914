from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from rpc_scripted import refusal_of, request, running_service, until

from block_manager_svc.core import errors
from block_manager_svc.rpc.boundary import Boundary
from block_manager_svc.rpc.errors import code_of, status_of
from pagedkv.v1 import generation_pb2 as pb
from pagedkv.v1 import generation_pb2_grpc

METHOD = "/pagedkv.v1.Test/Call"
KINDS = ("unary_unary", "unary_stream", "stream_stream")


def kinds_of(kind: type[errors.Refused]) -> set[type[errors.Refused]]:
    return {kind}.union(*(kinds_of(below) for below in kind.__subclasses__()))


def test_every_kind_of_refusal_has_a_code() -> None:
    for kind in kinds_of(errors.Refused) - {errors.Refused}:
        assert code_of(kind.__new__(kind)) not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (errors.InvalidArgument("R", "m"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.SequenceNotFound(7), grpc.StatusCode.NOT_FOUND),
        (errors.ModelNotFound("R", "m"), grpc.StatusCode.NOT_FOUND),
        (errors.OutOfBlocks(3, 2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.FailedPrecondition("R", "m"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Unavailable("R", "m"), grpc.StatusCode.UNAVAILABLE),
        (errors.Aborted("R", "m"), grpc.StatusCode.ABORTED),
        (errors.AlreadyExists("R", "m"), grpc.StatusCode.ALREADY_EXISTS),
        (errors.DeadlineExceeded("R", "m"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_codes_follow_the_table(refused: errors.Refused, code: grpc.StatusCode) -> None:
    assert code_of(refused) is code
    assert status_of(refused).code == code.value[0]


def test_a_status_carries_reason_numbers_and_retry_advice() -> None:
    status = status_of(errors.Unavailable("GONE", "it is gone", retry_after=1.5, blocks=2**40, share=0.25))
    info, retry = ErrorInfo(), RetryInfo()
    assert status.message == "it is gone"
    assert [detail.Unpack(into) for detail, into in zip(status.details, (info, retry), strict=True)] == [True, True]
    assert (info.domain, info.reason) == ("pagedkv", "GONE")
    assert dict(info.metadata) == {"blocks": str(2**40), "share": "0.25"}
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_where_waiting_does_not_help_there_is_no_retry_advice() -> None:
    assert len(status_of(errors.InvalidArgument("R", "m")).details) == 1


@asynccontextmanager
async def serving(kind: str, behave: Callable[..., Any]) -> AsyncIterator[grpc.aio.Channel]:
    """One method behind the boundary, with GenerateRequest in and GenerateResponse out."""
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(
        behave,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server = grpc.aio.server(interceptors=(Boundary(1000),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pagedkv.v1.Test", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str, data: bytes = b"") -> None:
    method = getattr(channel, kind)(METHOD)
    if kind == "unary_unary":
        await method(data)
    elif kind == "unary_stream":
        [_ async for _ in method(data)]
    else:
        [_ async for _ in method(iter([data]))]


def raising(kind: str, error: Exception, *, generator: bool = False) -> Callable[..., Any]:
    """A handler that reads what it is sent, then raises."""

    async def coroutine(request: Any, context: Any) -> None:
        if kind == "stream_stream":
            async for _ in request:
                pass
        raise error

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse()
        await coroutine(request, context)

    return generate if generator else coroutine


@pytest.mark.parametrize(
    ("kind", "generator"), [*((kind, False) for kind in KINDS), ("unary_stream", True), ("stream_stream", True)]
)
async def test_an_unexpected_error_is_internal_with_its_traceback_in_the_log_only(
    kind: str, generator: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving(kind, raising(kind, ZeroDivisionError("a secret detail"), generator=generator)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
    refusal = refusal_of(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in str(caught.value)
    captured = capfd.readouterr()
    logged = captured.out + captured.err + caplog.text
    assert "a secret detail" in logged
    assert "ZeroDivisionError" in logged


@pytest.mark.parametrize(
    ("kind", "generator"), [*((kind, False) for kind in KINDS), ("unary_stream", True), ("stream_stream", True)]
)
async def test_a_refusal_gets_the_status_of_the_table(kind: str, generator: bool) -> None:
    refused = errors.ResourceExhausted("FULL", "no room", retry_after=2.0, room=0)
    async with serving(kind, raising(kind, refused, generator=generator)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
    refusal = refusal_of(caught.value)
    assert (refusal.code, refusal.reason, refusal.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL", "no room")
    assert (refusal.numbers, refusal.retry_after) == ({"room": "0"}, 2.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x50x"], ids=["utf-8", "tag", "short"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(kind: str, data: bytes) -> None:
    handled = asyncio.Event()

    async def behave(request: Any, context: Any) -> None:
        if kind == "stream_stream":
            async for _ in request:
                pass
        handled.set()

    async with serving(kind, behave) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, data)
    refusal = refusal_of(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_MALFORMED")
    assert not handled.is_set()


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_single_request_over_the_limit_is_refused_before_it_is_read(kind: str) -> None:
    async def behave(request: Any, context: Any) -> None:
        raise AssertionError("must not be called")

    async with serving(kind, behave) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, b"\xff" * 1001)
    refusal = refusal_of(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert refusal.numbers == {"size": "1001", "limit": "1000"}


async def test_a_handlers_own_abort_passes() -> None:
    async def behave(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone")

    async with serving("unary_unary", behave) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "gone")


async def test_cancelling_reaches_the_handler_as_cancellation() -> None:
    waits, cancelled = asyncio.Event(), asyncio.Event()

    async def behave(request: Any, context: Any) -> None:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving("unary_stream", behave) as channel:
        under_way = channel.unary_stream(METHOD)(b"")
        await asyncio.wait_for(waits.wait(), 10)
        under_way.cancel()
        await asyncio.wait_for(cancelled.wait(), 10)


async def test_text_that_is_not_utf8_is_an_invalid_argument_of_generate() -> None:
    async with running_service() as service:
        method = service.channel.unary_stream("/pagedkv.v1.GenerationService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in method(b"\x12\x02\xff\xfe")]
        assert refusal_of(caught.value).reason == "MESSAGE_MALFORMED"


async def test_what_a_refusal_echoes_is_cut_so_that_its_details_reach_the_caller() -> None:
    async with running_service() as service:
        message = request()
        message.model = "x" * 5000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in service.generation.Generate(message)]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert refusal.numbers == {"model": "x" * 99 + "…", "served": "tiny"}
        assert refusal.message.startswith("no model 'xxx")
        assert len(refusal.message) == 1000


async def test_a_caller_that_goes_while_it_is_refused_leaves_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with running_service(write_timeout=0.05, num_blocks=8192) as service:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            stub.Generate(request(n=64, temperature=1, logprobs=20))
            await until(lambda: service.executor.plans, "the call is admitted")
            await service.all_blocks_back()  # cut off, the status waits behind what is not read
        await service.server.stop()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
