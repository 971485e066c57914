"""The executor's process: everything is built here, and the main thread computes what the link accepted."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable

import structlog
import torch

from gpu_executor.config import Settings
from gpu_executor.engine import Engine, Timings
from gpu_executor.link.access import Access
from gpu_executor.link.client import LinkClient
from gpu_executor.link.follower import Call, ComputeStep, Follower, ResetEngine
from gpu_executor.link.server import ExecutorServer
from gpu_executor.link.stream import Introduction
from gpu_executor.memory import Budget, PoolPlan, host_free, plan_pool
from gpu_executor.model import LoadedModel, load_model
from gpu_executor.pool import DTYPES
from gpu_executor.step import Geometry, Outputs, Step
from gpu_executor.validate import Limits

POISONED = 70
"""Exit status after a failure past acceptance: a supervisor starts the executor again, with a new boot id."""

DEFAULT_MEMORY = {"cuda": Budget(percent=85), "cpu": Budget(percent=25)}

log = structlog.get_logger(__name__)


class StopSignal:
    """The first SIGTERM or SIGINT asks to stop after the step in hand, the second ends the process at once.

    A handler in Python would wait for the main thread to run Python again, which a signal that comes just before that
    thread blocks does not make it do. So the interpreter's own handler writes to a socket, and a thread reads it.
    """

    def __init__(self) -> None:
        self.received = False
        self._follower: Follower | None = None  # None: nothing is in hand yet, so the first one ends the process too
        self._numbers, self._written = socket.socketpair()
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def wake(self, follower: Follower) -> None:
        """From here on the first signal wakes up who waits for the follower's jobs."""
        self._follower = follower

    def _watch(self) -> None:
        while True:
            for number in self._numbers.recv(16):
                if self._follower is None:
                    os._exit(0)
                if self.received:
                    os._exit(128 + number)
                self.received = True
                self._follower.jobs.put(None)


def serve(settings: Settings) -> None:
    """Runs until it is told to stop. Raises ModelUnsupported, PoolTooLarge, OSError before anything is served."""
    stop = StopSignal()
    executor = Executor(settings)
    stop.wake(executor.follower)
    executor.start()
    executor.compute(lambda: stop.received)
    executor.close()


class Executor:
    """Model, pools, link and server of one process."""

    def __init__(self, settings: Settings) -> None:
        """Loads the model and makes the pools; serves nothing yet. Raises as `serve` does."""
        device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        access = Access.from_settings(settings)
        check_listen(settings.listen, guarded=access.readers is not None)
        log.info("loading model", path=str(settings.model), dtype=dtype, device=str(device))
        loaded = load_model(settings.model, dtype=DTYPES[dtype], device=device, cache_dir=settings.model_cache)
        log.info("model loaded", model=loaded.model_id, dtype=dtype, device=str(device), max_context=loaded.max_context)
        geometry = plan(settings, loaded, device, dtype).geometry
        limits = Limits(
            max_rows=settings.max_rows,
            max_batch_tokens=settings.max_batch_tokens,
            max_blocks_per_row=-(-loaded.max_context // geometry.block_size),
            vocab_size=loaded.vocab_size,
            max_context=loaded.max_context,
        )
        self.engine = Engine(loaded, geometry, limits, device)
        self.follower = Follower(geometry, limits, boot_id=uuid.uuid4().hex)
        self._server = (
            ExecutorServer(settings.listen, self.follower, self.engine, access=access) if settings.listen else None
        )
        self.address = advertised(settings.listen, self._server.port) if self._server else ""
        introduction = Introduction(
            model_id=loaded.model_id,
            fingerprint=loaded.fingerprint,
            eos_token_ids=tuple(loaded.eos_token_ids),
            files={name: data for name, data in loaded.files.items() if data},
            executor_address=self.address,
        )
        self._service = settings.service
        self._link = LinkClient(settings.service, self.follower, introduction, access)

    def start(self) -> None:
        """Serves, and dials the block manager."""
        if self._server:
            self._server.start()
        self._link.start()
        log.info("started", boot_id=self.follower.boot_id, service=self._service, executor=self.address)

    def compute(self, stopping: Callable[[], bool]) -> None:
        """Does the follower's jobs in order, on the thread that owns the pool, until `stopping` after one of them."""
        follower = self.follower
        while True:
            job = follower.jobs.get()
            if stopping():
                return
            match job:
                case ComputeStep(epoch, step):
                    if follower.is_current(epoch):
                        follower.complete(epoch, step.step_id, *self._execute(epoch, step))
                case ResetEngine():
                    self.engine.reset()
                case Call(function, future):
                    if future.set_running_or_notify_cancel():
                        try:
                            future.set_result(function())
                        except Exception as error:
                            future.set_exception(error)

    def _execute(self, epoch: int, step: Step) -> tuple[Outputs, Timings]:
        try:
            return self.engine.execute(step)
        except Exception:
            # The pool is in an unknown state, and a device that failed may hang in an orderly exit.
            log.critical("poisoned", epoch=epoch, step_id=step.step_id, exc_info=True)
            sys.stderr.flush()
            os._exit(POISONED)

    def close(self) -> None:
        """Sends what was computed, ends the stream, and serves no more."""
        log.info("stopping", completed=self.follower.position.completed)
        self._link.stop()
        if self._server:
            self._server.stop()


def plan(settings: Settings, loaded: LoadedModel, device: torch.device, dtype: str) -> PoolPlan:
    """Sizes the pools by what is free with the model loaded, and logs the arithmetic."""
    one_block = Geometry(
        num_blocks=0,
        num_host_blocks=0,
        block_size=settings.block_size,
        num_layers=loaded.num_layers,
        num_kv_heads=loaded.num_kv_heads,
        key_head_dim=loaded.key_head_dim,
        value_head_dim=loaded.value_head_dim,
        dtype=dtype,
    )
    free = host_free()
    pools = plan_pool(
        one_block,
        blocks=settings.blocks,
        memory=settings.memory or DEFAULT_MEMORY[device.type],
        host_blocks=settings.host_blocks,
        host_memory=settings.host_memory,
        device_free=int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free,
        host_free=free,
        device_is_host=device.type == "cpu",
    )
    for line in pools.lines:
        log.info(line)
    return pools


def check_listen(listen: str, *, guarded: bool = False) -> None:
    """Raises OSError when nobody can listen there: loading a model takes long, so this is found out before."""
    if not listen:
        return
    host, _, port = listen.rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise OSError(
                f"cannot listen on {listen}: {error.strerror or error}; choose another address with --listen"
            ) from error
    if host.strip("[]") not in ("localhost", "::1") and not host.startswith("127."):
        missing = "no TLS" if guarded else "neither TLS nor a token"
        log.warning(f"listening beyond this machine: there is {missing}", listen=listen)


def advertised(listen: str, port: int) -> str:
    """Where others reach what listens on `listen`; for all interfaces, under the name of this machine."""
    host = listen.rpartition(":")[0]
    return f"{socket.gethostname() if host in ('0.0.0.0', '[::]') else host}:{port}"
