"""Both programs for real, on a tiny model in float64, where no rounding can flip a choice."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.dense import assert_greedy, dense_model
from support.processes import Stack
from support.waiting import wait_for

import pagedkv
from pagedkv import AsyncClient, Client, FinishReason
from pagedkv.v1 import generation_pb2, generation_pb2_grpc

BLOCKS, BLOCK_SIZE = 256, 16
FREED_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def running(module_stack: Callable[..., Stack], tiny_llama_dir: Path) -> Stack:
    return module_stack(model=tiny_llama_dir, blocks=BLOCKS, block_size=BLOCK_SIZE, dtype="float64")


@pytest.fixture
def client(running: Stack) -> Iterator[Client]:
    """Of a service that is quiet: the step that the test before was cancelled in is over too."""
    with Client(running.address) as client:
        wait_for(lambda: not client.pool().activity.steps_in_flight and not held(client), 10, "nothing is in flight")
        yield client
        assert client.audit().violations == ()


Check = Callable[[list[int], Iterable[int], int], None]


@pytest.fixture
def check(tiny_llama_dir: Path) -> Check:
    """check(prompt, tokens, count): these are the `count` tokens that the dense model chooses after the prompt."""

    def run(prompt: list[int], tokens: Iterable[int], count: int) -> None:
        got = list(tokens)
        assert len(got) == count
        assert_greedy(dense_model(tiny_llama_dir, torch.float64), prompt, got)

    return run


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return random.Random(f"{length} {salt}").choices(range(10, 300), k=length)


def copies(client: Client) -> int:
    return client.pool().activity.copies_on_write


def held(client: Client) -> int:
    states = client.pool().device
    return states.active + states.sealed


def test_greedy_tokens_equal_the_dense_models(client: Client, check: Check) -> None:
    for length in (1, 15, 16, 17, 100, 700):
        prompt = prompt_of(length)
        completion = client.complete(token_ids=prompt, max_tokens=20, ignore_eos=True)
        check(prompt, completion.token_ids, 20)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.prompt_tokens == length


def test_many_at_once_get_the_same_tokens_as_each_alone(running: Stack, client: Client, check: Check) -> None:
    prompts = [prompt_of(length, 1) for length in (3, 16, 31, 64, 90, 5, 120, 33, 48, 200)]

    async def all_at_once() -> list[pagedkv.Completion]:
        async with AsyncClient(running.address) as many:
            return await asyncio.gather(
                *(many.complete(token_ids=prompt, max_tokens=24, ignore_eos=True) for prompt in prompts)
            )

    for prompt, completion in zip(prompts, asyncio.run(all_at_once()), strict=True):
        check(prompt, completion.token_ids, 24)


def test_a_single_sequence_never_copies(client: Client) -> None:
    before = copies(client)
    client.complete(token_ids=prompt_of(21), max_tokens=60, ignore_eos=True)
    assert copies(client) == before


@pytest.mark.parametrize(("length", "expected"), [(40, 3), (47, 3), (33, 3), (48, 0), (32, 0)])
def test_four_samples_copy_a_partly_filled_last_block_three_times_and_a_full_one_never(
    client: Client, length: int, expected: int
) -> None:
    before = copies(client)
    completion = client.complete(
        token_ids=prompt_of(length, 2), max_tokens=20, n=4, temperature=1.0, seed=7, ignore_eos=True
    )
    assert len({sample.token_ids for sample in completion.samples}) == 4
    assert copies(client) - before == expected


def test_greedy_parallel_samples_all_equal_the_dense_tokens(client: Client, check: Check) -> None:
    prompt = prompt_of(41, 3)
    completion = client.complete(token_ids=prompt, max_tokens=20, n=3, ignore_eos=True)
    for sample in completion.samples:
        check(prompt, sample.token_ids, 20)


def test_of_two_identical_prompts_in_flight_one_can_be_freed(client: Client, check: Check) -> None:
    prompt = prompt_of(80, 4)
    first = client.generate(token_ids=prompt, max_tokens=400, ignore_eos=True)
    next(iter(first))
    second = client.generate(token_ids=prompt, max_tokens=60, ignore_eos=True)
    tokens = [next(second).token_id for _ in range(5)]
    first.cancel()
    tokens += [piece.token_id for piece in second]
    check(prompt, tokens, 60)
    assert second.usage is not None
    assert second.usage.cached_tokens >= 64


def test_the_same_seed_gives_the_same_samples_whatever_runs_beside_them(running: Stack, client: Client) -> None:
    prompt = prompt_of(30, 5)
    arguments = {"token_ids": prompt, "max_tokens": 30, "n": 2, "temperature": 1.2, "top_p": 0.95, "ignore_eos": True}
    alone = client.complete(**arguments, seed=11)

    async def crowded() -> pagedkv.Completion:
        async with AsyncClient(running.address) as many:
            others = [many.complete(token_ids=prompt_of(50, i), max_tokens=30, temperature=1.0) for i in range(6)]
            return (await asyncio.gather(many.complete(**arguments, seed=11), *others))[0]

    assert asyncio.run(crowded()).samples == alone.samples
    assert client.complete(**arguments, seed=12).samples != alone.samples
    drawn = client.complete(**arguments)
    assert client.complete(**arguments, seed=drawn.usage.seed).samples == drawn.samples


def test_text_and_chat_are_tokenized_and_come_back_as_text(client: Client) -> None:
    completion = client.complete("A block table maps schön 数字 🙂", max_tokens=24, ignore_eos=True)
    pieces = list(client.generate("A block table maps schön 数字 🙂", max_tokens=24, ignore_eos=True))
    assert "".join(piece.text for piece in pieces) == completion.text
    assert completion.text
    chat = client.complete(chat=[{"role": "user", "content": "Hello"}], max_tokens=8)
    assert chat.usage.prompt_tokens > 3


def test_a_stop_string_ends_the_text_before_it_across_token_borders(client: Client) -> None:
    whole = client.complete("Reading never copies", max_tokens=60, ignore_eos=True, temperature=1.0, seed=4)
    at = len(whole.text) // 2
    stop = whole.text[at : at + 3]
    stopped = client.complete(
        "Reading never copies", max_tokens=60, ignore_eos=True, temperature=1.0, seed=4, stop=[stop]
    )
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP
    wait_for(lambda: held(client) == 0, 10, "the stopped sequence's blocks are free")


def test_log_probabilities_are_those_of_the_dense_model(client: Client, tiny_llama_dir: Path) -> None:
    prompt = prompt_of(25, 6)
    sample = client.complete(token_ids=prompt, max_tokens=10, logprobs=5, ignore_eos=True).samples[0]
    with torch.inference_mode():
        logits = dense_model(tiny_llama_dir, torch.float64)(torch.tensor([prompt + list(sample.token_ids)])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    for at, token in enumerate(sample.token_ids):
        assert sample.logprobs[at] == pytest.approx(float(expected[at, token]), abs=1e-5)
        best = expected[at].topk(5)
        assert [top.token_id for top in sample.top_logprobs[at]] == best.indices.tolist()
        assert [top.logprob for top in sample.top_logprobs[at]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_cancelled_call_gives_its_blocks_back(client: Client) -> None:
    stream = client.generate(token_ids=prompt_of(300, 7), max_tokens=1500, ignore_eos=True, n=3)
    next(stream)
    assert held(client) > 0
    stream.cancel()
    wait_for(lambda: held(client) == 0, FREED_WITHIN_S, "all blocks are free")


def test_a_client_that_is_killed_gives_its_blocks_back(running: Stack, client: Client) -> None:
    program = (
        "import sys; from pagedkv import Client\n"
        f"for piece in Client({running.address!r}).generate(token_ids=list(range(20, 200)), max_tokens=1500, "
        "ignore_eos=True): print(piece.token_id, flush=True)"
    )
    victim = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert victim.stdout.readline()
    assert held(client) > 0
    victim.kill()
    victim.wait()
    victim.stdout.close()
    wait_for(lambda: held(client) == 0, FREED_WITHIN_S, "all blocks are free")


def test_a_hundred_clients_that_cancel_at_once_leave_nothing_behind(running: Stack, client: Client) -> None:
    async def storm() -> None:
        async with AsyncClient(running.address) as many:

            async def one(number: int) -> None:
                async with many.generate(token_ids=prompt_of(40, number), max_tokens=800, ignore_eos=True) as stream:
                    await anext(aiter(stream))

            await asyncio.gather(*(one(number) for number in range(100)))

    asyncio.run(storm())
    wait_for(lambda: held(client) == 0, 10, "all blocks are free")
    activity = client.pool().activity
    assert (activity.running, activity.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "reason"),
    [
        ({"token_ids": []}, pagedkv.InvalidArgument, "PROMPT_EMPTY"),
        ({"prompt": ""}, pagedkv.InvalidArgument, "PROMPT_EMPTY"),
        ({"token_ids": [5, 999_999]}, pagedkv.InvalidArgument, "TOKEN_OUT_OF_RANGE"),
        ({"token_ids": [5] * 5000}, pagedkv.InvalidArgument, "PROMPT_TOO_LONG"),
        ({"token_ids": [5] * 100, "max_tokens": 2000}, pagedkv.InvalidArgument, "PROMPT_TOO_LONG"),
        ({"token_ids": [5], "max_tokens": 0}, pagedkv.InvalidArgument, "PARAMETER_OUT_OF_RANGE"),
        ({"token_ids": [5], "temperature": float("nan")}, pagedkv.InvalidArgument, "PARAMETER_OUT_OF_RANGE"),
        ({"token_ids": [5], "n": 65}, pagedkv.InvalidArgument, "PARAMETER_OUT_OF_RANGE"),
        ({"token_ids": [5], "model": "no such model"}, pagedkv.NotFound, "MODEL_NOT_FOUND"),
        ({"token_ids": [5] * 5_000_000}, pagedkv.ResourceExhausted, "MESSAGE_TOO_LARGE"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_gets_a_clear_status_and_changes_nothing(
    client: Client, arguments: dict[str, object], kind: type[pagedkv.PagedKvError], reason: str
) -> None:
    before = client.pool()
    with pytest.raises(kind) as refused:
        client.complete(**arguments)
    assert refused.value.reason == reason
    after = client.pool()
    assert (after.device, after.activity) == (before.device, before.activity)


def test_reflection_names_the_services(running: Stack) -> None:
    with grpc.insecure_channel(running.address) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {
        "pagedkv.v1.GenerationService",
        "pagedkv.v1.BlockManagerService",
        "pagedkv.v1.ExecutorLinkService",
        "grpc.health.v1.Health",
    } <= services


def test_block_tables_of_running_samples_show_what_they_share(client: Client) -> None:
    stream = client.generate(token_ids=prompt_of(64, 8), max_tokens=1000, n=2, ignore_eos=True)
    for _ in range(8):
        next(stream)
    alive = client.sequences()
    assert len(alive) == 2
    first, second = client.tables([sequence.sequence for sequence in alive])
    assert first.blocks[:4] == second.blocks[:4]
    assert first.refcounts[:4] == (2, 2, 2, 2)
    assert not set(first.blocks[4:]) & set(second.blocks[4:])
    stream.cancel()


def test_a_pool_too_small_for_all_preempts_and_every_request_gets_the_same_tokens(
    stack: Callable[..., Stack], tiny_llama_dir: Path, check: Check
) -> None:
    small = stack(model=tiny_llama_dir, blocks=13, block_size=16, dtype="float64")
    prompts = [prompt_of(30 + 3 * salt, salt) for salt in range(8)]

    async def all_at_once() -> list[pagedkv.Completion]:
        async with small.async_client() as many:
            return await asyncio.gather(
                *(many.complete(token_ids=prompt, max_tokens=60, ignore_eos=True) for prompt in prompts)
            )

    for prompt, completion in zip(prompts, asyncio.run(all_at_once()), strict=True):
        check(prompt, completion.token_ids, 60)
    client = small.client()
    assert client.pool().activity.preemptions > 0
    assert client.audit().violations == ()
    assert held(client) == 0
    with pytest.raises(pagedkv.ResourceExhausted) as refused:
        client.complete(token_ids=prompt_of(400), max_tokens=10)
    assert refused.value.reason == "PROMPT_EXCEEDS_POOL"


def test_without_an_executor_calls_are_unavailable_and_health_says_so(
    stack: Callable[..., Stack], tiny_llama_dir: Path
) -> None:
    lonely = stack(model=tiny_llama_dir, dtype="float64", executor=False)
    client = lonely.client()
    with pytest.raises(pagedkv.Unavailable) as refused:
        client.complete(token_ids=[5])
    assert refused.value.reason == "EXECUTOR_UNAVAILABLE"
    assert refused.value.retry_after
    assert client.models() == ()
    with grpc.insecure_channel(lonely.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "pagedkv.v1.GenerationService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == (
                health_pb2.HealthCheckResponse.NOT_SERVING
            )
        lonely.start_executor()
        for service in ("", "pagedkv.v1.GenerationService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == (
                health_pb2.HealthCheckResponse.SERVING
            )
    assert len(client.complete(token_ids=[5], max_tokens=3, ignore_eos=True).token_ids) == 3


def test_an_executor_that_dies_is_replaced_and_streams_go_on_with_the_same_tokens(
    stack: Callable[..., Stack], tiny_llama_dir: Path, check: Check
) -> None:
    both = stack(model=tiny_llama_dir, dtype="float64")
    client = both.client()
    prompt = prompt_of(50, 9)
    stream = client.generate(token_ids=prompt, max_tokens=600, ignore_eos=True)
    tokens = [next(stream).token_id for _ in range(20)]
    epoch = client.pool().header.epoch
    both.kill_executor()
    both.start_executor()
    tokens += [piece.token_id for piece in stream]
    check(prompt, tokens, 600)
    assert client.pool().header.epoch == epoch + 1


def test_a_service_that_restarts_is_found_again_by_its_executor(
    stack: Callable[..., Stack], tiny_llama_dir: Path, check: Check
) -> None:
    both = stack(model=tiny_llama_dir, dtype="float64")
    both.client().complete(token_ids=prompt_of(20), max_tokens=5)
    both.kill_service()
    both.start_service()
    both.wait_until_attached()
    prompt = prompt_of(20)
    check(prompt, both.client().complete(token_ids=prompt, max_tokens=5, ignore_eos=True).token_ids, 5)


def test_sigterm_drains_what_runs_refuses_what_comes_and_exits_with_0(
    stack: Callable[..., Stack], tiny_llama_dir: Path, check: Check
) -> None:
    both = stack(model=tiny_llama_dir, dtype="float64")
    client = both.client()
    prompt = prompt_of(50, 10)
    stream = client.generate(token_ids=prompt, max_tokens=600, ignore_eos=True)
    tokens = [next(stream).token_id]
    assert both.service_process is not None
    both.service_process.send_signal(signal.SIGTERM)
    with grpc.insecure_channel(both.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for reply in health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=20):
            if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
    with pytest.raises(pagedkv.Unavailable) as refused:
        client.complete(token_ids=[5])
    assert refused.value.reason == "DRAINING"
    tokens += [piece.token_id for piece in stream]
    check(prompt, tokens, 600)
    assert both.service_process.wait() == 0
    assert both.terminate_executor() == 0


def test_a_client_that_reads_nothing_is_cut_off_and_its_blocks_come_back(
    stack: Callable[..., Stack], tiny_llama_dir: Path
) -> None:
    both = stack(model=tiny_llama_dir, dtype="float64", service_flags=("--write-timeout", "1"))
    client = both.client()
    # Large messages and no reads: HTTP/2's window fills, the server's writes stall.
    with grpc.insecure_channel(
        both.address, options=[("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
    ) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[5]),
            sampling=generation_pb2.SamplingParams(max_tokens=2000, n=16, logprobs=20, ignore_eos=True),
        )
        done = threading.Event()
        call = stub.Generate(request, timeout=120)
        call.add_callback(done.set)
        wait_for(lambda: held(client) > 0, 10, "it runs")
        wait_for(lambda: held(client) == 0, 60, "it was cut off")
        call.cancel()
        assert done.wait(10)
    assert client.audit().violations == ()
