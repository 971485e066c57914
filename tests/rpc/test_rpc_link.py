"""The service's side of the Attach stream, over a real port: who may speak, and for how long it may be silent."""

from __future__ import annotations

import time

import grpc
import pytest
from rpc_link_calls import Code, expected, finished, generate, goes_on, refused_call
from rpc_link_client import LinkExecutor
from rpc_scripted import running_service, until

from block_manager_svc.manager import Limits
from pagedkv.v1 import executor_link_pb2 as pb


# --- fencing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "named",
    [{"epoch": 0}, {"epoch": 2}, {"service_id": "another"}, {"boot_id": "another"}],
    ids=str,
)
async def test_a_message_that_is_named_otherwise_ends_the_stream(named: dict[str, object]) -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        result = executor.execute(await stream.step())
        await stream.send(result=result, **named)  # type: ignore[arg-type]
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "EPOCH_STALE")
        again = await executor.attach()  # with the numbers as they are
        assert (again.welcome.reset, again.epoch) == (False, stream.epoch)
        async with again.serving():
            assert await finished(call) == expected()


async def test_another_boot_is_kept_out_while_one_is_alive_and_taken_in_after_it() -> None:
    async with running_service(attached=False) as service:
        executor, other = LinkExecutor(service, "a"), LinkExecutor(service, "b")
        stream = await executor.attach()
        call = generate(service)
        await stream.answer()
        refusal = await other.refused_at_attach()
        assert (refusal.code, refusal.reason) == (Code.ALREADY_EXISTS, "EXECUTOR_PRESENT")
        assert (refusal.numbers, refusal.retry_after) == ({"boot_id": "a"}, 1.0)
        await stream.answer()
        stream.call.cancel()
        await until(lambda: service.manager.model is None, "the first is gone")
        await goes_on(service, other, call)


async def test_a_second_stream_of_the_same_boot_takes_over() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        first = await executor.attach()
        call = generate(service)
        await first.answer()
        second = await executor.attach()
        refusal = await first.refusal()
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "ATTACH_REPLACED")
        assert (second.welcome.reset, second.epoch) == (False, first.epoch)
        async with second.serving():
            assert await finished(call) == expected()


async def test_a_refused_step_ends_the_stream_resets_and_calls_go_on() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service, n=2)
        await stream.answer()
        step = await stream.step()
        await stream.send(refusal=pb.Refusal(step_id=step.step_id, reason="BLOCK_MISSING", message="row 0 has none"))
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "STEP_REFUSED")
        assert refusal.numbers == {"step_id": "2", "refusal": "BLOCK_MISSING"}
        assert "row 0 has none" in refusal.message
        await goes_on(service, executor, call, n=2)


async def test_a_service_that_drains_ends_the_stream_and_takes_none() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        await service.manager.drain(0.0)
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "DRAINING")
        refusal = await executor.refused_at_attach()
        assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "DRAINING")


async def test_an_executor_that_says_goodbye_ends_the_stream_in_good_order() -> None:
    async with running_service(attached=False, limits=Limits(executor_grace_s=0.05)) as service:
        stream = await LinkExecutor(service).attach()
        call = generate(service)
        await stream.answer()
        await stream.call.done_writing()
        while await stream.call.read() is not grpc.aio.EOF:
            pass
        assert await stream.call.code() is Code.OK
        refusal = await refused_call(call)
        assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")


# --- silence ----------------------------------------------------------------------------------------------------------
SHORT = Limits(heartbeat_interval_ms=50, silence_limit_ms=300)


async def test_a_stream_without_a_hello_ends() -> None:
    async with running_service(attached=False, limits=SHORT) as service:
        refusal = await LinkExecutor(service).dial().refusal()
        assert (refusal.code, refusal.reason) == (Code.DEADLINE_EXCEEDED, "EXECUTOR_SILENT")
        assert refusal.numbers["limit_s"] == "0.3"


async def test_a_silent_executor_is_given_up_and_calls_go_on_when_it_comes_back() -> None:
    async with running_service(attached=False, limits=SHORT) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        step = await stream.step()
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.DEADLINE_EXCEEDED, "EXECUTOR_SILENT")
        assert float(refusal.numbers["silent_s"]) > float(refusal.numbers["limit_s"]) == 0.3
        executor.execute(step)  # it computed meanwhile
        again = await executor.attach()
        assert not again.welcome.reset
        async with again.serving():
            assert await finished(call) == expected()


async def test_heartbeats_keep_an_executor_alive_that_has_nothing_else_to_say_and_the_service_sends_its_own() -> None:
    limits = Limits(heartbeat_interval_ms=100, silence_limit_ms=1000)
    async with running_service(attached=False, limits=limits) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        step = await stream.step()
        end = time.monotonic() + 2.5 * limits.silence_limit_ms / 1000
        while time.monotonic() < end:  # a long step
            await stream.next()
            await stream.heartbeat()
        assert stream.heartbeats >= 5
        await stream.send(result=executor.execute(step))
        async with stream.serving():
            assert await finished(call) == expected()
