"""The service's side of the Attach stream, over a real port: its table of errors, row by row, and docs/protocol.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest
import structlog
from rpc_link_client import NUM_BLOCKS, LinkExecutor, LinkStream, announced
from rpc_scripted import DEADLINE_S, TEXT_FILES, VOCAB, Refusal, Service, refusal_of, request, running_service, until
from support.paper_executor import undisturbed

from block_manager_svc.core import PageTable
from block_manager_svc.manager import MAX_FRUITLESS, Limits
from pagedkv.v1 import block_manager_pb2, generation_pb2
from pagedkv.v1 import executor_link_pb2 as pb

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


async def _cut(service: Service, stream: LinkStream) -> None:
    stream.call.cancel()
    await until(lambda: service.manager.model is None, "the stream is gone")


# --- the hello ------------------------------------------------------------------------------------------------------


async def test_a_welcome_names_the_epoch_the_boot_and_the_intervals() -> None:
    limits = Limits(heartbeat_interval_ms=700, silence_limit_ms=9_000)
    async with running_service(attached=False, limits=limits) as service:
        stream = await LinkExecutor(service, files=TEXT_FILES).attach()
        assert stream.welcome == pb.Welcome(reset=True, heartbeat_interval_ms=700, silence_limit_ms=9_000)
        assert (stream.epoch, stream.executor.service_id) == (1, service.manager.service_id)
        [model] = (await service.generation.ListModels(generation_pb2.ListModelsRequest())).models
        assert (model.id, model.vocab_size, model.max_context, list(model.eos_token_ids)) == ("paper", VOCAB, 200, [1])
        assert model.accepts_chat
        async with stream.serving():
            assert await finished(generate(service, n=3)) == expected(n=3)


@pytest.mark.parametrize(
    "first",
    [
        {"heartbeat": pb.Heartbeat()},
        {"result": pb.StepResult(step_id=1)},
        {"refusal": pb.Refusal(step_id=1)},
        {"attachment": pb.AttachmentPiece(name="tokenizer.json", data=b"x")},
        {},
    ],
    ids=lambda first: next(iter(first), "nothing"),
)
async def test_anything_before_the_hello_ends_the_stream(first: dict[str, object]) -> None:
    async with running_service(attached=False) as service:
        stream = LinkExecutor(service).dial()
        await stream.send(**first)
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "HELLO_EXPECTED")


async def test_a_stream_that_is_closed_before_its_hello_or_within_it_is_told_so() -> None:
    async with running_service(attached=False) as service:
        empty = LinkExecutor(service).dial()
        await empty.call.done_writing()
        assert (await empty.refusal()).reason == "HELLO_EXPECTED"
        executor = LinkExecutor(service, files={"tokenizer.json": b"ab"})
        half = executor.dial()
        await half.send(hello=executor.hello())
        await half.call.done_writing()
        assert (await half.refusal()).reason == "HELLO_EXPECTED"
        assert await models(service) == 0


WRONG_HELLOS: list[tuple[str, Callable[[pb.Hello], object]]] = [
    ("world_size", lambda hello: setattr(hello, "world_size", 2)),
    ("world_size", lambda hello: setattr(hello, "world_size", 0)),
    ("rank", lambda hello: setattr(hello, "rank", 1)),
    ("num_blocks", lambda hello: setattr(hello.geometry, "num_blocks", 1)),
    ("num_blocks", lambda hello: setattr(hello.geometry, "num_blocks", 1 << 31)),
    ("block_size", lambda hello: setattr(hello.geometry, "block_size", 0)),
    ("block_size", lambda hello: setattr(hello.geometry, "block_size", 1 << 16)),
    ("block_bytes", lambda hello: setattr(hello.geometry, "block_bytes", 0)),
    ("max_rows", lambda hello: setattr(hello, "max_rows", 0)),
    ("max_rows", lambda hello: setattr(hello, "max_rows", 1 << 31)),
    ("max_batch_tokens", lambda hello: setattr(hello, "max_batch_tokens", 0)),
    ("max_blocks_per_row", lambda hello: setattr(hello, "max_blocks_per_row", 0)),
    ("model.id", lambda hello: setattr(hello.model, "id", "")),
    ("vocab_size", lambda hello: setattr(hello.model, "vocab_size", 0)),
    ("max_context", lambda hello: setattr(hello.model, "max_context", 1 << 31)),
    ("completed", lambda hello: setattr(hello, "completed", 1)),
    ("digest", lambda hello: setattr(hello, "digest", bytes(31))),
]


@pytest.mark.parametrize(
    ("field", "spoil"), WRONG_HELLOS, ids=[f"{field}-{i}" for i, (field, _) in enumerate(WRONG_HELLOS)]
)
async def test_a_hello_that_cannot_be_is_refused_by_field_and_changes_nothing(
    field: str, spoil: Callable[[pb.Hello], object]
) -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        hello = executor.hello()
        spoil(hello)
        refusal = await executor.refused_at_attach(hello)
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "HELLO_INVALID")
        assert refusal.numbers == {"field": field}
        assert refusal.message.startswith(field)
        assert (await models(service), service.manager.epoch) == (0, 0)
        assert (await executor.attach()).welcome.reset


@pytest.mark.parametrize(("named", "field"), [({"boot_id": ""}, "boot_id"), ({"epoch": 1 << 63}, "epoch")])
async def test_an_envelope_that_cannot_be_is_refused_by_field(named: dict[str, object], field: str) -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = executor.dial()
        await stream.send(hello=executor.hello(), **named)  # type: ignore[arg-type]
        refusal = await stream.refusal()
        assert (refusal.reason, refusal.numbers) == ("HELLO_INVALID", {"field": field})
        assert (await executor.attach()).epoch == 1


async def test_the_first_epoch_lies_above_the_one_that_the_executor_has_known() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        executor.service_id, executor.epoch = "one that has stopped", 41
        stream = await executor.attach()
        assert (stream.welcome.reset, stream.epoch) == (True, 42)


@pytest.mark.parametrize("message", ["hello", "attachment", "nothing"])
async def test_what_belongs_before_the_welcome_ends_the_stream_after_it(message: str) -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        what: dict[str, object] = {
            "hello": {"hello": executor.hello()},
            "attachment": {"attachment": pb.AttachmentPiece(name="x", data=b"x")},
            "nothing": {},
        }[message]
        await stream.send(**what)
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "HELLO_INVALID")
        assert not (await executor.attach()).welcome.reset


async def test_bytes_that_are_no_message_end_the_stream() -> None:
    async with running_service(attached=False) as service:
        call = service.channel.stream_stream("/pagedkv.v1.ExecutorLinkService/Attach")()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "MESSAGE_MALFORMED")


# --- its attachments ------------------------------------------------------------------------------------------------


async def _attach_with(service: Service, files: list[pb.Attachment], pieces: list[pb.AttachmentPiece]) -> Refusal:
    executor = LinkExecutor(service)
    hello = executor.hello()
    hello.attachments.extend(files)
    stream = executor.dial()
    await stream.send(hello=hello)
    for piece in pieces:
        await stream.send(attachment=piece)
    refusal = await stream.refusal()
    assert await models(service) == 0
    return refusal


A, B = b"abcdef", b"ghi"
PIECES: dict[str, list[pb.AttachmentPiece]] = {
    "in another order": [pb.AttachmentPiece(name="b", data=B)],
    "not from the start": [pb.AttachmentPiece(name="a", offset=2, data=A[2:])],
    "with a gap": [pb.AttachmentPiece(name="a", data=A[:2]), pb.AttachmentPiece(name="a", offset=3, data=A[3:])],
    "twice": [pb.AttachmentPiece(name="a", data=A[:2]), pb.AttachmentPiece(name="a", data=A[:2])],
    "empty": [pb.AttachmentPiece(name="a")],
    "longer than announced": [pb.AttachmentPiece(name="a", data=A + b"!")],
    "of another content": [pb.AttachmentPiece(name="a", data=A[::-1])],
    "second of another content": [pb.AttachmentPiece(name="a", data=A), pb.AttachmentPiece(name="b", data=b"GHI")],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
async def test_pieces_that_are_not_what_was_announced_are_refused(pieces: list[pb.AttachmentPiece]) -> None:
    async with running_service(attached=False) as service:
        refusal = await _attach_with(service, [announced("a", A), announced("b", B)], pieces)
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "ATTACHMENT_INVALID")


@pytest.mark.parametrize(
    "files",
    [
        [announced(f"file {i}", b"") for i in range(17)],
        [pb.Attachment(name="tokenizer.json", size=(256 << 20) + 1, sha256=bytes(32))],
        [pb.Attachment(name=name, size=129 << 20, sha256=bytes(32)) for name in "ab"],
        [pb.Attachment(name=name, size=(1 << 64) - 1, sha256=bytes(32)) for name in "ab"],
        [announced("a", A), announced("a", A)],
    ],
    ids=["too many", "too large", "too large together", "too large to add up", "one name twice"],
)
async def test_attachments_beyond_the_limits_are_refused_before_they_are_sent(files: list[pb.Attachment]) -> None:
    async with running_service(attached=False) as service:
        refusal = await _attach_with(service, files, [])
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "ATTACHMENT_INVALID")


async def test_another_message_among_the_pieces_is_refused() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service, files={"a": A})
        stream = executor.dial()
        await stream.send(hello=executor.hello())
        await stream.heartbeat()
        assert (await stream.refusal()).reason == "ATTACHMENT_INVALID"


async def test_a_tokenizer_that_cannot_be_read_is_refused_and_the_executor_may_try_again() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service, files={"tokenizer.json": b"{}"})
        stream = executor.dial()
        await stream.send(hello=executor.hello())
        await stream.send(attachment=pb.AttachmentPiece(name="tokenizer.json", data=b"{}"))
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "ATTACHMENT_INVALID")
        executor.files = {}
        assert (await executor.attach()).welcome.reset


async def test_a_hello_in_many_slow_pieces_counts_as_talking() -> None:
    """From its beginning to its end it takes longer than the silence limit, no pause in it does."""
    limits = Limits(heartbeat_interval_ms=400, silence_limit_ms=1000)
    async with running_service(attached=False, limits=limits) as service:
        executor = LinkExecutor(service, files={"a": A})
        stream = executor.dial()
        await stream.send(hello=executor.hello())
        for offset in range(len(A)):
            await asyncio.sleep(0.2)
            await stream.send(attachment=pb.AttachmentPiece(name="a", offset=offset, data=A[offset : offset + 1]))
        await stream.take_welcome()
        while stream.heartbeats < 2:
            await stream.next()
            await stream.heartbeat()
        assert await models(service) == 1


# --- results --------------------------------------------------------------------------------------------------------


def _i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def _set(**columns: object) -> Callable[[pb.StepResult], None]:
    def change(result: pb.StepResult) -> None:
        for name, value in columns.items():
            setattr(result, name, value(getattr(result, name)) if callable(value) else value)

    return change


WRONG_RESULTS: dict[str, Callable[[pb.StepResult], None]] = {
    "no token": _set(token_ids=b""),
    "a token too many": _set(token_ids=lambda ids: ids + _i32(1)),
    "no log-probability": _set(logprob=b""),
    "an alternative too few": _set(top_token_ids=lambda ids: ids[4:], top_logprobs=lambda values: values[4:]),
    "alternatives without log-probabilities": _set(top_logprobs=b""),
    "token -3": _set(token_ids=_i32(-3)),
    "token beyond the vocabulary": _set(token_ids=_i32(VOCAB)),
    "alternative -1": _set(top_token_ids=_i32(-1, 0)),
    "alternative beyond the vocabulary": _set(top_token_ids=_i32(0, VOCAB)),
    "a column of 3 bytes": _set(token_ids=b"abc"),
    "a log-probability of 3 bytes": _set(logprob=b"abc"),
    "another rank": _set(rank=1),
    "ahead of its turn": _set(step_id=lambda step_id: step_id + 1),
}


@pytest.mark.parametrize("spoil", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
async def test_a_result_that_cannot_be_ends_the_stream_resets_and_calls_go_on(
    spoil: Callable[[pb.StepResult], None],
) -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service, logprobs=2)
        for _ in range(3):
            await stream.answer()
        result = executor.execute(await stream.step())
        spoil(result)
        await stream.send(result=result)
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "RESULT_INVALID")
        assert refusal.numbers == {"step_id": str(result.step_id)}
        await goes_on(service, executor, call)


async def test_a_result_when_nothing_was_asked_ends_the_stream() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        await stream.send(result=pb.StepResult(step_id=1))
        assert (await stream.refusal()).reason == "RESULT_INVALID"
        assert (await executor.attach()).welcome.reset


async def test_logits_that_are_not_finite_end_their_call_alone() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        doomed = generate(service, seed=1, n=2)
        step = await stream.step()
        other = generate(service, seed=2)
        await until(lambda: service.manager.activity().waiting == 1, "the other call waits")
        await stream.send(result=executor.execute(step))
        step = await stream.step()
        seeds = np.frombuffer(pb.StepBody.FromString(step.body).seed, "<u8").tolist()
        assert sorted(seeds) == [1, 1, 2]
        result = executor.execute(step)
        tokens = np.frombuffer(result.token_ids, "<i4").copy()
        tokens[seeds.index(1)] = -1
        result.token_ids = tokens.tobytes()
        await stream.send(result=result)
        async with stream.serving():
            refusal = await refused_call(doomed)
            assert (refusal.code, refusal.reason) == (Code.ABORTED, "LOGITS_NOT_FINITE")
            assert refusal.numbers == {"position": str(len(PROMPT) + 1)}
            assert await finished(other) == expected(seed=2)
            assert service.manager.epoch == stream.epoch


async def test_a_fault_in_taking_a_result_ends_the_calls_of_its_step_and_resets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append, faults = PageTable.append, [ZeroDivisionError("in the middle of it")]

    def failing(self: PageTable, sequences: object, tokens: object) -> None:
        if len(sequences) and faults:  # type: ignore[arg-type]
            raise faults.pop()
        append(self, sequences, tokens)  # type: ignore[arg-type]

    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        step = await stream.step()
        waiting = generate(service, PROMPT[::-1])
        await until(lambda: service.manager.activity().waiting == 1, "the other call waits")
        monkeypatch.setattr(PageTable, "append", failing)
        with structlog.testing.capture_logs() as logs:
            await stream.send(result=executor.execute(step))
            refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "RESULT_LOST")
        assert any(isinstance(entry.get("exc_info"), ZeroDivisionError) for entry in logs)
        refusal = await refused_call(call)
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "RESULT_LOST")
        again = await executor.attach()
        assert again.welcome.reset
        async with again.serving():
            assert await finished(waiting) == expected(PROMPT[::-1])


async def test_a_step_takes_no_less_than_the_executor_spent_of_it() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        spent = 0
        for _ in range(NEW):
            step = await stream.step()
            began = time.perf_counter_ns()
            result = executor.execute(step)
            await asyncio.sleep(0.003)  # the executor takes its time
            result.ops_us, result.compute_us = 500, (time.perf_counter_ns() - began) // 1000 - 500
            spent += result.ops_us + result.compute_us
            await stream.send(result=result)
        await finished(call)
        activity = (await service.reads.GetPool(block_manager_pb2.GetPoolRequest())).activity
        assert (activity.steps, activity.executor_us) == (NEW, spent)
        assert activity.step_us >= spent


async def test_an_executor_that_claims_more_time_than_there_was_is_not_believed() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        for _ in range(NEW):
            result = executor.execute(await stream.step())
            result.compute_us = (1 << 64) - 1
            await stream.send(result=result)
        await finished(call)
        activity = (await service.reads.GetPool(block_manager_pb2.GetPoolRequest())).activity
        assert 0 < activity.executor_us <= activity.step_us


# --- fencing --------------------------------------------------------------------------------------------------------


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


async def test_a_step_that_is_refused_again_and_again_ends_its_calls_and_lets_the_others_go_on() -> None:
    async with running_service(attached=False, limits=Limits(max_running=1)) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        doomed = generate(service)
        await stream.answer()
        waiting = generate(service, PROMPT[::-1])
        await until(lambda: service.manager.activity().waiting == 1, "the other call waits")
        for _ in range(MAX_FRUITLESS):
            assert not doomed.done()
            step = await stream.step()
            await stream.send(refusal=pb.Refusal(step_id=step.step_id, reason="BLOCK_MISSING"))
            assert (await stream.refusal()).reason == "STEP_REFUSED"
            stream = await executor.attach()
        refusal = await refused_call(doomed)
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "STEP_FAILED")
        assert refusal.numbers == {"tries": str(MAX_FRUITLESS)}
        async with stream.serving():
            assert await finished(waiting) == expected(PROMPT[::-1])


@pytest.mark.parametrize("change", [{"id": "another"}, {"fingerprint": b"another"}], ids=str)
async def test_a_new_boot_with_another_model_ends_the_calls_of_the_one_before(change: dict[str, object]) -> None:
    async with running_service(attached=False) as service:
        stream = await LinkExecutor(service, "a").attach()
        call = generate(service)
        await stream.answer()
        await _cut(service, stream)
        other = LinkExecutor(service, "b")
        hello = other.hello()
        hello.model.MergeFrom(pb.ModelDescription(**change))  # type: ignore[arg-type]
        again = await other.attach(hello)
        refusal = await refused_call(call)
        assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "MODEL_CHANGED")
        async with again.serving():
            assert await finished(generate(service)) == expected()


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


# --- silence --------------------------------------------------------------------------------------------------------

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


# --- exactly once ---------------------------------------------------------------------------------------------------


async def test_a_step_that_did_not_arrive_is_sent_again_byte_for_byte() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service, n=2)
        for _ in range(3):
            await stream.answer()
        lost = await stream.step()
        await _cut(service, stream)
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
        await _cut(service, stream)
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
        await _cut(service, stream)
        again = await executor.attach(hello)
        assert not again.welcome.reset
        await again.send(result=result)
        assert (await again.step()).step_id == 2
        again.call.cancel()
        call.cancel()


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
        await _cut(service, stream)
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
        await _cut(service, stream)
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
            await _cut(service, stream)
        last = await LinkExecutor(service, "the last").attach()
        async with last.serving():
            assert await finished(calls[0]) == expected(n=3)
            assert await finished(calls[1]) == expected([*PROMPT, 3, 4, 5, 6], seed=5)
        states = service.manager.page_table.states()  # type: ignore[union-attr]
        assert states.null + states.free + states.cached == NUM_BLOCKS
