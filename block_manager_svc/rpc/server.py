"""The gRPC server: all services, health and reflection on one port, from its start to its orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Coroutine
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from block_manager_svc.identity import BadTokensFile, Callers
from block_manager_svc.manager import Manager
from block_manager_svc.rpc.authentication import Authentication
from block_manager_svc.rpc.block_manager import BlockManagerServicer
from block_manager_svc.rpc.boundary import Boundary
from block_manager_svc.rpc.generation import GenerationServicer
from block_manager_svc.rpc.link import ExecutorLinkServicer
from block_manager_svc.rpc.tls import Tls
from pagedkv.v1 import (
    block_manager_pb2,
    block_manager_pb2_grpc,
    executor_link_pb2,
    executor_link_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 4 << 20  # of a single request; a larger one is refused with MESSAGE_TOO_LARGE
_MAX_MESSAGE_BYTES = 16 << 20  # gRPC's own limit, above ours, so that ours is the one that speaks
# After the running calls have ended, for their last bytes and for streams that never end, such as Health.Watch.
_FLUSH_SECONDS = 0.5

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
BLOCK_MANAGER = block_manager_pb2.DESCRIPTOR.services_by_name["BlockManagerService"].full_name
EXECUTOR_LINK = executor_link_pb2.DESCRIPTOR.services_by_name["ExecutorLinkService"].full_name
WHOLE = ""  # the health of the service as a whole: whether it can generate

_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second service on the port is an error, not a share of the calls
    # Gateways may ping through quiet times; and one that vanished is noticed, so that its blocks come back.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class CannotListen(Exception):
    """The address is taken, or not of this machine. The message is for people."""


class Server:
    """All services over one manager. Make it in the event loop that it runs in.

    callers: who may call; by default everybody, as tenant `default`.
    tls: the certificate to serve under; None: plain.

    Health: "" and GenerationService serve while an executor is attached, the others while the process runs.
    """

    def __init__(
        self,
        manager: Manager,
        listen: str,
        write_timeout: float,
        callers: Callers | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._manager = manager
        self._listen = listen
        self._callers = callers or Callers()
        self._tls = tls
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # older stubs lack it
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(
            interceptors=(Boundary(MAX_REQUEST_BYTES), Authentication(self._callers)), options=_OPTIONS
        )
        block_manager = BlockManagerServicer(manager, self._callers, write_timeout)
        for add, servicer in (
            (generation_pb2_grpc.add_GenerationServiceServicer_to_server, GenerationServicer(manager, write_timeout)),
            (block_manager_pb2_grpc.add_BlockManagerServiceServicer_to_server, block_manager),
            (executor_link_pb2_grpc.add_ExecutorLinkServiceServicer_to_server, ExecutorLinkServicer(manager)),
            (health_pb2_grpc.add_HealthServicer_to_server, self._health),
        ):
            add(servicer, self._server)
        names = (GENERATION, BLOCK_MANAGER, EXECUTOR_LINK, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listens, and gives host:port as it came to be. Raises CannotListen."""
        host, _, wanted = self._listen.rpartition(":")
        await _try_bind(host.strip("[]"), int(wanted))
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(self._listen)
            else:
                port = self._server.add_secure_port(self._listen, self._tls.credentials())
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {self._listen}: {error}") from error
        if not _is_loopback(host.strip("[]")):
            self._warn()
        serving = health_pb2.HealthCheckResponse.SERVING
        await self._health.set(BLOCK_MANAGER, serving)
        await self._health.set(EXECUTOR_LINK, serving)
        await self._set_generation(self._manager.model is not None)
        self._manager.on_serving_change.append(lambda serves: self._spawn(self._set_generation(serves)))
        await self._server.start()
        return f"{host}:{port}"

    def _warn(self) -> None:
        if self._tls is None:
            log.warning(
                "listening beyond this machine without TLS: calls can be read on their way", listen=self._listen
            )
        if not self._callers.ask_for_tokens and (self._tls is None or not self._tls.verifies_clients):
            log.warning("listening beyond this machine without tokens: anybody may call", listen=self._listen)

    def reload_tokens(self) -> None:
        """Reads the tokens file again. One that is wrong changes nothing, and is in the log."""
        try:
            self._callers.reload()
        except BadTokensFile as error:
            log.error("the tokens stay as they were", why=str(error))
        else:
            log.info("tokens read", tokens=len(self._callers))

    async def drain(self, grace: float) -> None:
        """NOT_SERVING, no new calls, `grace` seconds for those that run; then stops."""
        await self._health.enter_graceful_shutdown()
        await self._manager.drain(grace)
        await self.stop(_FLUSH_SECONDS)

    async def stop(self, grace: float | None = None) -> None:
        """Ends every call after `grace` seconds at the latest; None: now."""
        await self._server.stop(grace)

    async def _set_generation(self, serves: bool) -> None:
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serves else states.NOT_SERVING
        await self._health.set(WHOLE, state)
        await self._health.set(GENERATION, state)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # or it may be collected before its end
        task.add_done_callback(self._tasks.discard)


async def _try_bind(host: str, port: int) -> None:
    """gRPC reports a failed bind in lines of its own and not why; so the system is asked first."""
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in resolved:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address with --listen"
        ) from error


async def run_until_signal(server: Server, drain_grace: float) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second one ends at once. Gives the exit code.

    SIGHUP: the tokens file is read again.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    loop.add_signal_handler(signal.SIGHUP, server.reload_tokens)
    address = await server.start()
    log.info("listening", address=address)

    first = await signals.get()
    log.info("stopping", signal=first.name, grace_s=drain_grace)
    draining = asyncio.create_task(server.drain(drain_grace))
    second = asyncio.create_task(signals.get())
    await asyncio.wait((draining, second), return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        second.cancel()
        await draining
        log.info("stopped")
        return 0
    log.warning("stopped before the running calls had ended", signal=second.result().name)
    draining.cancel()
    await server.stop()
    return 128 + second.result()


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
