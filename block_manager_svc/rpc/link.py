"""ExecutorLinkService: the stream between the manager and an executor that dialled in."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TypeAlias

import grpc
import structlog

from block_manager_svc.core.errors import Aborted, DeadlineExceeded, FailedPrecondition, InvalidArgument, Refused
from block_manager_svc.manager import ExecutorHello, Manager, ModelInfo, Welcome
from block_manager_svc.oplog.stream import Position, SentStep
from block_manager_svc.rpc.convert import step_outputs
from pagedkv.v1 import executor_link_pb2 as pb
from pagedkv.v1 import executor_link_pb2_grpc

log = structlog.get_logger(__name__)

AttachContext: TypeAlias = "grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]"

MAX_FILES = 16
MAX_FILE_BYTES = 256 << 20
DIGEST_BYTES = 32


class ExecutorLinkServicer(executor_link_pb2_grpc.ExecutorLinkServiceServicer):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def Attach(self, _requests: object, context: AttachContext) -> None:  # noqa: N802
        await _Session(self._manager, context).run()


class _Session:
    """One Attach call, from its hello to its end. Implements manager.Link."""

    def __init__(self, manager: Manager, context: AttachContext) -> None:
        self._manager = manager
        self._context = context
        self._silence = manager.limits.silence_limit_ms / 1000
        self._interval = manager.limits.heartbeat_interval_ms / 1000
        self._outbox: asyncio.Queue[pb.AttachResponse] = asyncio.Queue()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._epoch = 0
        self._boot_id = ""
        self._heard = self._spoke = time.monotonic()

    # --- manager.Link -----------------------------------------------------------------------------------------------

    def send(self, step: SentStep, results_durable_through: int) -> None:
        self._outbox.put_nowait(
            self._message(
                step=pb.Step(
                    step_id=step.step_id,
                    digest=step.digest,
                    results_durable_through=results_durable_through,
                    body=step.body,
                )
            )
        )

    def close(self, why: Refused) -> None:
        if not self._closed.done():
            self._closed.set_exception(why)

    # --- the call ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises Refused when the stream ends otherwise than by the executor's own closing it."""
        hello = await self._hear_hello()
        self._boot_id = hello.position.boot_id
        welcome = self._manager.attach(hello, self)
        try:
            await self._follow(welcome)
        finally:
            self._manager.detach(self)

    async def _follow(self, welcome: Welcome) -> None:
        self._epoch = self._manager.epoch
        limits = self._manager.limits
        self._outbox.put_nowait(
            self._message(
                welcome=pb.Welcome(
                    reset=welcome.reset,
                    results_durable_through=welcome.results_durable_through,
                    heartbeat_interval_ms=limits.heartbeat_interval_ms,
                    silence_limit_ms=limits.silence_limit_ms,
                )
            )
        )
        for step in welcome.resend:
            self.send(step, welcome.results_durable_through)
        parts = [asyncio.ensure_future(part) for part in (self._read(), self._write(), self._watch(), self._closed)]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            # A reason given by the manager explains best why the other parts ended.
            for part in sorted((part for part in parts if part.done()), key=lambda part: part is not self._closed):
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            self._heard = time.monotonic()
            if (request.service_id, request.epoch, request.boot_id) != (
                self._manager.service_id,
                self._epoch,
                self._boot_id,
            ):
                raise FailedPrecondition(
                    "EPOCH_STALE",
                    f"a message of epoch {request.epoch}, but this stream is of epoch {self._epoch}: attach again",
                    epoch=request.epoch,
                    current=self._epoch,
                )
            kind = request.WhichOneof("message")
            if kind == "result":
                self._take_result(request.result)
            elif kind == "refusal":
                refusal = request.refusal
                self._manager.distrust(
                    self,
                    Aborted(
                        "STEP_REFUSED",
                        f"the executor refused step {refusal.step_id}: {refusal.reason}: {refusal.message}",
                        step_id=refusal.step_id,
                        refusal=refusal.reason,
                    ),
                )
            elif kind != "heartbeat":
                raise InvalidArgument("HELLO_INVALID", f"{kind or 'an empty message'} after the hello: attach again")

    def _take_result(self, result: pb.StepResult) -> None:
        try:
            if result.rank != 0:
                raise ValueError(f"of rank {result.rank}, but this stream is of rank 0")
            outputs = step_outputs(result)
        except ValueError as error:
            why = InvalidArgument("RESULT_INVALID", f"step {result.step_id}: {error}", step_id=result.step_id)
            self._manager.distrust(self, why)
            return
        self._manager.take_result(self, result.step_id, outputs, result.ops_us + result.compute_us)

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            await self._context.write(message)
            self._spoke = time.monotonic()

    async def _watch(self) -> None:
        """Heartbeats when nothing else was sent; ends the stream when nothing was heard."""
        while True:
            await asyncio.sleep(self._interval / 2)
            now = time.monotonic()
            if now - self._heard > self._silence:
                raise DeadlineExceeded(
                    "EXECUTOR_SILENT",
                    f"nothing was heard for {now - self._heard:.1f} s, the limit is {self._silence} s: attach again",
                    silent_s=round(now - self._heard, 3),
                    limit_s=self._silence,
                )
            if now - self._spoke >= self._interval / 2 and self._outbox.empty():
                durable = self._manager.results_durable_through
                self._outbox.put_nowait(self._message(heartbeat=pb.Heartbeat(results_durable_through=durable)))

    def _message(self, **part: object) -> pb.AttachResponse:
        return pb.AttachResponse(
            service_id=self._manager.service_id,
            epoch=self._epoch,
            boot_id=self._boot_id,
            **part,  # type: ignore[arg-type]
        )

    # --- the hello ----------------------------------------------------------------------------------------------------

    async def _next(self) -> pb.AttachRequest:
        try:
            request = await asyncio.wait_for(self._context.read(), self._silence)
        except TimeoutError:
            raise DeadlineExceeded(
                "EXECUTOR_SILENT", f"no hello within {self._silence} s: attach again", limit_s=self._silence
            ) from None
        if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            raise InvalidArgument("HELLO_EXPECTED", "the stream was closed before its hello was complete")
        self._heard = time.monotonic()
        return request

    async def _hear_hello(self) -> ExecutorHello:
        request = await self._next()
        if request.WhichOneof("message") != "hello":
            raise InvalidArgument("HELLO_EXPECTED", "the first message of a stream is a hello")
        _check(bool(request.boot_id), "boot_id", "is empty")
        _check(request.epoch < 1 << 63, "epoch", f"is {request.epoch}: below 2^63, so that there is one above it")
        hello = request.hello
        geometry, model = hello.geometry, hello.model
        _check(hello.world_size == 1, "world_size", f"is {hello.world_size}: one rank is served")
        _check(hello.rank == 0, "rank", f"is {hello.rank} of {hello.world_size}")
        _check(geometry.num_blocks >= 2, "num_blocks", f"is {geometry.num_blocks}: block 0 and one more at least")
        _check(geometry.num_blocks < 1 << 31, "num_blocks", f"is {geometry.num_blocks}: below 2^31")
        _check(1 <= geometry.block_size < 1 << 16, "block_size", f"is {geometry.block_size}: 1 to 65,535")
        _check(geometry.block_bytes >= 1, "block_bytes", "is 0")
        for name in ("max_rows", "max_batch_tokens", "max_blocks_per_row"):
            _check(1 <= getattr(hello, name) < 1 << 31, name, f"is {getattr(hello, name)}: 1 to 2^31 - 1")
        _check(bool(model.id), "model.id", "is empty")
        for name in ("vocab_size", "max_context"):
            _check(1 <= getattr(model, name) < 1 << 31, name, f"is {getattr(model, name)}: 1 to 2^31 - 1")
        _check(hello.completed <= hello.accepted, "completed", f"is {hello.completed}, accepted {hello.accepted}")
        _check(len(hello.digest) in (0, DIGEST_BYTES), "digest", f"has {len(hello.digest)} bytes, not {DIGEST_BYTES}")
        return ExecutorHello(
            position=Position(
                service_id=request.service_id,
                epoch=request.epoch,
                boot_id=request.boot_id,
                accepted=hello.accepted,
                completed=hello.completed,
                digest=hello.digest,
            ),
            num_blocks=geometry.num_blocks,
            num_host_blocks=geometry.num_host_blocks,
            block_size=geometry.block_size,
            block_bytes=geometry.block_bytes,
            max_rows=hello.max_rows,
            max_batch_tokens=hello.max_batch_tokens,
            max_blocks_per_row=hello.max_blocks_per_row,
            model=ModelInfo(
                model.id, model.vocab_size, model.max_context, tuple(model.eos_token_ids), model.fingerprint
            ),
            files=await self._hear_files(list(hello.attachments)),
            address=hello.executor_address,
        )

    async def _hear_files(self, announced: list[pb.Attachment]) -> dict[str, bytes]:
        if len(announced) > MAX_FILES or sum(file.size for file in announced) > MAX_FILE_BYTES:
            raise InvalidArgument(
                "ATTACHMENT_INVALID",
                f"{len(announced)} attachments of {sum(file.size for file in announced)} bytes: "
                f"at most {MAX_FILES} of {MAX_FILE_BYTES} in all",
            )
        if len({file.name for file in announced}) < len(announced):
            raise InvalidArgument("ATTACHMENT_INVALID", f"{len(announced)} attachments, and two of one name")
        files: dict[str, bytes] = {}
        for file in announced:
            data = bytearray()
            while len(data) < file.size:
                piece = (await self._next()).attachment
                if piece.name != file.name or piece.offset != len(data) or not piece.data:
                    raise InvalidArgument(
                        "ATTACHMENT_INVALID",
                        f"a piece of {piece.name!r} at {piece.offset}, expected {file.name!r} at {len(data)}",
                    )
                data += piece.data
            if len(data) != file.size or hashlib.sha256(data).digest() != file.sha256:
                raise InvalidArgument(
                    "ATTACHMENT_INVALID", f"{file.name!r} has {len(data)} bytes and is not what was announced"
                )
            files[file.name] = bytes(data)
        return files


def _check(holds: bool, field: str, what: str) -> None:
    if not holds:
        raise InvalidArgument("HELLO_INVALID", f"{field} {what}", field=field)
