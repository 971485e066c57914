"""The whole service on a real port, its executor played from a script: only what computes tokens is not real."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import numpy as np
from google.protobuf import duration_pb2
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_status import rpc_status
from support.tiny_models import byte_level_tokenizer

from block_manager_svc.core.errors import Refused
from block_manager_svc.core.step import StepOutputs, StepPlan
from block_manager_svc.identity import Callers
from block_manager_svc.manager import ExecutorHello, Limits, Manager, ModelInfo
from block_manager_svc.oplog.stream import Position, SentStep
from block_manager_svc.rpc.convert import step_body
from block_manager_svc.rpc.server import Server
from pagedkv.v1 import block_manager_pb2_grpc, generation_pb2, generation_pb2_grpc

DEADLINE_S = 30.0
TOKENIZER = byte_level_tokenizer()
VOCAB = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
MAX_CONTEXT = 2048
TEXT_FILES = {
    "tokenizer.json": TOKENIZER.backend_tokenizer.to_str().encode(),
    "chat_template.jinja": TOKENIZER.chat_template.encode(),
    "special_tokens.json": json.dumps(TOKENIZER.special_tokens_map).encode(),
}

# (sample, position) -> token id; position counts from the prompt's first token.
Script = Callable[[int, int], int]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.backend_tokenizer.encode(text).ids


def saying(*texts: str, after: int) -> Script:
    """Sample i says texts[i], token by token, after a prompt of `after` tokens; then ends itself."""
    said = [[*ids_of(text), EOS] for text in texts]
    return lambda sample, position: said[sample][position - after]


def rambling(sample: int, position: int) -> int:
    """Letters without end."""
    return ids_of("abcdefgh")[(sample + position) % 8]


class ScriptedExecutor:
    """Implements manager.Link. Steps are answered in the event loop's next turn, while `open`."""

    def __init__(
        self, manager: Manager, plans: list[StepPlan], files: dict[str, bytes], num_blocks: int, num_host: int
    ) -> None:
        self.script: Script = rambling
        self.open = True
        self.plans = plans
        self._manager = manager
        self._files = files
        self._num_blocks = num_blocks
        self._num_host = num_host
        self.unanswered: list[tuple[SentStep, StepPlan]] = []

    def attach(self) -> None:
        boot = hashlib.sha256(str(id(self)).encode()).hexdigest()
        self._manager.attach(
            ExecutorHello(
                position=Position("", 0, boot, 0, 0, b""),
                num_blocks=self._num_blocks,
                num_host_blocks=self._num_host,
                block_size=16,
                block_bytes=1024,
                max_rows=128,
                max_batch_tokens=2048,
                max_blocks_per_row=MAX_CONTEXT // 16,
                model=ModelInfo("tiny", VOCAB, MAX_CONTEXT, (EOS,)),
                files=self._files,
                address="",
            ),
            self,
        )

    def detach(self) -> None:
        self._manager.detach(self)

    def send(self, step: SentStep, results_durable_through: int) -> None:
        self.unanswered.append((step, self.plans[-1]))
        if self.open:
            asyncio.get_running_loop().call_soon(self.answer)

    def close(self, why: Refused) -> None:
        self.detach()

    def go_on(self) -> None:
        self.open = True
        self.answer()

    def answer(self) -> None:
        """The result of every step that has none."""
        steps, self.unanswered = self.unanswered, []
        for step, plan in steps:
            self._manager.take_result(self, step.step_id, self._compute(plan), executor_us=0)

    def _compute(self, plan: StepPlan) -> StepOutputs:
        samples = plan.samples
        positions = (plan.batch.start + plan.batch.count)[samples.source]
        tokens = [self.script(int(i), int(at)) for i, at in zip(samples.index, positions, strict=True)]
        best = [k for k in samples.logprobs.tolist() if k > 0]
        return StepOutputs(
            np.array(tokens, np.int32),
            np.full(int((samples.logprobs >= 0).sum()), -0.5, np.float32),
            np.concatenate([np.arange(k) for k in best] or [[]]).astype(np.int32),
            np.concatenate([-1.0 - np.arange(k) for k in best] or [[]]).astype(np.float32),
        )


@dataclass
class Service:
    manager: Manager
    server: Server
    executor: ScriptedExecutor
    address: str
    channel: grpc.aio.Channel

    @property
    def generation(self) -> generation_pb2_grpc.GenerationServiceStub:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def reads(self) -> block_manager_pb2_grpc.BlockManagerServiceStub:
        return block_manager_pb2_grpc.BlockManagerServiceStub(self.channel)

    def blocks_in_use(self) -> int:
        table = self.manager.page_table
        assert table is not None
        return table.sharing().referenced_blocks

    async def all_blocks_back(self) -> None:
        await until(lambda: self.blocks_in_use() == 0, "no block is referenced")
        assert self.manager.page_table is not None
        assert self.manager.page_table.sequences().tolist() == []
        assert self.manager.page_table.check() == []


@asynccontextmanager
async def running_service(
    *,
    attached: bool = True,
    files: dict[str, bytes] = TEXT_FILES,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    num_blocks: int = 512,
    num_host: int = 0,
    write_timeout: float = 5.0,
    callers: Callers | None = None,
) -> AsyncIterator[Service]:
    """At its end every block must be back, but for a service that has stopped itself."""
    plans: list[StepPlan] = []

    def encode(plan: StepPlan, step_id: int) -> bytes:
        plans.append(plan)
        return step_body(plan, step_id)

    manager = Manager(limits, encode)
    server = Server(manager, "127.0.0.1:0", write_timeout, callers)
    executor = ScriptedExecutor(manager, plans, files, num_blocks, num_host)
    address = await server.start()
    if attached:
        executor.attach()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield (service := Service(manager, server, executor, address, channel))
            if manager.page_table is not None:
                executor.go_on()
                await service.all_blocks_back()
    finally:
        await server.stop()


async def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"after {DEADLINE_S:g} s still not: {what}"
        await asyncio.sleep(0.002)


def request(prompt: object = "Reading never copies.", **sampling: object) -> generation_pb2.GenerateRequest:
    """Text, token ids, or (role, content) pairs as a chat."""
    message = generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(**sampling))
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], tuple):
        for role, content in prompt:
            message.chat.messages.add(role=role, content=content)
    else:
        message.token_ids.ids.extend(prompt)
    return message


@dataclass
class Refusal:
    code: grpc.StatusCode
    message: str
    reason: str
    numbers: dict[str, str]
    retry_after: float | None


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()} {error.details()!r} carries no google.rpc.Status"
    info, retry = ErrorInfo(), RetryInfo(retry_delay=duration_pb2.Duration(seconds=-1))
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(retry)
    assert info.domain == "pagedkv"
    delay = retry.retry_delay.ToNanoseconds() / 1e9
    return Refusal(error.code(), error.details(), info.reason, dict(info.metadata), delay if delay >= 0 else None)
