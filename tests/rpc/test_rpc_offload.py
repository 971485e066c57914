"""Work in threads for calls that may be cancelled, and prompts that are refused before any work."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from rpc_scripted import MAX_CONTEXT, refusal_of, request, running_service, until

from block_manager_svc.rpc.offload import Offload
from block_manager_svc.text.model import TextModel


async def test_work_gives_its_result_and_raises_its_error() -> None:
    offload = Offload(1)
    assert await offload.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await offload.run(lambda: 1 // 0)
    assert await offload.run(lambda: 8) == 8


async def test_a_cancelled_caller_keeps_its_place_until_its_thread_ends_and_waiting_work_never_begins() -> None:
    offload, go_on = Offload(1), threading.Event()
    began: list[str] = []

    def work(name: str) -> None:
        began.append(name)
        assert go_on.wait(30)

    running = asyncio.ensure_future(offload.run(lambda: work("running")))
    await until(lambda: began == ["running"], "the first has begun")
    waiting = asyncio.ensure_future(offload.run(lambda: work("waiting")))
    after = asyncio.ensure_future(offload.run(lambda: work("after")))
    await asyncio.sleep(0)
    for caller in (running, waiting):
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert began == ["running"]
    go_on.set()
    await after
    assert began == ["running", "after"]


@pytest.mark.parametrize("kind", ["text", "chat", "messages"])
async def test_a_prompt_that_can_never_fit_is_refused_before_it_is_tokenized(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(TextModel, "encode", never)
    monkeypatch.setattr(TextModel, "encode_chat", never)
    prompts = {
        "text": "a" * 1_000_000,
        "chat": [("user", "a" * 1_000_000)],
        "messages": [("user", "")] * (MAX_CONTEXT + 1),
    }
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.generation.Generate(request(prompts[kind])).read()
        refusal = refusal_of(refused.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
        assert refusal.numbers["max_context"] == str(MAX_CONTEXT)
