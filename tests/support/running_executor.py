"""An executor in the test's process: real link, real server, real model; its main loop on a thread of the test."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.link_service import SERVICE_ID

from gpu_executor.config import Settings
from gpu_executor.process import Executor
from pagedkv.v1 import executor_pb2, executor_pb2_grpc

BLOCK_SIZE = 4
BLOCKS = 32


class Running:
    """Attaches to the service at `service`; float64, 31 usable blocks of 4 tokens, 8 rows."""

    def __init__(self, model: Path, service: str) -> None:
        self.executor = Executor(
            Settings(
                model=model,
                service=service,
                listen="127.0.0.1:0",
                device="cpu",
                dtype="float64",
                block_size=BLOCK_SIZE,
                blocks=BLOCKS,
                host_blocks=4,
                max_rows=8,
                max_batch_tokens=1024,
            )
        )
        self._stopping = False
        self._thread = threading.Thread(target=self.executor.compute, args=(lambda: self._stopping,))
        self._thread.start()
        self.executor.start()
        self.channel = grpc.insecure_channel(self.executor.address)

    def read_k(self, slots: list[int], *, epoch: int = 1, after_step: int = 0, layer: int = 0) -> np.ndarray:
        request = executor_pb2.ReadKvRequest(
            service_id=SERVICE_ID, epoch=epoch, after_step=after_step, layer=layer, slots=slots
        )
        pieces = list(executor_pb2_grpc.ExecutorServiceStub(self.channel).ReadKv(request, timeout=30))
        heads, dim = pieces[0].num_kv_heads, pieces[0].key_head_dim
        return np.frombuffer(b"".join(p.k for p in pieces), "<f8").reshape(len(slots), heads, dim)

    def health(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=30).status

    def close(self) -> None:
        self.channel.close()
        self._stopping = True
        self.executor.follower.jobs.put(None)
        self._thread.join()
        self.executor.close()

    def hold(self) -> tuple[threading.Event, threading.Event]:
        """Keeps the main thread busy, as a long step does: (it is held, let it go)."""
        held, release = threading.Event(), threading.Event()

        def wait() -> None:
            held.set()
            assert release.wait(60)

        self.executor.follower.call(wait)
        return held, release


def slots(*blocks: int) -> list[int]:
    return [block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)]
