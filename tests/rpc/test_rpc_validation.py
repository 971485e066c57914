"""Every field of a GenerateRequest, at and past the ends of its range: the answer, and that nothing changed."""

from __future__ import annotations

import math

import grpc
import pytest
from rpc_scripted import MAX_CONTEXT, TEXT_FILES, VOCAB, Service, refusal_of, request, running_service, until

from block_manager_svc.manager import Limits
from block_manager_svc.rpc.sampling import read_sampling
from pagedkv.v1 import block_manager_pb2
from pagedkv.v1 import generation_pb2 as pb

BAD, RANGE, TOKEN = grpc.StatusCode.INVALID_ARGUMENT, "PARAMETER_OUT_OF_RANGE", "TOKEN_OUT_OF_RANGE"
EXHAUSTED, PRECONDITION = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION
MAX_U32 = 2**32 - 1
TEXT = "Reading never copies."


async def refused(service: Service, message: pb.GenerateRequest) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """The refusal of a call, after making sure that it changed nothing."""
    before = await observed(service)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in service.generation.Generate(message)]
    assert await observed(service) == before
    refusal = refusal_of(caught.value)
    return refusal.code, refusal.reason, refusal.numbers


async def observed(service: Service) -> tuple[object, ...]:
    audit = await service.reads.Audit(block_manager_pb2.AuditRequest())
    pool = await service.reads.GetPool(block_manager_pb2.GetPoolRequest())
    sequences = await service.reads.ListSequences(block_manager_pb2.ListSequencesRequest())
    assert list(audit.violations) == []
    return audit, pool, sequences


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("max_tokens", 0, RANGE),
        ("max_tokens", MAX_CONTEXT + 1, RANGE),
        ("max_tokens", MAX_U32, RANGE),
        ("temperature", -0.001, RANGE),
        ("temperature", 100.01, RANGE),
        ("temperature", math.nan, RANGE),
        ("temperature", math.inf, RANGE),
        ("temperature", -math.inf, RANGE),
        ("top_p", 0.0, RANGE),
        ("top_p", -0.5, RANGE),
        ("top_p", 1.001, RANGE),
        ("top_p", math.nan, RANGE),
        ("top_p", math.inf, RANGE),
        ("stop", ["a"] * 17, RANGE),
        ("stop", [""], RANGE),
        ("stop", ["ok", "x" * 1025], RANGE),
        ("stop_token_ids", [1] * 65, RANGE),
        ("stop_token_ids", [VOCAB], TOKEN),
        ("stop_token_ids", [MAX_U32], TOKEN),
        ("logprobs", 21, RANGE),
        ("logprobs", MAX_U32, RANGE),
        ("n", 0, RANGE),
        ("n", 65, RANGE),
        ("n", MAX_U32, RANGE),
    ],
)
async def test_a_parameter_out_of_its_range_is_refused_by_name(field: str, value: object, reason: str) -> None:
    async with running_service() as service:
        code, said, numbers = await refused(service, request(TEXT, **{field: value}))
        assert (code, said, numbers["field"]) == (BAD, reason, f"sampling.{field}")
        assert {"minimum", "maximum", "value"} <= numbers.keys() or {"token_id", "vocab_size"} <= numbers.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", MAX_CONTEXT),
        ("temperature", 0.0),
        ("temperature", -0.0),
        ("temperature", 100.0),
        ("top_p", 1.0),
        ("top_p", 1e-30),
        ("top_k", 0),
        ("top_k", 1),
        ("top_k", MAX_U32),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("stop", []),
        ("stop", ["a"]),
        ("stop", ["🙂" * 1024] * 16),
        ("stop_token_ids", []),
        ("stop_token_ids", [0, VOCAB - 1]),
        ("stop_token_ids", [1] * 64),
        ("ignore_eos", True),
        ("logprobs", 0),
        ("logprobs", 20),
        ("n", 1),
        ("n", 64),
    ],
)
async def test_the_ends_of_each_range_are_taken(field: str, value: object) -> None:
    async with running_service() as service:
        model = service.manager.model
        assert model is not None
        sampling = read_sampling(pb.SamplingParams(**{field: value}), model)
        assert sampling.top_k <= VOCAB
        if field != "max_tokens":
            [_ async for _ in service.generation.Generate(request(TEXT, **{"max_tokens": 1, field: value}))]


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (pb.GenerateRequest(), BAD, "PROMPT_MISSING"),
        (pb.GenerateRequest(text=""), BAD, "PROMPT_EMPTY"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), BAD, "PROMPT_EMPTY"),
        (pb.GenerateRequest(chat=pb.ChatPrompt()), BAD, "PROMPT_EMPTY"),
        (request([5, VOCAB]), BAD, TOKEN),
        (request([5, MAX_U32]), BAD, TOKEN),
        (request([5] * MAX_CONTEXT), BAD, "PROMPT_TOO_LONG"),
        (request([5] * (MAX_CONTEXT + 1)), BAD, "PROMPT_TOO_LONG"),
        (request([5] * (MAX_CONTEXT - 9), max_tokens=10), BAD, "PROMPT_TOO_LONG"),
        (request("x" * 3000), BAD, "PROMPT_TOO_LONG"),
        (request(TEXT, max_tokens=MAX_CONTEXT), BAD, "PROMPT_TOO_LONG"),
        (pb.GenerateRequest(model="other", text="x"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, pb.GenerateRequest) else None,
)
async def test_a_prompt_that_cannot_be_is_refused(
    message: pb.GenerateRequest, code: grpc.StatusCode, reason: str
) -> None:
    async with running_service() as service:
        assert (await refused(service, message))[:2] == (code, reason)


async def test_a_prompt_too_long_tells_the_numbers() -> None:
    async with running_service() as service:
        _, _, numbers = await refused(service, request([5] * 2000, max_tokens=49))
        assert (numbers["prompt_tokens"], numbers["max_tokens"], numbers["max_context"]) == ("2000", "49", "2048")


@pytest.mark.parametrize("sampling", [{}, {"max_tokens": 1}, {"max_tokens": 500}])
async def test_a_prompt_that_the_pool_can_never_hold_is_refused_at_once(sampling: dict[str, int]) -> None:
    async with running_service(num_blocks=5) as service:
        code, reason, numbers = await refused(service, request([5] * 100, **sampling))
        assert (code, reason) == (EXHAUSTED, "PROMPT_EXCEEDS_POOL")
        assert numbers


async def test_the_model_may_be_named_or_left_out() -> None:
    async with running_service() as service:
        for name in ("", "tiny"):
            message = request(TEXT, max_tokens=1)
            message.model = name
            [_ async for _ in service.generation.Generate(message)]


@pytest.mark.parametrize(
    ("files", "message", "reason"),
    [
        ({}, request(TEXT), "TOKENIZER_UNAVAILABLE"),
        ({}, request([("user", "x")]), "TOKENIZER_UNAVAILABLE"),
        ({}, request([1, 2], stop=["x"]), "TOKENIZER_UNAVAILABLE"),
        (
            {"tokenizer.json": TEXT_FILES["tokenizer.json"]},
            request([("user", "x")]),
            "CHAT_TEMPLATE_UNAVAILABLE",
        ),
    ],
)
async def test_text_without_what_it_needs_is_refused(
    files: dict[str, bytes], message: pb.GenerateRequest, reason: str
) -> None:
    async with running_service(files=files) as service:
        assert (await refused(service, message))[:2] == (PRECONDITION, reason)


async def test_a_template_that_refuses_the_messages_speaks_for_itself() -> None:
    template = b"{{ raise_exception('only users may speak') }}"
    async with running_service(files={**TEXT_FILES, "chat_template.jinja": template}) as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in service.generation.Generate(request([("system", "x")]))]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (BAD, "CHAT_TEMPLATE_FAILED")
        assert "only users may speak" in refusal.message


async def test_a_message_over_the_limit_is_refused_with_the_numbers() -> None:
    async with running_service() as service:
        message = request("x" * (4 << 20))
        code, reason, numbers = await refused(service, message)
        assert (code, reason) == (EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert numbers == {"size": str(message.ByteSize()), "limit": str(4 << 20)}


async def test_a_message_over_grpcs_own_limit_is_refused() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in service.generation.Generate(request("x" * (17 << 20)))]
        assert caught.value.code() == EXHAUSTED


async def test_calls_beyond_the_queue_are_refused_until_there_is_room() -> None:
    async with running_service(limits=Limits(max_queue=2, max_running=1)) as service:
        service.executor.open = False
        running = service.generation.Generate(request([5], max_tokens=2))
        await until(lambda: service.executor.unanswered, "the first call runs")
        waiting = [service.generation.Generate(request([6 + i], max_tokens=1)) for i in range(2)]
        await until(lambda: service.manager.activity().waiting == 2, "two calls wait")

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in service.generation.Generate(request([8], max_tokens=1))]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (EXHAUSTED, "QUEUE_FULL")
        assert refusal.numbers == {"waiting": "2", "limit": "2"}
        assert refusal.retry_after

        service.executor.go_on()
        for call in (running, *waiting, service.generation.Generate(request([9], max_tokens=1))):
            assert [_ async for _ in call]


async def test_without_an_executor_calls_are_refused_for_a_while() -> None:
    async with running_service(attached=False) as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in service.generation.Generate(request(TEXT))]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        assert refusal.retry_after
