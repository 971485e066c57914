"""AsyncClient: the same contract, awaited."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable

import pytest
from google.rpc import code_pb2
from sdk_scripted import NO_EXECUTOR, Scripted, end, endless, messages, refusing, row, silent, wait_until

from pagedkv import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from pagedkv.v1 import block_manager_pb2 as bm
from pagedkv.v1 import generation_pb2 as gen


@pytest.fixture
async def aclient(service: Scripted) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.address) as client:
        yield client


async def idle(service: Scripted) -> None:
    await asyncio.to_thread(service.wait_idle)


async def test_pieces_come_one_by_one_and_usage_at_the_end(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = messages(row("日"), row("本", finish=gen.FINISH_REASON_STOP), end())
    stream = aclient.generate("x")
    assert stream.usage is None
    assert [piece.text async for piece in stream] == ["日", "本"]
    assert stream.usage is not None
    assert stream.usage.cached_tokens == 4


async def test_complete_puts_samples_together(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = messages(
        gen.GenerateResponse(sample=[1, 0, 2], token_id=[4, 5, 6], text=["b", "a", "c"], finish_reason=[1, 0, 2]),
        gen.GenerateResponse(sample=[0], token_id=[7], text=["A"], finish_reason=[1]),
        end(),
    )
    completion = await aclient.complete("x", n=3)
    assert [sample.text for sample in completion.samples] == ["aA", "b", "c"]


async def test_calls_run_at_the_same_time(service: Scripted, aclient: AsyncClient) -> None:
    completions = await asyncio.gather(*(aclient.complete(str(each)) for each in range(20)))
    assert [each.text for each in completions] == ["Paris."] * 20
    assert {request.text for request in service.requests("Generate")} == {str(each) for each in range(20)}


async def test_reads_return_what_the_blocking_client_returns(service: Scripted, aclient: AsyncClient) -> None:
    def blocking() -> list[object]:
        with Client(service.address) as client:
            return [
                client.models(),
                client.pool(),
                client.sequences(),
                client.tables([11]),
                client.sequence(11),
                client.match([[1]]),
                client.slots([11, 2**40], [0, 0], [1, 0]),
                client.audit(),
                client.reset_cache(),
                client.healthy(),
            ]

    assert [
        await aclient.models(),
        await aclient.pool(),
        await aclient.sequences(),
        await aclient.tables([11]),
        await aclient.sequence(11),
        await aclient.match([[1]]),
        await aclient.slots([11, 2**40], [0, 0], [1, 0]),
        await aclient.audit(),
        await aclient.reset_cache(),
        await aclient.healthy(),
    ] == await asyncio.to_thread(blocking)
    tables, slots = service.requests("GetBlockTables")[2:]
    assert (tables, list(slots.upto)) == (bm.GetBlockTablesRequest(sequence=[11]), [1, 0])


async def test_break_cancels_the_call(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = endless
    async for _ in aclient.generate("x"):
        break
    await idle(service)


async def test_leaving_the_with_block_cancels_the_call(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = endless
    async with aclient.generate("x") as stream:
        await anext(stream)
    await idle(service)
    assert [piece async for piece in stream] == []
    assert stream.usage is None


async def test_dropping_an_unread_stream_cancels_the_call(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = silent
    stream = aclient.generate("x")
    await asyncio.to_thread(service.wait_started)
    del stream
    gc.collect()
    await idle(service)


async def test_cancelling_the_task_cancels_the_call(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = silent
    task = asyncio.create_task(aclient.complete("x"))
    await asyncio.to_thread(service.wait_started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(service)


async def test_asyncio_timeout_around_a_stream_cancels_the_call(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = endless
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await aclient.complete("x")
    await idle(service)


async def test_cancel_ends_an_iteration_that_another_task_waits_in(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = silent
    stream = aclient.generate("x")

    async def read() -> list[object]:
        return [piece async for piece in stream]

    reader = asyncio.create_task(read())
    await asyncio.to_thread(service.wait_started)
    stream.cancel()
    assert await reader == []
    await idle(service)


@pytest.mark.parametrize("call", [lambda client: client.complete("x"), lambda client: client.pool()])
async def test_closing_the_client_ends_open_calls_with_cancelled(
    service: Scripted, aclient: AsyncClient, call: Callable[[AsyncClient], asyncio.Future[object]]
) -> None:
    service.generate = silent
    service.unary["GetPool"] = lambda request, context: next(silent(request, context), bm.GetPoolResponse())
    reader = asyncio.ensure_future(call(aclient))
    await asyncio.to_thread(wait_until, lambda: bool(service.calls), "the call has arrived")
    await aclient.close()
    with pytest.raises(Cancelled):
        await reader
    with pytest.raises(FailedPrecondition, match="CLIENT_CLOSED"):
        await aclient.models()


async def test_a_refusal_carries_its_details(service: Scripted, aclient: AsyncClient) -> None:
    refusal = refusing(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after=0.25, waiting=9)
    service.generate = refusal
    service.unary["GetPool"] = refusal
    for call in (aclient.complete("x"), aclient.pool()):
        with pytest.raises(ResourceExhausted) as caught:
            await call
        assert (caught.value.reason, caught.value.numbers, caught.value.retry_after) == (
            "QUEUE_FULL",
            {"waiting": 9},
            0.25,
        )


async def test_reads_are_tried_again_and_generate_is_not(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = NO_EXECUTOR
    service.unary["GetPool"] = NO_EXECUTOR
    with pytest.raises(Unavailable, match="EXECUTOR_UNAVAILABLE"):
        await aclient.pool()
    with pytest.raises(Unavailable, match="EXECUTOR_UNAVAILABLE"):
        await aclient.complete("x")
    assert (len(service.requests("GetPool")), len(service.requests("Generate"))) == (4, 1)


async def test_timeouts(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = endless
    service.unary["GetPool"] = lambda request, context: next(silent(request, context), bm.GetPoolResponse())
    with pytest.raises(DeadlineExceeded):
        await aclient.complete("x", timeout=0.1)
    with pytest.raises(DeadlineExceeded):
        await aclient.pool(timeout=0.1)
    await idle(service)


async def test_a_refused_connection_names_the_address(closed_port: str) -> None:
    async with AsyncClient(closed_port) as client:
        with pytest.raises(Unavailable, match=closed_port):
            await client.pool()
        with pytest.raises(Unavailable, match=closed_port):
            await client.complete("x")
        assert not await client.healthy()


async def test_broken_replies_are_internal_and_end_the_call(service: Scripted, aclient: AsyncClient) -> None:
    service.generate = messages(row("x", finish=gen.FINISH_REASON_STOP))
    with pytest.raises(Internal, match="STREAM_INCOMPLETE"):
        await aclient.complete("x")
    service.generate = messages(gen.GenerateResponse(sample=[0], token_id=[1]), end())
    with pytest.raises(Internal, match="REPLY_INVALID"):
        await aclient.complete("x")
    await idle(service)


async def test_what_cannot_be_sent_is_refused_at_once(service: Scripted, aclient: AsyncClient) -> None:
    with pytest.raises(InvalidArgument, match="PROMPT_MISSING"):
        aclient.generate()
    assert service.calls == []


def test_a_client_may_be_made_outside_of_a_loop(service: Scripted) -> None:
    client = AsyncClient(service.address)
    with pytest.raises(RuntimeError, match="no running event loop"):
        client.generate("x")

    async def use() -> str:
        async with client:
            return (await client.complete("x")).text

    assert asyncio.run(use()) == "Paris."


@pytest.mark.filterwarnings("error")
def test_a_stream_that_outlives_its_loop_is_dropped_quietly(
    service: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    async def leak() -> object:
        client = AsyncClient(service.address)
        stream = client.generate("x")
        await anext(stream)
        return stream

    service.generate = endless
    stream = asyncio.run(leak())
    del stream
    gc.collect()
    assert "Exception ignored" not in capsys.readouterr().err
