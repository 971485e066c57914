"""Keeps the executor attached to its service: dials, and dials again after a pause, for as long as the process runs."""

from __future__ import annotations

import random
import threading

import structlog

from gpu_executor.link.access import Access
from gpu_executor.link.follower import Follower
from gpu_executor.link.stream import CLOSING_TIMEOUT_S, AttachStream, Introduction
from pagedkv.v1.executor_link_pb2_grpc import ExecutorLinkServiceStub

MAX_MESSAGE_BYTES = 16 << 20

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The link has heartbeats of its own; pings find a dead connection before the welcome.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A channel is made anew for each attempt and must not inherit the back-off of the last one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]

log = structlog.get_logger(__name__)


class Backoff:
    """Pauses between attempts: doubling from `first` to `cap` seconds, each shortened by up to a half at random."""

    def __init__(self, first: float = 0.1, cap: float = 5.0) -> None:
        self._first = self._pause = first
        self._cap = cap

    def reset(self) -> None:
        self._pause = self._first

    def next(self) -> float:
        pause, self._pause = self._pause, min(self._cap, self._pause * 2)
        return pause * random.uniform(0.5, 1.0)


class LinkClient:
    """Runs the link on a thread of its own; `stop` ends it."""

    STEADY_S = 10.0
    """A stream that held for this long starts the back-off anew."""

    def __init__(
        self,
        service: str,
        follower: Follower,
        introduction: Introduction,
        access: Access = Access(),  # noqa: B008  (frozen)
    ) -> None:
        self._service = service
        self._follower = follower
        self._introduction = introduction
        self._access = access
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._stream: AttachStream | None = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Closes the stream after what is in its outbox, and waits for its end."""
        self._stopping.set()
        with self._lock:
            if self._stream is not None:
                self._stream.stop()
        self._thread.join(2 * CLOSING_TIMEOUT_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            with self._access.channel(self._service, CHANNEL_OPTIONS) as channel:
                stub = ExecutorLinkServiceStub(channel)  # type: ignore[no-untyped-call]
                stream = AttachStream(stub, self._follower, self._introduction, self._access.metadata)
                with self._lock:
                    if self._stopping.is_set():
                        return
                    self._stream = stream
                ended = stream.run()
                with self._lock:
                    self._stream = None
            if self._stopping.is_set():
                log.info("detached", reason=ended.reason)
                return
            if ended.attached_s >= self.STEADY_S:
                backoff.reset()
            pause = backoff.next()
            log.warning("not attached", reason=ended.reason, detail=ended.message, retry_in_s=round(pause, 2))
            self._stopping.wait(pause)
