"""Calls under way while an executor on paper comes, errs and goes; and the tokens that are right."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from rpc_link_client import LinkExecutor, LinkStream
from rpc_scripted import DEADLINE_S, VOCAB, Refusal, Service, refusal_of, request, until
from support.paper_executor import undisturbed

from pagedkv.v1 import block_manager_pb2, generation_pb2

Code = grpc.StatusCode
PROMPT = [7, 0, VOCAB - 1, 9, 12, 5]
SEED = 11
NEW = 9


def expected(prompt: list[int] = PROMPT, n: int = 1, seed: int = SEED) -> dict[int, list[int]]:
    return {
        sample: undisturbed(prompt, NEW, seed=seed, sample=sample, vocab=VOCAB, stop=frozenset()) for sample in range(n)
    }


async def _tokens(service: Service, message: generation_pb2.GenerateRequest) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    async for response in service.generation.Generate(message):
        for sample, token in zip(response.sample, response.token_id, strict=True):
            out.setdefault(sample, []).append(token)
    return out


def generate(
    service: Service, prompt: list[int] = PROMPT, *, seed: int = SEED, **sampling: object
) -> asyncio.Task[dict[int, list[int]]]:
    """A call under way; it gives each sample's tokens."""
    message = request(prompt, max_tokens=NEW, seed=seed, temperature=1.0, ignore_eos=True, **sampling)
    return asyncio.create_task(_tokens(service, message))


async def finished(call: asyncio.Task[dict[int, list[int]]]) -> dict[int, list[int]]:
    return await asyncio.wait_for(call, DEADLINE_S)


async def refused_call(call: asyncio.Task[dict[int, list[int]]]) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finished(call)
    return refusal_of(caught.value)


async def models(service: Service) -> int:
    return len((await service.generation.ListModels(generation_pb2.ListModelsRequest())).models)


async def goes_on(
    service: Service, executor: LinkExecutor, call: asyncio.Task[dict[int, list[int]]], n: int = 1
) -> None:
    """The executor comes back, is reset, and the call finishes with the tokens it would have had undisturbed."""
    epoch = executor.epoch
    again = await executor.attach()
    assert again.welcome.reset
    assert again.epoch > epoch
    async with again.serving():
        assert await finished(call) == expected(n=n)
        assert list((await service.reads.Audit(block_manager_pb2.AuditRequest())).violations) == []


async def cut(service: Service, stream: LinkStream) -> None:
    stream.call.cancel()
    await until(lambda: service.manager.model is None, "the stream is gone")
