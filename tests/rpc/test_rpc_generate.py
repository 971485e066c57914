from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import defaultdict

import grpc
import numpy as np
import pytest
from rpc_scripted import (
    EOS,
    MAX_CONTEXT,
    TEXT_FILES,
    TOKENIZER,
    VOCAB,
    Service,
    ids_of,
    rambling,
    refusal_of,
    request,
    running_service,
    saying,
    until,
)

from block_manager_svc.manager import Limits
from block_manager_svc.rpc.reply import Reply
from block_manager_svc.text.model import TextModel
from pagedkv.v1 import generation_pb2 as pb
from pagedkv.v1 import generation_pb2_grpc

PROMPT = "Reading never copies."
PROMPT_TOKENS = len(ids_of(PROMPT))


async def generate(service: Service, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in service.generation.Generate(message)]


async def rest_of(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    """What comes after a `read`; grpc.aio mixes no two ways of reading."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def texts(responses: list[pb.GenerateResponse]) -> dict[int, str]:
    out: dict[int, str] = defaultdict(str)
    for response in responses:
        for sample, text in zip(response.sample, response.text, strict=True):
            out[sample] += text
    return dict(out)


def tokens(responses: list[pb.GenerateResponse]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = defaultdict(list)
    for response in responses:
        for sample, token_id in zip(response.sample, response.token_id, strict=True):
            out[sample].append(token_id)
    return dict(out)


def finishes(responses: list[pb.GenerateResponse]) -> dict[int, list[int]]:
    """Every row's finish reason, by sample."""
    out: dict[int, list[int]] = defaultdict(list)
    for response in responses:
        for sample, reason in zip(response.sample, response.finish_reason, strict=True):
            out[sample].append(reason)
    return dict(out)


STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


async def test_each_step_is_a_message_and_the_last_carries_usage() -> None:
    async with running_service() as service:
        service.executor.script = saying("Größer 🙂!", after=PROMPT_TOKENS)
        service.executor.open = False
        said = [*ids_of("Größer 🙂!"), EOS]
        call = service.generation.Generate(request(PROMPT))
        responses = []
        for _ in said:  # a reader that keeps up
            await until(lambda: service.executor.unanswered, "a step is sent")
            service.executor.answer()
            responses.append(await call.read())
        assert await call.code() == grpc.StatusCode.OK
        assert [list(response.token_id) for response in responses] == [[token_id] for token_id in said]
        assert texts(responses) == {0: "Größer 🙂!"}
        assert finishes(responses) == {0: [0] * (len(said) - 1) + [STOP]}
        assert [response.HasField("usage") for response in responses] == [False] * (len(said) - 1) + [True]
        usage = responses[-1].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.preemptions) == (PROMPT_TOKENS, 0, 0)
        assert usage.completion_tokens == len(said)


async def test_a_second_call_finds_its_prompt_in_the_cache() -> None:
    async with running_service() as service:
        prompt = list(range(10, 60))
        await generate(service, request(prompt, max_tokens=2))
        usage = (await generate(service, request(prompt, max_tokens=2)))[-1].usage
        assert usage.cached_tokens == 48  # three full blocks of 16


async def test_parallel_samples_each_end_once_and_share_one_usage() -> None:
    async with running_service() as service:
        said = ["one", "two and more", "drei"]
        service.executor.script = saying(*said, after=PROMPT_TOKENS)
        responses = await generate(service, request(PROMPT, n=3, temperature=1))
        assert texts(responses) == dict(enumerate(said))
        for rows in finishes(responses).values():
            assert rows == [0] * (len(rows) - 1) + [STOP]
        assert [response.HasField("usage") for response in responses].count(True) == 1
        assert responses[-1].usage.completion_tokens == sum(len(ids_of(text)) + 1 for text in said)


async def test_every_sampling_parameter_reaches_the_step() -> None:
    async with running_service() as service:
        await generate(
            service,
            request(PROMPT, max_tokens=1, temperature=0.7, top_p=0.9, top_k=40, seed=2**64 - 1, logprobs=3, n=2),
        )
        samples = service.executor.plans[-1].samples
        assert samples.temperature.tolist() == [np.float32(0.7)] * 2
        assert samples.top_p.tolist() == [np.float32(0.9)] * 2
        assert samples.top_k.tolist() == [40, 40]
        assert samples.seed.tolist() == [2**64 - 1] * 2
        assert samples.logprobs.tolist() == [3, 3]
        assert samples.index.tolist() == [0, 1]


async def test_absent_parameters_are_greedy_and_keep_all_tokens() -> None:
    async with running_service() as service:
        await generate(service, request(PROMPT, max_tokens=1))
        samples = service.executor.plans[-1].samples
        assert (samples.temperature.tolist(), samples.top_p.tolist(), samples.top_k.tolist()) == ([0], [1], [0])
        assert samples.logprobs.tolist() == [-1]


async def test_an_absent_seed_is_drawn_and_told() -> None:
    async with running_service() as service:
        seeds = [(await generate(service, request(PROMPT, max_tokens=1)))[-1].usage.seed for _ in range(3)]
        assert len(set(seeds)) == 3
        assert [plan.samples.seed.tolist() for plan in service.executor.plans] == [[seed] for seed in seeds]


async def test_a_seed_of_zero_is_kept() -> None:
    async with running_service() as service:
        assert (await generate(service, request(PROMPT, max_tokens=1, seed=0)))[-1].usage.seed == 0


async def test_max_tokens_ends_with_length() -> None:
    async with running_service() as service:
        responses = await generate(service, request(PROMPT, max_tokens=5))
        assert finishes(responses) == {0: [0, 0, 0, 0, LENGTH]}
        assert texts(responses) == {0: TOKENIZER.decode(tokens(responses)[0])}


async def test_absent_max_tokens_runs_to_the_end_of_the_context() -> None:
    async with running_service() as service:
        prompt = [10] * (MAX_CONTEXT - 7)
        responses = await generate(service, request(prompt))
        assert len(tokens(responses)[0]) == 7


async def test_absent_max_tokens_runs_to_the_end_of_the_pool() -> None:
    async with running_service(num_blocks=5) as service:  # one is the null block
        responses = await generate(service, request([10] * 50))
        assert finishes(responses)[0][-1] == LENGTH
        assert 4 * 16 - 1 <= 50 + len(tokens(responses)[0]) <= 4 * 16 + 1


async def test_a_stop_string_ends_its_sample_before_it_and_the_others_go_on() -> None:
    async with running_service() as service:
        service.executor.script = saying("yes###no", "yes## no", after=PROMPT_TOKENS)
        responses = await generate(service, request(PROMPT, n=2, stop=["###", "never"], temperature=1))
        assert texts(responses) == {0: "yes", 1: "yes## no"}
        assert [rows[-1] for rows in finishes(responses).values()] == [STOP, STOP]
        assert len(tokens(responses)[0]) <= len(ids_of("yes###"))
        assert responses[-1].usage.completion_tokens == sum(map(len, tokens(responses).values()))


async def test_a_stop_string_frees_its_samples_blocks_while_the_others_go_on() -> None:
    async with running_service() as service:
        service.executor.script = saying("a" * 50 + "STOP" + "b" * 500, "c" * 300, after=PROMPT_TOKENS)
        service.executor.open = False
        call = service.generation.Generate(request(PROMPT, stop=["STOP"], n=2, temperature=1))
        for _ in range(len(ids_of("a" * 50 + "STOP")) + 1):
            await until(lambda: service.executor.unanswered, "a step is on its way")
            service.executor.answer()
        await until(lambda: service.manager.activity().running == 1, "one sample goes on")
        table = service.manager.page_table
        assert table is not None
        (alive,) = table.sequences().tolist()
        assert service.blocks_in_use() == len(table.tables([alive]).indices)
        service.executor.go_on()
        assert texts([response async for response in call]) == {0: "a" * 50, 1: "c" * 300}


async def test_a_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    async with running_service() as service:
        service.executor.script = saying("ab##", after=PROMPT_TOKENS)
        assert texts(await generate(service, request(PROMPT, stop=["###"]))) == {0: "ab##"}


async def test_an_unfinished_character_comes_out_at_the_end() -> None:
    async with running_service() as service:
        service.executor.script = lambda sample, position: ids_of("数")[position - PROMPT_TOKENS]
        responses = await generate(service, request(PROMPT, max_tokens=len(ids_of("数")) - 1))
        assert texts(responses) == {0: "\ufffd"}


async def test_a_stop_tokens_id_is_sent_and_its_text_is_not() -> None:
    async with running_service() as service:
        service.executor.script = saying("abc", after=PROMPT_TOKENS)
        stop = ids_of("c")[0]
        responses = await generate(service, request(PROMPT, stop_token_ids=[stop]))
        assert tokens(responses)[0][-1] == stop
        assert (texts(responses), finishes(responses)[0][-1]) == ({0: "ab"}, STOP)


async def test_ignore_eos_goes_on_past_the_end_of_sequence() -> None:
    async with running_service() as service:
        service.executor.script = lambda sample, position: EOS
        responses = await generate(service, request(PROMPT, ignore_eos=True, max_tokens=9))
        assert tokens(responses) == {0: [EOS] * 9}
        assert (texts(responses), finishes(responses)[0][-1]) == ({0: ""}, LENGTH)


@pytest.mark.parametrize(("logprobs", "best"), [(None, 0), (0, 0), (2, 2)])
async def test_logprobs_come_in_columns_as_asked(logprobs: int | None, best: int) -> None:
    async with running_service() as service:
        sampling = {} if logprobs is None else {"logprobs": logprobs}
        responses = await generate(service, request(PROMPT, max_tokens=3, n=2, temperature=1, **sampling))
        for response in responses:
            rows = len(response.sample)
            assert list(response.logprob) == ([] if logprobs is None else [-0.5] * rows)
            assert list(response.top_token_id) == list(range(best)) * rows
            assert list(response.top_logprob) == [-1.0 - i for i in range(best)] * rows


async def test_prompts_are_tokenized_each_in_its_way() -> None:
    async with running_service() as service:
        chat = [("system", "Be brief."), ("user", "</s>?")]
        rendered = TOKENIZER.apply_chat_template(
            [{"role": role, "content": content} for role, content in chat], add_generation_prompt=True
        )["input_ids"]
        for prompt, ids in ((PROMPT, ids_of(PROMPT)), (chat, rendered), ([7, 0, VOCAB - 1], [7, 0, VOCAB - 1])):
            await generate(service, request(prompt, max_tokens=1))
            assert service.executor.plans[-1].batch.token_ids.tolist() == ids


async def test_a_long_text_is_tokenized_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    encode = TextModel.encode

    def watched(self: TextModel, text: str) -> object:
        threads.append(threading.current_thread())
        return encode(self, text)

    monkeypatch.setattr(TextModel, "encode", watched)
    async with running_service() as service:
        await generate(service, request("Reading never copies. " * 95, max_tokens=1))
    assert threading.main_thread() not in threads


async def test_a_prompt_that_was_tokenized_for_the_model_before_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizing, go_on = threading.Event(), threading.Event()
    encode = TextModel.encode

    def slow(self: TextModel, text: str) -> object:
        tokenizing.set()
        assert go_on.wait(10)
        return encode(self, text)

    monkeypatch.setattr(TextModel, "encode", slow)
    async with running_service() as service:
        call = service.generation.Generate(request("Reading never copies. " * 95))
        await until(tokenizing.is_set, "the prompt is tokenized")
        model = service.manager.model
        assert model is not None
        service.manager.model = dataclasses.replace(model, id="another")
        go_on.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        assert refusal.retry_after == 0


async def test_without_a_tokenizer_token_ids_work_and_text_is_empty() -> None:
    async with running_service(files={}) as service:
        responses = await generate(service, request([1, 2, 3], max_tokens=3))
        assert len(tokens(responses)[0]) == 3
        assert texts(responses) == {0: ""}


async def test_cancelling_frees_the_blocks_at_once_while_a_step_is_computed() -> None:
    async with running_service() as service:
        service.executor.open = False
        call = service.generation.Generate(request(list(range(10, 200)), n=4))
        await until(lambda: service.blocks_in_use() > 0, "the call is admitted")
        call.cancel()
        await service.all_blocks_back()


async def test_cancelling_in_the_middle_of_the_stream_frees_the_blocks() -> None:
    async with running_service() as service:
        call = service.generation.Generate(request(PROMPT, n=4, temperature=1))
        await call.read()
        assert service.blocks_in_use() > 0
        call.cancel()
        await service.all_blocks_back()


async def test_a_lost_connection_frees_the_blocks() -> None:
    async with running_service() as service:
        service.executor.open = False
        async with grpc.aio.insecure_channel(service.address) as channel:
            generation_pb2_grpc.GenerationServiceStub(channel).Generate(request(PROMPT))
            await until(lambda: service.blocks_in_use() > 0, "the call is admitted")
        await service.all_blocks_back()


async def test_a_passed_deadline_frees_the_blocks() -> None:
    async with running_service() as service:
        service.executor.open = False
        call = service.generation.Generate(request(PROMPT), timeout=0.5)
        await until(lambda: service.blocks_in_use() > 0, "the call is admitted")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await service.all_blocks_back()


@pytest.mark.parametrize(
    ("write_timeout", "numbers"), [(0.2, {"write_timeout_s": "0.2"}), (60.0, {"waiting": "64"})], ids=["time", "space"]
)
async def test_a_reader_that_stops_reading_is_cut_off_and_its_blocks_freed(
    write_timeout: float, numbers: dict[str, str]
) -> None:
    async with running_service(write_timeout=write_timeout, num_blocks=8192) as service:
        call = service.generation.Generate(request(PROMPT, n=64, temperature=1, logprobs=20))
        await until(lambda: service.executor.plans, "the call is admitted")
        await service.all_blocks_back()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "READER_TOO_SLOW")
        assert refusal.numbers == numbers


async def test_a_slow_reader_gets_every_row_in_order_in_joined_messages() -> None:
    async with running_service() as service:
        call = service.generation.Generate(request(PROMPT, n=8, temperature=1, logprobs=20, max_tokens=500))
        await until(lambda: service.manager.page_table.sequences().tolist() == [], "all is computed")
        responses = [response async for response in call]
        assert len(responses) < 500
        assert max(response.ByteSize() for response in responses) < 1 << 20
        expected = {sample: [rambling(sample, PROMPT_TOKENS + i) for i in range(500)] for sample in range(8)}
        assert tokens(responses) == expected
        assert texts(responses) == {sample: TOKENIZER.decode(ids) for sample, ids in expected.items()}
        assert responses[-1].usage.completion_tokens == 8 * 500


async def test_an_executor_that_does_not_come_back_ends_the_call_after_what_was_sampled() -> None:
    async with running_service(limits=Limits(executor_grace_s=0.05)) as service:
        call = service.generation.Generate(request(PROMPT))
        await call.read()
        service.executor.detach()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        assert refusal.retry_after


async def test_an_error_while_tokens_are_handed_out_ends_the_call_as_internal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Reply, stream: object, row: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(Reply, "_text", broken)
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(service, request(PROMPT))
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "secret" not in refusal.message


async def test_list_models_names_the_model_and_what_it_accepts() -> None:
    for files, text, chat in (
        (TEXT_FILES, True, True),
        ({"tokenizer.json": TEXT_FILES["tokenizer.json"]}, True, False),
        ({}, False, False),
    ):
        async with running_service(files=files) as service:
            models = (await service.generation.ListModels(pb.ListModelsRequest())).models
            assert list(models) == [
                pb.Model(
                    id="tiny",
                    vocab_size=VOCAB,
                    max_context=MAX_CONTEXT,
                    eos_token_ids=[EOS],
                    accepts_text=text,
                    accepts_chat=chat,
                )
            ]


async def test_list_models_is_empty_without_an_executor() -> None:
    async with running_service(attached=False) as service:
        assert not (await service.generation.ListModels(pb.ListModelsRequest())).models


async def test_many_calls_at_once_do_not_mix() -> None:
    async with running_service() as service:
        prompts = [[10 + i, 20, 30 + i] for i in range(40)]
        results = await asyncio.gather(
            *(generate(service, request(prompt, max_tokens=3 + i % 5)) for i, prompt in enumerate(prompts))
        )
        for i, responses in enumerate(results):
            assert tokens(responses) == {0: [rambling(0, 3 + at) for at in range(3 + i % 5)]}
