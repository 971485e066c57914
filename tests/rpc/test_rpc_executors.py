"""Executors that come after one another, from the caller's side: what its call lives through, and what ends it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_link_client import BLOCK_SIZE, LinkExecutor, LinkStream
from rpc_scripted import DEADLINE_S, VOCAB, Refusal, Service, refusal_of, request, running_service, until
from support.paper_executor import undisturbed

from block_manager_svc.manager import MAX_FRUITLESS, Limits
from pagedkv.v1 import executor_link_pb2 as pb
from pagedkv.v1 import generation_pb2

Code = grpc.StatusCode
PROMPT = [7, 0, VOCAB - 1, 9, 12, 5]
SEED = 11
NEW = 9


def expected(count: int = NEW) -> list[int]:
    return undisturbed(PROMPT, count, seed=SEED, sample=0, vocab=VOCAB, stop=frozenset())


class Call:
    """A call under way, and what it has got."""

    def __init__(self, service: Service, **sampling: object) -> None:
        self.tokens: list[int] = []
        self.reasons: list[int] = []
        message = request(PROMPT, seed=SEED, temperature=1.0, ignore_eos=True, **sampling)
        self._task = asyncio.create_task(self._run(service, message))

    async def _run(self, service: Service, message: generation_pb2.GenerateRequest) -> None:
        async for response in service.generation.Generate(message):
            self.tokens += response.token_id
            self.reasons += filter(None, response.finish_reason)

    @property
    def done(self) -> bool:
        return self._task.done()

    async def finished(self) -> list[int]:
        await asyncio.wait_for(self._task, DEADLINE_S)
        return self.tokens

    async def refused(self) -> Refusal:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.finished()
        return refusal_of(caught.value)


async def cut(service: Service, stream: LinkStream) -> None:
    stream.call.cancel()
    await until(lambda: service.manager.model is None, "the stream is gone")


async def lose_a_step(service: Service, stream: LinkStream, way: str) -> None:
    """The executor refuses the next step, or dies of it."""
    step = await stream.step()
    if way == "dies":
        await cut(service, stream)
    else:
        await stream.send(refusal=pb.Refusal(step_id=step.step_id, reason="BLOCK_MISSING", message="row 0 has none"))
        assert (await stream.refusal()).reason == "STEP_REFUSED"


# --- steps without a result -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["refuses", "dies"])
async def test_a_call_whose_step_fails_again_and_again_ends_and_those_behind_it_are_answered(way: str) -> None:
    async with running_service(attached=False, limits=Limits(max_running=1)) as service:
        stream = await LinkExecutor(service, "boot 0").attach()
        doomed = Call(service, max_tokens=NEW)
        await until(lambda: service.manager.activity().running, "the first call runs")
        behind = Call(service, max_tokens=NEW)
        await until(lambda: service.manager.activity().waiting, "the second waits")
        for boot in range(1, MAX_FRUITLESS + 1):
            assert not doomed.done
            await lose_a_step(service, stream, way)
            stream = await LinkExecutor(service, f"boot {boot}" if way == "dies" else "boot 0").attach()
            assert stream.welcome.reset
        refusal = await doomed.refused()
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "STEP_FAILED")
        assert refusal.numbers == {"tries": str(MAX_FRUITLESS)}
        assert doomed.tokens == []
        async with stream.serving():
            assert await behind.finished() == expected()
            assert await Call(service, max_tokens=NEW).finished() == expected()


async def test_a_result_between_makes_lost_steps_count_anew() -> None:
    async with running_service(attached=False) as service:
        stream = await LinkExecutor(service, "first").attach()
        call = Call(service, max_tokens=NEW)
        for boot in range(3 * (MAX_FRUITLESS - 1)):
            if boot % (MAX_FRUITLESS - 1) == 0:
                await stream.answer()
            await lose_a_step(service, stream, "dies")
            stream = await LinkExecutor(service, f"boot {boot}").attach()
        async with stream.serving():
            assert await call.finished() == expected()


# --- another model, another pool ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fingerprint", [b"one", b"another", b""])
async def test_a_call_goes_on_with_the_same_model_only_whatever_its_name(fingerprint: bytes) -> None:
    async with running_service(attached=False) as service:
        stream = await LinkExecutor(service, "a", fingerprint=b"one").attach()
        call = Call(service, max_tokens=NEW)
        await stream.answer()
        await cut(service, stream)
        stream = await LinkExecutor(service, "b", fingerprint=fingerprint).attach()
        async with stream.serving():
            if fingerprint == b"one":
                assert await call.finished() == expected()
            else:
                refusal = await call.refused()
                assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "MODEL_CHANGED")
                assert call.tokens == expected()[: len(call.tokens)]
                assert await Call(service, max_tokens=NEW).finished() == expected()


async def test_a_smaller_pool_clamps_a_call_without_max_tokens_and_ends_one_that_asked_for_more() -> None:
    usable = 7
    room = usable * BLOCK_SIZE + 1 - len(PROMPT)  # the last token needs no slot
    async with running_service(attached=False) as service:
        stream = await LinkExecutor(service, "a").attach()
        open_ended = Call(service)
        fits, too_long = Call(service, max_tokens=room), Call(service, max_tokens=room + 1)
        while service.manager.activity().running < 3:
            await stream.answer()
        await stream.answer()
        await cut(service, stream)
        stream = await LinkExecutor(service, "b", num_blocks=1 + usable).attach()
        async with stream.serving():
            refusal = await too_long.refused()
            assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "PROMPT_EXCEEDS_POOL")
            assert refusal.numbers["pool_blocks"] == str(usable)
            for call in (open_ended, fits):
                assert await call.finished() == expected(room)
                assert call.reasons == [generation_pb2.FINISH_REASON_LENGTH]


# --- draining -------------------------------------------------------------------------------------------------------


async def test_an_executor_may_come_back_while_calls_are_left_to_drain_and_finishes_them() -> None:
    async with running_service(attached=False) as service:
        stream = await LinkExecutor(service, "a").attach()
        call = Call(service, max_tokens=NEW)
        await stream.answer()
        drain = asyncio.create_task(service.server.drain(grace=DEADLINE_S))
        await until(lambda: service.manager.draining, "it drains")
        await cut(service, stream)
        stream = await LinkExecutor(service, "b").attach()
        health = health_pb2_grpc.HealthStub(service.channel)
        for name in ("", "pagedkv.v1.GenerationService"):
            status = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await Call(service, max_tokens=1).refused()).reason == "DRAINING"
        assert not drain.done()
        for _ in range(NEW - 1):
            await stream.answer()
        assert await call.finished() == expected()
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "DRAINING")
        await asyncio.wait_for(drain, DEADLINE_S)
