"""Real `block-manager` and `gpu-executor` processes for a test, started, awaited and always ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv import AsyncClient, Client

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 20.0
LINK_SERVICE = "pagedkv.v1.ExecutorLinkService"


class ProcessError(AssertionError):
    """A process ended, or did not become what it should in time; the text ends with its log."""


def free_port() -> int:
    """A port that nothing listens on now.

    The kernel gives out ephemeral ports round about, so that the next to be asked gets
    another; a restarted process must come back where its peer looks for it, which is why
    the programs are not told to choose for themselves.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """One program of this checkout, in a session of its own, its output in a file."""

    def __init__(self, module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name = module
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the test alone, which then ends the process
                env=environment,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Exit status, negative for a signal.

        Raises:
            ProcessError: it is still running after `deadline_s`.
        """
        try:
            return self._popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self.name} still runs after {deadline_s:g} s\n{self.log_tail()}") from None

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and gone on return. On a process that ended already: nothing."""
        self._popen.kill()
        self._popen.wait()

    def log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def wait_until_serving(self, address: str, service: str, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns once grpc.health.v1 at `address` calls `service` SERVING.

        Raises:
            ProcessError: this process ended first, or the deadline passed.
        """
        end = time.monotonic() + deadline_s
        options = [
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
            ("grpc.enable_http_proxy", 0),
        ]
        last = "no answer yet"
        with grpc.insecure_channel(address, options=options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            while self.alive and time.monotonic() < end:
                try:
                    # Half a second, so that a process that died meanwhile is seen to have.
                    for reply in stub.Watch(request, timeout=0.5, wait_for_ready=True):
                        last = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
                        if reply.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.RpcError as error:
                    if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                        raise
        how = f"not SERVING after {deadline_s:g} s" if self.alive else f"ended with status {self._popen.returncode}"
        raise ProcessError(f"{self.name}: {how}; health of {service!r} at {address}: {last}\n{self.log_tail()}")


class Stack:
    """A service and an executor on free loopback ports, logs beside each other in `directory`.

    Args:
        directory: where the logs go; kept after the end.
        model: a GGUF file or a Hugging Face folder.
        model_cache: where the executor keeps its conversions.
        blocks, block_size: the device pool, block 0 included; tokens a block.
        dtype: of weights and pool: "float32", "bfloat16", "float16", "float64".
        service_flags, executor_flags: further arguments of the two programs.
        executor: False starts the service alone; `start_executor` brings the other later.
        tls: the service speaks TLS, so that its own health is not looked at: an executor that is attached says enough.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: Path,
        model_cache: Path,
        blocks: int = 512,
        block_size: int = 16,
        dtype: str = "float32",
        service_flags: tuple[str, ...] = (),
        executor_flags: tuple[str, ...] = (),
        executor: bool = True,
        tls: bool = False,
    ) -> None:
        self.directory = directory
        self.address = f"127.0.0.1:{free_port()}"
        self.executor_address = f"127.0.0.1:{free_port()}"
        self._service_arguments = ["--listen", self.address, *service_flags]
        self._executor_arguments = [
            *("--model", str(model), "--service", self.address, "--listen", self.executor_address),
            *("--blocks", str(blocks), "--block-size", str(block_size), "--dtype", dtype),
            *("--model-cache", str(model_cache), *executor_flags),
        ]
        self._with_executor = executor
        self._tls = tls
        self._clients: list[Client] = []
        self.service_process: Process | None = None
        self.executor_process: Process | None = None

    def start(self) -> None:
        """Both processes at once; returns when the executor is attached."""
        self._launch_service()
        if self._with_executor:
            self._launch_executor()
        self.wait_until_live()
        if self._with_executor:
            self.wait_until_attached()

    def start_service(self) -> None:
        """Again, after it was killed or terminated, at the same address; returns when it is live."""
        self._launch_service()
        self.wait_until_live()

    def start_executor(self) -> None:
        """For the first time, or again with a new boot id; returns when it is attached."""
        self._launch_executor()
        self.wait_until_attached()

    def wait_until_live(self, deadline_s: float = START_DEADLINE_S) -> None:
        if not self._tls:
            _running(self.service_process).wait_until_serving(self.address, LINK_SERVICE, deadline_s)

    def wait_until_attached(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns when the executor says that it is attached and the service that it can serve."""
        _running(self.executor_process).wait_until_serving(self.executor_address, "", deadline_s)
        if not self._tls:
            _running(self.service_process).wait_until_serving(self.address, "", deadline_s)

    def kill_service(self) -> None:
        _running(self.service_process).kill()

    def kill_executor(self) -> None:
        _running(self.executor_process).kill()

    def terminate_service(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """SIGTERM, then its exit status; it drains first, which `deadline_s` has to allow for."""
        _running(self.service_process).send_signal(signal.SIGTERM)
        return _running(self.service_process).wait(deadline_s)

    def terminate_executor(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        _running(self.executor_process).send_signal(signal.SIGTERM)
        return _running(self.executor_process).wait(deadline_s)

    def client(self) -> Client:
        """A client of the service; closed with the stack."""
        client = Client(self.address)
        self._clients.append(client)
        return client

    def async_client(self) -> AsyncClient:
        """For the running event loop; use it as `async with`."""
        return AsyncClient(self.address)

    def log_tails(self) -> list[tuple[str, str]]:
        """(title, last lines) of each process that was started."""
        started = [process for process in (self.service_process, self.executor_process) if process is not None]
        return [(f"{process.name} log ({process.log})", process.log_tail()) for process in started]

    def close(self) -> None:
        """Ends what still runs, without ceremony: draining is for tests that ask for it."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        for process in (self.executor_process, self.service_process):
            if process is not None:
                process.kill()

    def _launch_service(self) -> None:
        self.service_process = self._launch(
            self.service_process, "block_manager_svc", self._service_arguments, "service.log"
        )

    def _launch_executor(self) -> None:
        self.executor_process = self._launch(
            self.executor_process, "gpu_executor", self._executor_arguments, "executor.log"
        )

    def _launch(self, before: Process | None, module: str, arguments: list[str], log: str) -> Process:
        assert before is None or not before.alive, f"{module} runs already"
        # A developer's own settings must not reach the processes under test.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDKV_")}
        environment["PYTHONUNBUFFERED"] = "1"
        return Process(module, arguments, self.directory / log, environment)


def _running(process: Process | None) -> Process:
    assert process is not None, "it was never started"
    return process
