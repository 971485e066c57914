"""What a StepBatch costs beyond the way there and back: one token more for each of 256 sequences.

Service and executor run for real. Calls take turns with those of a gRPC server that does nothing: its requests and
replies have the same sizes, and it runs the same asyncio server in a process of its own. The client is the same for
both, and handles bytes only, so its own work on messages is in neither.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import grpc.aio

from benchmarks.stack import running
from pagedkv import Batch, Client
from pagedkv._convert import step_batch_request
from pagedkv.v1 import block_manager_pb2 as pb

SEQUENCES, PROMPT = 256, 40
WARM_UP, CALLS = 50, 1000
BLOCKS = 1 + SEQUENCES * (2 * (WARM_UP + CALLS) + PROMPT) // 16
METHOD = "/pagedkv.v1.BlockManagerService/StepBatch"


@dataclass(frozen=True, slots=True)
class Row:
    batch: str
    request_bytes: int
    reply_bytes: int
    batch_p50_us: float
    batch_p99_us: float
    echo_p50_us: float
    echo_p99_us: float


async def _serve_echo(reply_bytes: int) -> None:
    reply = bytes(reply_bytes)

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:  # type: ignore[type-arg]
        return reply

    server = grpc.aio.server()
    handlers = {"answer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def _take_turns(address: str, requests: list[bytes], reply_bytes: int) -> tuple[list[float], list[float]]:
    """Microseconds of each call to the service, and of each echo between them."""
    command = [sys.executable, "-m", "benchmarks.step_batch", "echo", str(reply_bytes)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        with grpc.insecure_channel(address) as ours, grpc.insecure_channel(f"127.0.0.1:{port}") as theirs:
            calls = ours.unary_unary(METHOD), theirs.unary_unary("/echo/answer")
            times: tuple[list[float], list[float]] = [], []
            for request in requests:
                for call, taken in zip(calls, times, strict=True):
                    begin = time.perf_counter_ns()
                    call(request)
                    taken.append((time.perf_counter_ns() - begin) / 1000)
            return times[0][WARM_UP:], times[1][WARM_UP:]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def _batch(ids: list[int], committed: int | None) -> bytes:
    batch = Batch()
    if committed is not None:
        batch.commit(ids, [committed] * len(ids))
    batch.append(ids, [7] * len(ids))
    return bytes(step_batch_request(batch, "", atomic=False, wait=True).SerializeToString())


def _measure(address: str, name: str, with_commit: bool) -> Row:
    with Client(address) as client:
        create = Batch()
        made = create.create([list(range(i, i + PROMPT)) for i in range(SEQUENCES)])
        create.commit(made, [PROMPT] * SEQUENCES)
        ids = client.step_batch(create)[made].sequences.tolist()
    requests = [_batch(ids, PROMPT + step if with_commit else None) for step in range(WARM_UP + CALLS)]
    with grpc.insecure_channel(address) as channel:
        first = channel.unary_unary(METHOD)(requests[0])
    reply = pb.StepBatchResponse.FromString(first)
    assert not any(result.HasField("error") for result in reply.results), reply
    batch, echo = _take_turns(address, requests[1:], len(first))
    free = Batch()
    free.free(ids)
    with Client(address) as client:
        client.step_batch(free).raise_errors()
    return Row(name, len(requests[-1]), len(first), *_percentiles(batch), *_percentiles(echo))


def _percentiles(times: list[float]) -> tuple[float, float]:
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def run() -> list[Row]:
    from benchmarks.tiny import save_tiny_llama

    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_llama(Path(directory) / "tiny")
        with running(model, blocks=BLOCKS) as address:
            return [
                _measure(address, f"append to {SEQUENCES}", False),
                _measure(address, f"commit and append to {SEQUENCES}", True),
            ]


def table(rows: list[Row]) -> tuple[str, list[str], list[list[str]]]:
    return (
        "StepBatch against an echo of the same sizes",
        ["batch", "request, bytes", "reply, bytes", "p50, µs", "echo p50, µs", "ratio", "p99, µs", "echo p99", "ratio"],
        [
            [
                row.batch,
                f"{row.request_bytes:,}",
                f"{row.reply_bytes:,}",
                f"{row.batch_p50_us:,.0f}",
                f"{row.echo_p50_us:,.0f}",
                f"{row.batch_p50_us / row.echo_p50_us:.2f}",
                f"{row.batch_p99_us:,.0f}",
                f"{row.echo_p99_us:,.0f}",
                f"{row.batch_p99_us / row.echo_p99_us:.2f}",
            ]
            for row in rows
        ],
    )


def to_json(rows: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["echo", reply_bytes]:
            asyncio.run(_serve_echo(int(reply_bytes)))
        case _:
            for row in run():
                print(json.dumps(asdict(row)))
