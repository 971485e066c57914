"""Exactly once: how an executor that attaches again goes on, by the table of docs/protocol.md."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from rpc_link_calls import NEW, PROMPT, cut, expected, finished, generate
from rpc_link_client import NUM_BLOCKS, LinkExecutor
from rpc_scripted import running_service

from block_manager_svc.manager import Limits
from pagedkv.v1 import executor_link_pb2 as pb


async def test_a_step_that_did_not_arrive_is_sent_again_byte_for_byte() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service, n=2)
        for _ in range(3):
            await stream.answer()
        lost = await stream.step()
        await cut(service, stream)
        again = await executor.attach()
        assert (again.welcome.reset, again.welcome.results_durable_through, again.epoch) == (False, 3, stream.epoch)
        sent_again = await again.step()
        assert sent_again.SerializeToString() == lost.SerializeToString()
        await again.send(result=executor.execute(sent_again))
        async with again.serving():
            assert await finished(call) == expected(n=2)


async def test_a_result_that_did_not_arrive_is_taken_when_it_is_sent_again_and_counts_once() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        await stream.answer()
        executor.execute(await stream.step())  # and its result is lost
        await cut(service, stream)
        again = await executor.attach()
        assert (again.welcome.reset, again.welcome.results_durable_through) == (False, 1)
        kept = executor.kept[2]
        for _ in range(3):
            await again.send(result=kept)
        step = await again.step()
        assert (step.step_id, step.results_durable_through) == (3, 2)
        await again.send(result=kept)  # long after it was durable
        await again.send(result=executor.execute(step))
        async with again.serving():
            assert await finished(call) == expected()
        assert service.manager.activity().steps == NEW


async def test_a_step_that_still_computes_while_its_executor_attaches_again_is_not_sent_again() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        result = executor.execute(await stream.step())
        hello = executor.hello()
        hello.completed = 0
        await cut(service, stream)
        again = await executor.attach(hello)
        assert not again.welcome.reset
        await again.send(result=result)
        step = await again.step()
        assert step.step_id == 2
        await again.send(result=executor.execute(step))
        async with again.serving():
            assert await finished(call) == expected()


async def test_the_executor_is_told_what_is_durable_with_the_next_step_or_heartbeat() -> None:
    async with running_service(attached=False, limits=Limits(heartbeat_interval_ms=50)) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        for step_id in range(1, NEW + 1):
            step = await stream.answer()
            assert (step.step_id, step.results_durable_through) == (step_id, step_id - 1)
        await finished(call)
        while executor.kept:
            assert (await stream.next()).WhichOneof("message") == "heartbeat"
        assert executor.durable == NEW


async def test_an_executor_that_starts_anew_is_reset_and_calls_recompute_and_go_on() -> None:
    async with running_service(attached=False) as service:
        old = LinkExecutor(service, "a")
        stream = await old.attach()
        call = generate(service, n=3)
        for _ in range(4):
            await stream.answer()
        await cut(service, stream)
        new = LinkExecutor(service, "b")
        again = await new.attach()
        assert (again.welcome.reset, again.epoch) == (True, stream.epoch + 1)
        async with again.serving():
            assert await finished(call) == expected(n=3)


WRONG_POSITIONS: dict[str, Callable[[LinkExecutor, pb.Hello], object]] = {
    "ahead of what was sent": lambda executor, hello: setattr(hello, "accepted", executor.accepted + 2),
    "behind what it has completed": lambda executor, hello: setattr(hello, "accepted", 1),
    "another digest": lambda executor, hello: setattr(hello, "digest", bytes(32)),
    "no digest": lambda executor, hello: setattr(hello, "digest", b""),
    "an epoch before": lambda executor, hello: setattr(executor, "epoch", executor.epoch - 1),
    "another service": lambda executor, hello: setattr(executor, "service_id", "another"),
}


@pytest.mark.parametrize("move", WRONG_POSITIONS.values(), ids=WRONG_POSITIONS)
async def test_the_same_boot_at_another_place_than_it_was_left_is_reset(
    move: Callable[[LinkExecutor, pb.Hello], object],
) -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service, n=2)
        for _ in range(3):
            await stream.answer()
        await stream.step()
        await cut(service, stream)
        hello = executor.hello()
        move(executor, hello)
        hello.completed = min(hello.completed, hello.accepted)
        again = await executor.attach(hello)
        assert (again.welcome.reset, again.epoch) == (True, stream.epoch + 1)
        async with again.serving():
            assert await finished(call) == expected(n=2)


async def test_reset_after_reset_no_token_changes_and_no_block_is_lost() -> None:
    """Each boot lives for two steps."""
    async with running_service(attached=False) as service:
        calls: list[asyncio.Task[dict[int, list[int]]]] = []
        for boot in range(4):
            stream = await LinkExecutor(service, f"boot {boot}").attach()
            calls = calls or [generate(service, n=3), generate(service, [*PROMPT, 3, 4, 5, 6], seed=5)]
            await stream.answer()
            await stream.answer()
            assert service.manager.audit() == []
            await cut(service, stream)
        last = await LinkExecutor(service, "the last").attach()
        async with last.serving():
            assert await finished(calls[0]) == expected(n=3)
            assert await finished(calls[1]) == expected([*PROMPT, 3, 4, 5, 6], seed=5)
        states = service.manager.page_table.states()  # type: ignore[union-attr]
        assert states.null + states.free + states.cached == NUM_BLOCKS
