"""The service's contract on a real port, played from a script: the edge that the SDK and kvctl are tested at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pagedkv.v1 import block_manager_pb2 as bm
from pagedkv.v1 import block_manager_pb2_grpc, generation_pb2_grpc
from pagedkv.v1 import generation_pb2 as gen

Script = Callable[[gen.GenerateRequest, grpc.ServicerContext], Iterator[gen.GenerateResponse]]
DEADLINE = 10.0  # seconds that a condition is waited for

USAGE = gen.Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=3, preemptions=1, seed=2**64 - 1)
MODEL = gen.Model(
    id="tiny", vocab_size=512, max_context=128, eos_token_ids=[2, 3], accepts_text=True, accepts_chat=True
)
HEADER = bm.ReplyHeader(service_id="svc", epoch=7, revision=41)
QUOTA = bm.TenantUsage(
    tenant="red", charged=7, cached=2, reserved=1, host=3, floor=4, quota=0, host_floor=1, host_quota=9
)
POOL = bm.GetPoolResponse(
    header=HEADER,
    block_size=16,
    block_bytes=4096,
    device=bm.BlockStates(null=1, free=90, reserved=2, active=3, sealed=4, cached=5, quarantined=6),
    host=bm.BlockStates(free=8),
    sharing=bm.Sharing(
        table_entries=12,
        referenced_blocks=7,
        shared_blocks=2,
        peak_table_entries=20,
        peak_referenced_blocks=11,
        peak_shared_blocks=3,
    ),
    activity=bm.Activity(
        steps=1_000_000,
        prompt_tokens=50,
        cached_tokens=40,
        computed_tokens=30,
        sampled_tokens=20,
        copies_on_write=3,
        evicted_blocks=2,
        preemptions=1,
        step_us=900,
        executor_us=700,
        running=4,
        waiting=5,
        steps_in_flight=1,
        swapped_out_blocks=8,
        swapped_in_blocks=6,
    ),
    limit=100,
    watermark=1,
    layout=bm.Layout(free_runs=3, largest_free_run=69, highest_used_block=42),
    tenants=[bm.TenantUsage(tenant="default", charged=12, cached=5), QUOTA],
)
SEQUENCES = bm.ListSequencesResponse(
    header=HEADER,
    sequence=[11, 2**40],
    tokens=[40, 7],
    computed=[39, 0],
    blocks=[3, 0],
    shared_blocks=[2, 0],
    state=[bm.SEQUENCE_STATE_RUNNING, bm.SEQUENCE_STATE_WAITING],
)
TABLES = bm.GetBlockTablesResponse(
    header=HEADER,
    block_size=16,
    sequence=[11, 2**40],
    indptr=[0, 3, 3],
    indices=[5, 9, 6],
    last_page_len=[8, 0],
    refcount=[2, 2, 1],
    table_revision=[41, 9],
    slot_indptr=[0, 1, 1],
    slots=[80],
)


def row(
    text: str, *, sample: int = 0, token: int = 1, finish: int = gen.FINISH_REASON_UNSPECIFIED
) -> gen.GenerateResponse:
    """A message of one row."""
    return gen.GenerateResponse(sample=[sample], token_id=[token], text=[text], finish_reason=[finish])


def end() -> gen.GenerateResponse:
    """The last message, without rows."""
    return gen.GenerateResponse(usage=USAGE)


def texts(*parts: str) -> Script:
    """One sample with these texts, one a message, that ends with STOP."""

    def script(request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            yield row(part, token=100 + index, finish=gen.FINISH_REASON_STOP if last else gen.FINISH_REASON_UNSPECIFIED)
        yield end()

    return script


def messages(*replies: gen.GenerateResponse) -> Script:
    """These messages, and OK."""
    return lambda request, context: iter(replies)


def endless(request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:
    """A token every few milliseconds, until the call is over."""
    pause = threading.Event()
    context.add_callback(pause.set)
    while not pause.wait(0.005):
        yield row("tick ")


def silent(request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:
    """No token at all, until the call is over."""
    over = threading.Event()
    context.add_callback(over.set)
    over.wait()
    yield from ()


def refuse(
    context: grpc.ServicerContext,
    code: int,
    message: str,
    *,
    reason: str = "",
    retry_after: float | None = None,
    **numbers: object,
) -> NoReturn:
    """Ends the call with a google.rpc.Status; with no reason: without details."""
    details = []
    if reason:
        info = error_details_pb2.ErrorInfo(
            domain="pagedkv", reason=reason, metadata={name: str(value) for name, value in numbers.items()}
        )
        details.append(info)
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


def refusing(code: int, message: str, **details: object) -> Callable[[object, grpc.ServicerContext], NoReturn]:
    """A handler that refuses every call like this."""
    return lambda request, context: refuse(context, code, message, **details)  # type: ignore[arg-type]


NO_EXECUTOR = refusing(code_pb2.UNAVAILABLE, "no executor is attached", reason="EXECUTOR_UNAVAILABLE")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < limit, f"not within {DEADLINE:g} s: {what}"
        time.sleep(0.005)


@dataclass
class Scripted(generation_pb2_grpc.GenerationServiceServicer, block_manager_pb2_grpc.BlockManagerServiceServicer):
    """Both services. Replace a field to change what is answered; `calls` has every request, in order."""

    generate: Script = field(default_factory=lambda: texts("Paris", "."))
    watched: list[object] = field(default_factory=list)
    unary: dict[str, object] = field(
        default_factory=lambda: {
            "ListModels": gen.ListModelsResponse(models=[MODEL]),
            "GetPool": POOL,
            "ListSequences": SEQUENCES,
            "GetBlockTables": TABLES,
            "GetSequence": bm.GetSequenceResponse(header=HEADER, state=bm.SEQUENCE_STATE_ENGINE, tokens=40),
            "Match": bm.MatchResponse(
                header=HEADER, cached=b"\x10\0\0\0", admission=[bm.ADMISSION_LATER], shortfall=b"\2\0\0\0"
            ),
            "Audit": bm.AuditResponse(header=HEADER),
            "ResetCache": bm.ResetCacheResponse(header=HEADER, freed_blocks=12),
            "Resize": bm.ResizeResponse(header=HEADER, evicted_blocks=12),
            "SetQuota": bm.SetQuotaResponse(header=HEADER, usage=QUOTA),
            "Compact": bm.CompactResponse(header=HEADER, moved_blocks=5, changed_tables=2, step_id=9),
            "StepBatch": bm.StepBatchResponse(header=HEADER),
        }
    )
    calls: list[tuple[str, object]] = field(default_factory=list)
    running: int = 0  # Generate calls that are not over
    address: str = ""
    health: health.HealthServicer = field(default_factory=health.HealthServicer)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.serving(True)

    def serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set("", status.SERVING if serving else status.NOT_SERVING)

    def requests(self, method: str) -> list[object]:
        return [request for name, request in self.calls if name == method]

    def wait_started(self) -> None:
        wait_until(lambda: self.running > 0, "a Generate call has started")

    def wait_idle(self) -> None:
        """Waits until the server sees no Generate call any more: a service would have its blocks back now."""
        wait_until(lambda: bool(self.requests("Generate")) and self.running == 0, "no Generate call is left")

    def Generate(self, request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:  # noqa: N802
        with self._lock:
            self.running += 1
        if not context.add_callback(self._over):
            self._over()
        self.calls.append(("Generate", request))
        return self.generate(request, context)

    def _over(self) -> None:
        with self._lock:
            self.running -= 1

    def _unary(self, method: str, request: object, context: grpc.ServicerContext) -> object:
        self.calls.append((method, request))
        answer = self.unary[method]
        return answer(request, context) if callable(answer) else answer

    def ListModels(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("ListModels", request, context)

    def GetPool(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("GetPool", request, context)

    def ListSequences(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("ListSequences", request, context)

    def GetBlockTables(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("GetBlockTables", request, context)

    def WatchEvents(self, request: object, context: grpc.ServicerContext) -> Iterator[object]:  # noqa: N802
        self.calls.append(("WatchEvents", request))
        for each in self.watched:
            yield each(request, context) if callable(each) else each

    def GetSequence(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("GetSequence", request, context)

    def Match(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("Match", request, context)

    def ResetCache(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("ResetCache", request, context)

    def Resize(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("Resize", request, context)

    def SetQuota(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("SetQuota", request, context)

    def Compact(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("Compact", request, context)

    def StepBatch(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("StepBatch", request, context)

    def Audit(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return self._unary("Audit", request, context)

    def serve(self, port: int = 0) -> grpc.Server:
        """Starts a server of both services and grpc.health.v1 on a loopback port, by default a free one."""
        server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", 16 << 20)])
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        block_manager_pb2_grpc.add_BlockManagerServiceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        server.start()
        return server
