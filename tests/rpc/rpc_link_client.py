"""An executor on paper at the other end of a real Attach stream: it says what it is told to, right or wrong.

A LinkExecutor is one process, from boot to death; its streams come and go. What it answers is computed from the steps'
bodies alone (support/paper_executor.py), so a step that is lost, doubled or wrongly named shows in the tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc
import numpy as np
from rpc_scripted import DEADLINE_S, VOCAB, Refusal, Service, refusal_of
from support.paper_executor import PaperExecutor

from block_manager_svc.core.step import Batch, BlockOps, Samples, StepPlan, TableDeltas
from pagedkv.v1 import executor_link_pb2 as pb
from pagedkv.v1 import executor_link_pb2_grpc

NUM_BLOCKS = 64
BLOCK_SIZE = 4
MAX_ROWS = 16
NO_DIGEST = bytes(32)


def announced(name: str, data: bytes) -> pb.Attachment:
    return pb.Attachment(name=name, size=len(data), sha256=hashlib.sha256(data).digest())


def plan_of(body: pb.StepBody) -> StepPlan:
    def i32(column: bytes) -> np.ndarray:
        return np.frombuffer(column, "<i4")

    return StepPlan(
        BlockOps(np.frombuffer(body.op_kind, np.uint8), i32(body.op_src), i32(body.op_dst)),
        TableDeltas(i32(body.delta_row), i32(body.delta_first), i32(body.delta_count), i32(body.delta_blocks)),
        Batch(i32(body.row), i32(body.start), i32(body.count), i32(body.token_ids)),
        Samples(
            source=i32(body.sample_from),
            index=i32(body.sample_index),
            seed=np.frombuffer(body.seed, "<u8"),
            temperature=np.frombuffer(body.temperature, "<f4"),
            top_p=np.frombuffer(body.top_p, "<f4"),
            top_k=i32(body.top_k),
            logprobs=i32(body.logprobs),
        ),
    )


class LinkExecutor:
    def __init__(
        self,
        service: Service,
        boot_id: str = "a",
        files: Mapping[str, bytes] | None = None,
        *,
        num_blocks: int = NUM_BLOCKS,
        fingerprint: bytes = b"",
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._metadata = metadata
        self.boot_id = boot_id
        self.num_blocks = num_blocks
        self.fingerprint = fingerprint
        self.files = dict(files or {})
        self.service_id = ""
        self.epoch = 0
        self._stub = executor_link_pb2_grpc.ExecutorLinkServiceStub(service.channel)
        self.reset()

    def reset(self) -> None:
        self.accepted = 0
        self.digest = NO_DIGEST
        self.durable = 0
        self.kept: dict[int, pb.StepResult] = {}
        self._paper = PaperExecutor(self.num_blocks, BLOCK_SIZE, MAX_ROWS, VOCAB)

    def hello(self) -> pb.Hello:
        return pb.Hello(
            rank=0,
            world_size=1,
            geometry=pb.Geometry(
                num_blocks=self.num_blocks,
                num_host_blocks=3,
                block_size=BLOCK_SIZE,
                num_layers=1,
                num_kv_heads=1,
                key_head_dim=8,
                value_head_dim=8,
                dtype="float64",
                block_bytes=512,
                layout_hash=bytes(32),
            ),
            accepted=self.accepted,
            completed=self.accepted,
            digest=self.digest if self.accepted else b"",
            max_rows=MAX_ROWS,
            max_batch_tokens=64,
            max_blocks_per_row=NUM_BLOCKS - 1,
            model=pb.ModelDescription(
                id="paper", vocab_size=VOCAB, max_context=200, eos_token_ids=[1], fingerprint=self.fingerprint
            ),
            attachments=[announced(name, data) for name, data in self.files.items()],
        )

    def dial(self) -> LinkStream:
        """A stream on which nothing has been said yet."""
        return LinkStream(self, self._stub.Attach(metadata=self._metadata))

    async def attach(self, hello: pb.Hello | None = None) -> LinkStream:
        """Says hello and takes the welcome. Raises AssertionError with the refusal, if that is what comes."""
        stream = self.dial()
        await stream.send(hello=hello or self.hello())
        for name, data in self.files.items():
            await stream.send(attachment=pb.AttachmentPiece(name=name, offset=0, data=data))
        await stream.take_welcome()
        return stream

    async def refused_at_attach(self, hello: pb.Hello | None = None) -> Refusal:
        stream = self.dial()
        await stream.send(hello=hello or self.hello())
        return await stream.refusal()

    def execute(self, step: pb.Step) -> pb.StepResult:
        """Accepts the next step, computes it and keeps its result; a copy, to be spoilt at will."""
        assert step.step_id == self.accepted + 1, f"step {step.step_id} came, {self.accepted} are accepted"
        assert step.digest == hashlib.sha256(self.digest + step.body).digest()
        body = pb.StepBody.FromString(step.body)
        assert body.step_id == step.step_id
        outputs = self._paper.execute(plan_of(body))
        self.accepted, self.digest = step.step_id, step.digest
        result = pb.StepResult(
            step_id=step.step_id,
            token_ids=outputs.token_ids.tobytes(),
            logprob=outputs.logprob.tobytes(),
            top_token_ids=outputs.top_token_ids.tobytes(),
            top_logprobs=outputs.top_logprobs.tobytes(),
        )
        self.kept[step.step_id] = result
        copy = pb.StepResult()
        copy.CopyFrom(result)
        return copy

    def told_durable(self, through: int) -> None:
        assert through <= self.accepted, f"durable through {through}, but only {self.accepted} are computed"
        self.durable = max(self.durable, through)
        for step_id in [step_id for step_id in self.kept if step_id <= through]:
            del self.kept[step_id]


class LinkStream:
    def __init__(self, executor: LinkExecutor, call: grpc.aio.StreamStreamCall) -> None:
        self.executor = executor
        self.call = call
        self.welcome = pb.Welcome()
        self.epoch = 0
        self.heartbeats = 0

    async def send(
        self,
        *,
        service_id: str | None = None,
        epoch: int | None = None,
        boot_id: str | None = None,
        **message: object,
    ) -> None:
        """Named as the executor stands, but for what is given."""
        executor = self.executor
        await self.call.write(
            pb.AttachRequest(
                service_id=executor.service_id if service_id is None else service_id,
                epoch=executor.epoch if epoch is None else epoch,
                boot_id=executor.boot_id if boot_id is None else boot_id,
                **message,  # type: ignore[arg-type]
            )
        )

    async def heartbeat(self) -> None:
        accepted = self.executor.accepted
        await self.send(heartbeat=pb.Heartbeat(accepted=accepted, completed=accepted))

    async def _read(self) -> pb.AttachResponse:
        try:
            message = await asyncio.wait_for(self.call.read(), DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(f"the service ended the stream: {refusal_of(error)}") from error
        assert message is not grpc.aio.EOF, "the service ended the stream"
        return message

    async def take_welcome(self) -> None:
        message = await self._read()
        assert message.WhichOneof("message") == "welcome", f"a welcome was expected: {message}"
        executor, self.welcome = self.executor, message.welcome
        assert message.boot_id == executor.boot_id
        self.epoch = message.epoch
        if self.welcome.reset:
            assert message.service_id != executor.service_id or message.epoch > executor.epoch
            executor.reset()
            executor.service_id, executor.epoch = message.service_id, message.epoch
        assert (message.service_id, message.epoch) == (executor.service_id, executor.epoch)
        executor.told_durable(self.welcome.results_durable_through)

    async def next(self) -> pb.AttachResponse:
        """The next message, checked to be named as this stream is, its watermark taken."""
        message = await self._read()
        executor = self.executor
        named = (message.service_id, message.epoch, message.boot_id)
        assert named == (executor.service_id, self.epoch, executor.boot_id)
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            self.heartbeats += 1
            executor.told_durable(message.heartbeat.results_durable_through)
        else:
            assert kind == "step", f"a step or a heartbeat was expected: {message}"
            executor.told_durable(message.step.results_durable_through)
        return message

    async def step(self) -> pb.Step:
        while (message := await self.next()).WhichOneof("message") != "step":
            pass
        return message.step

    async def answer(self) -> pb.Step:
        """Computes the next step and sends its result."""
        step = await self.step()
        await self.send(result=self.executor.execute(step))
        return step

    async def refusal(self) -> Refusal:
        """How the service ends the stream; what it says before that is passed over."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)
        raise AssertionError("the service ended the stream without a reason")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Sends what is kept, then answers each step; at the end the connection is cut."""

        async def serve() -> None:
            for result in list(self.executor.kept.values()):
                await self.send(result=result)
            while True:
                await self.answer()

        task = asyncio.create_task(serve())
        try:
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.call.cancel()
