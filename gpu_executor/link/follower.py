"""Where the executor stands with the service that it follows: epoch, order, and what waits to be computed.

    link thread                      Follower (one lock)                     main thread
    Welcome, Step, Heartbeat  ──►  StepLog · Admission  ── jobs queue ──►  Engine.execute
    stream's outbox           ◄──  kept results         ◄──────────────  complete()
    ReadKv threads            ──►  wait_completed()     ── jobs queue ──►  Engine.read_kv

Streams come and go; the follower lasts as long as the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from gpu_executor.engine import Timings
from gpu_executor.errors import StepInvalid
from gpu_executor.link.convert import result_message, step_from_body
from gpu_executor.link.step_log import StepLog
from gpu_executor.step import Geometry, Outputs, Step
from gpu_executor.validate import Admission, Limits
from pagedkv.v1 import executor_link_pb2 as pb


@dataclass(frozen=True, slots=True)
class ComputeStep:
    epoch: int
    step: Step


@dataclass(frozen=True, slots=True)
class ResetEngine:
    epoch: int


@dataclass(frozen=True, slots=True)
class Call:
    """Runs between two steps, on the main thread."""

    function: Callable[[], Any]
    future: Future[Any]


Job = ComputeStep | ResetEngine | Call | None
"""None wakes the main thread up, to look whether it should stop."""

Send = Callable[[pb.AttachRequest], None]


@dataclass(frozen=True, slots=True)
class Position:
    service_id: str
    epoch: int
    accepted: int
    completed: int
    durable_through: int
    digest: bytes  # of accepted; empty when accepted is 0


class Follower:
    """Safe to call from any thread. Nothing here touches the pool: the main thread does, job by job.

    boot_id: drawn at the start of the process; the pool lives as long as it.
    jobs:    filled here, emptied by the main thread.
    """

    def __init__(self, geometry: Geometry, limits: Limits, *, boot_id: str, rank: int = 0) -> None:
        self.geometry = geometry
        self.limits = limits
        self.boot_id = boot_id
        self.rank = rank
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self._admission = Admission(geometry, limits)
        self._log: StepLog[pb.StepResult] = StepLog()
        self._service_id = ""
        self._epoch = 0
        self.on_attached: Callable[[bool], None] = lambda attached: None  # told of each change, on the link's thread
        self._send: Send | None = None
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)

    @property
    def attached(self) -> bool:
        return self._send is not None

    @property
    def position(self) -> Position:
        with self._lock:
            log = self._log
            digest = log.digest if log.accepted else b""
            return Position(self._service_id, self._epoch, log.accepted, log.completed, log.durable_through, digest)

    def envelope(self, **message: Any) -> pb.AttachRequest:
        """A message to the service, named as every message must be."""
        return pb.AttachRequest(service_id=self._service_id, epoch=self._epoch, boot_id=self.boot_id, **message)

    # Called by the link thread.

    def welcome(self, service_id: str, epoch: int, welcome: pb.Welcome, send: Send) -> None:
        """Takes a stream into use: resets or goes on, and sends again what the service has not made durable.

        Raises StepInvalid: EPOCH_STALE, WELCOME_INVALID, DURABLE_AHEAD, RESULTS_DROPPED; nothing has changed then.
        """
        with self._lock:
            same = service_id == self._service_id
            if same and epoch < self._epoch:
                raise StepInvalid("EPOCH_STALE", f"welcomed to epoch {epoch}, after epoch {self._epoch}")
            if welcome.reset:
                if same and epoch == self._epoch and self._log.accepted:
                    raise StepInvalid("EPOCH_STALE", f"a reset needs a new epoch, {epoch} has accepted steps")
                if welcome.results_durable_through:
                    raise StepInvalid(
                        "DURABLE_AHEAD", f"a reset with results durable through {welcome.results_durable_through}"
                    )
                self._service_id, self._epoch = service_id, epoch
                self._log.reset()
                self._admission.reset()
                self.jobs.put(ResetEngine(epoch))
            elif not same or epoch != self._epoch:
                raise StepInvalid(
                    "WELCOME_INVALID",
                    f"told to go on with epoch {epoch} of service {service_id!r}, "
                    f"was in epoch {self._epoch} of {self._service_id!r}",
                )
            again = self._log.results_past(welcome.results_durable_through)
            self._log.set_durable(welcome.results_durable_through)
            self._send = send
            for result in again:
                send(self.envelope(result=result))
            self._progress.notify_all()
        self.on_attached(True)

    def detach(self, send: Send) -> None:
        """The stream ended: results are kept for the next one."""
        with self._lock:
            if self._send != send:
                return
            self._send = None
            self._progress.notify_all()
        self.on_attached(False)

    def take_step(self, message: pb.Step) -> None:
        """Accepts a step and queues it; sends the kept result of one that was completed before.

        Raises StepInvalid; nothing of the step was touched then.
        """
        with self._lock:
            self._log.set_durable(message.results_durable_through)
            known = self._log.place(message.step_id, message.digest, message.body)
            if known is None:
                step = step_from_body(message.step_id, message.body)
                self._admission.admit(step)
                self._log.accept(message.step_id, message.digest)
                self.jobs.put(ComputeStep(self._epoch, step))
            elif known.result is not None and self._send is not None:
                self._send(self.envelope(result=known.result))

    def set_durable(self, through: int) -> None:
        """Raises StepInvalid DURABLE_AHEAD."""
        with self._lock:
            self._log.set_durable(through)

    # Called by the main thread.

    def is_current(self, epoch: int) -> bool:
        return epoch == self._epoch

    def complete(self, epoch: int, step_id: int, outputs: Outputs, timings: Timings) -> None:
        """Keeps the step's result, and sends it if a stream is up. A step of an epoch that is over leaves nothing."""
        result = result_message(step_id, self.rank, outputs, ops_us=timings.ops_us, compute_us=timings.compute_us)
        with self._lock:
            if epoch != self._epoch:
                return
            self._log.complete(step_id, result)
            if self._send is not None:
                self._send(self.envelope(result=result))
            self._progress.notify_all()

    # Called by threads of the server.

    def wait_completed(
        self, service_id: str, epoch: int, step_id: int, deadline: float, given_up: Callable[[], bool]
    ) -> None:
        """Waits until the step is completed, or until time.monotonic() is past `deadline`.

        Returns early when the epoch ends, no stream is up, or `given_up` is true after a call of `look_again`.
        """

        def over() -> bool:
            return (
                self._send is None
                or (service_id, epoch) != (self._service_id, self._epoch)
                or self._log.completed >= step_id
                or given_up()
            )

        with self._lock:
            self._progress.wait_for(over, max(0.0, deadline - time.monotonic()))

    def look_again(self) -> None:
        """Makes the threads in wait_completed ask their `given_up`."""
        with self._lock:
            self._progress.notify_all()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Runs `function` on the main thread, between two steps."""
        future: Future[Any] = Future()
        self.jobs.put(Call(function, future))
        return future
