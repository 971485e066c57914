"""What service and link add to a decode step: everything but the executor's own work.

Both programs run for real with a tiny model. While n sequences decode, the time between two looks at the pool's
counters, divided by the steps between them, is a step's whole time; `executor_us` is what the executor spent on ops,
model and sampling. The difference is planning, encoding, two crossings of the link, validation, taking the result
and handing out n tokens on n streams. Its limit is measured in the same run: an empty bidirectional gRPC stream's
round trip between two processes, and the time that the same number of streamed messages takes with nothing behind them.
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

from benchmarks.stack import running
from pagedkv import AsyncClient, Client, Pool

SEQUENCES = (1, 32, 256)
WARM_UP_STEPS, STEPS, REPEATS = 20, 50, 5


@dataclass(frozen=True, slots=True)
class Row:
    sequences: int
    step_us: float
    executor_us: float
    overhead_us: float  # median over the repeats
    echo_us: float  # n messages on n streams, and one round trip, with nothing behind them


def _until(client: Client, steps: int) -> tuple[float, Pool]:
    while (pool := client.pool()).activity.steps < steps:
        time.sleep(0.005)
    return time.perf_counter(), pool


async def _drain(client: AsyncClient, number: int) -> None:
    async for _ in client.generate(token_ids=[20 + number % 200, 21, 22, 23], ignore_eos=True):
        pass


async def _load(address: str, sequences: int) -> None:
    async with AsyncClient(address) as client:
        await asyncio.gather(*(_drain(client, number) for number in range(sequences)))


def _measure(address: str, sequences: int) -> tuple[float, float]:
    """Median microseconds a step, whole and in the executor, while another process reads the streams."""
    reader = subprocess.Popen([sys.executable, "-m", "benchmarks.step_overhead", "load", address, str(sequences)])
    try:
        with Client(address) as client:
            while client.pool().activity.running < sequences:
                assert reader.poll() is None, "the reader has ended"
                time.sleep(0.01)
            begin = client.pool().activity.steps + WARM_UP_STEPS
            before = _until(client, begin)
            whole, inside = [], []
            for repeat in range(REPEATS):
                after = _until(client, begin + (repeat + 1) * STEPS)
                steps = after[1].activity.steps - before[1].activity.steps
                whole.append((after[0] - before[0]) * 1e6 / steps)
                inside.append((after[1].activity.executor_us - before[1].activity.executor_us) / steps)
                before = after
            return statistics.median(whole), statistics.median(inside)
    finally:
        reader.kill()
        reader.wait()


# --- the limit: the same messages with nothing behind them ---

_MESSAGE = bytes(24)


async def _serve_echo() -> None:
    async def ping(requests: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    streams: list[asyncio.Queue[bytes]] = []

    async def listen(request: bytes, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        streams.append(queue)
        try:
            while True:
                await context.write(await queue.get())
        finally:
            streams.remove(queue)

    async def tick(request: bytes, context: grpc.aio.ServicerContext) -> bytes:  # type: ignore[type-arg]
        for queue in streams:
            queue.put_nowait(_MESSAGE)
        return b""

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "echo",
                {
                    "ping": grpc.stream_stream_rpc_method_handler(ping),
                    "listen": grpc.unary_stream_rpc_method_handler(listen),
                    "tick": grpc.unary_unary_rpc_method_handler(tick),
                },
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def _ping(address: str, sequences: int) -> float:
    async with grpc.aio.insecure_channel(address) as channel:
        ping = channel.stream_stream("/echo/ping")()
        listeners = [channel.unary_stream("/echo/listen")(b"") for _ in range(sequences)]
        tick = channel.unary_unary("/echo/tick")
        await tick(b"")
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            await ping.write(_MESSAGE)
            await ping.read()
            await tick(b"")
            await asyncio.gather(*(listener.read() for listener in listeners))
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)


def _echo(sequences: int) -> float:
    """Microseconds for one round trip and one message on each of n streams."""
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.step_overhead", "echo"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        return asyncio.run(_ping(f"127.0.0.1:{int(server.stdout.readline())}", sequences))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def run() -> list[Row]:
    from benchmarks.tiny import save_tiny_llama

    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_llama(Path(directory) / "tiny")
        with running(model, blocks=1 + 256 * 64) as address:
            for sequences in SEQUENCES:
                whole, inside = _measure(address, sequences)
                rows.append(Row(sequences, whole, inside, whole - inside, _echo(sequences)))
    return rows


def table(rows: list[Row]) -> tuple[str, list[str], list[list[str]]]:
    return (
        "Decode step, everything but the model",
        ["sequences", "step, µs", "executor, µs", "service + link, µs", "bare gRPC, same messages, µs", "ratio"],
        [
            [
                str(row.sequences),
                f"{row.step_us:,.0f}",
                f"{row.executor_us:,.0f}",
                f"{row.overhead_us:,.0f}",
                f"{row.echo_us:,.0f}",
                f"{row.overhead_us / row.echo_us:.2f}",
            ]
            for row in rows
        ],
    )


def to_json(rows: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["load", address, sequences]:
            asyncio.run(_load(address, int(sequences)))
        case ["echo"]:
            asyncio.run(_serve_echo())
        case _:
            print(json.dumps(to_json(run()), indent=2))
