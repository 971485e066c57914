"""The hello of an Attach stream and its attachments: what is taken, what is refused, by field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from rpc_link_calls import Code, expected, finished, generate, models
from rpc_link_client import LinkExecutor, announced
from rpc_scripted import TEXT_FILES, VOCAB, Refusal, Service, refusal_of, running_service

from block_manager_svc.manager import Limits
from pagedkv.v1 import executor_link_pb2 as pb
from pagedkv.v1 import generation_pb2


# --- the hello --------------------------------------------------------------------------------------------------------
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


# --- its attachments --------------------------------------------------------------------------------------------------
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
