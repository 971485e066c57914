"""One Attach stream, from its hello to its end.

link thread     reads what the service sends, runs the follower
gRPC's thread   sends what lies in the outbox
pulse thread    heartbeats, also while a long step computes; ends a stream that has gone silent
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

import grpc
import structlog
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gpu_executor.errors import StepInvalid
from gpu_executor.link.convert import attachment_pieces, attachments, geometry_message
from gpu_executor.link.follower import Follower
from pagedkv._access import Metadata
from pagedkv.v1 import executor_link_pb2 as pb
from pagedkv.v1.executor_link_pb2_grpc import ExecutorLinkServiceStub

WELCOME_TIMEOUT_S = 30.0
CLOSING_TIMEOUT_S = 5.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What every hello of this process says of itself, beside where it stands."""

    model_id: str
    fingerprint: bytes
    eos_token_ids: tuple[int, ...]
    files: Mapping[str, bytes]  # name -> content, none empty
    executor_address: str  # host:port of ReadKv, or empty
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a stream ended: a reason of the contract, or the status code's name."""

    reason: str
    message: str
    attached_s: float  # time since the welcome; 0: there was none


class AttachStream:
    """Attaches once. `run` blocks until the stream has ended; `stop` may be called from any thread."""

    def __init__(
        self,
        stub: ExecutorLinkServiceStub,
        follower: Follower,
        introduction: Introduction,
        metadata: Metadata | None = None,
    ) -> None:
        """metadata: goes with the call."""
        self._stub = stub
        self._follower = follower
        self._introduction = introduction
        self._metadata = metadata
        self._outbox: SimpleQueue[pb.AttachRequest | None] = SimpleQueue()
        self._ended = threading.Event()
        self._pulse_due = threading.Event()  # set to make the pulse thread look at the clock anew
        self._call: grpc.Call | None = None
        self._received_at = self._sent_at = time.monotonic()
        self._welcomed_at: float | None = None
        self._closing_at: float | None = None
        self._interval_s = WELCOME_TIMEOUT_S
        self._silence_s = WELCOME_TIMEOUT_S
        self._own_reason: tuple[str, str] | None = None  # set when this side ends the stream

    def run(self) -> Ended:
        call = self._call = self._stub.Attach(self._requests(), metadata=self._metadata)
        pulse = threading.Thread(target=self._pulse, name="link-pulse", daemon=True)
        pulse.start()
        try:
            for message in call:
                self._received_at = time.monotonic()
                if self._closing_at is None:
                    self._receive(message)
            reason, text = "CLOSED", "the service ended the stream"
        except grpc.RpcError as error:
            reason, text = _reason(error)
        finally:
            self._follower.detach(self._send)
            self._ended.set()
            self._pulse_due.set()
            self._outbox.put(None)
            call.cancel()
            pulse.join()
        if self._own_reason is not None:
            reason, text = self._own_reason
        attached_s = time.monotonic() - self._welcomed_at if self._welcomed_at is not None else 0.0
        return Ended(reason, text, attached_s)

    def _close(self, reason: str, message: str) -> None:
        """Sends what is in the outbox, then says the last word; the service has CLOSING_TIMEOUT_S to end the stream."""
        if self._closing_at is None:
            self._own_reason = reason, message
            self._closing_at = time.monotonic()
            self._follower.detach(self._send)
            self._outbox.put(None)
            self._pulse_due.set()

    def stop(self) -> None:
        """Ends the stream because the process ends: in good order if it was welcomed, at once if not."""
        self._close("STOPPED", "the executor stops")
        if self._welcomed_at is None and self._call is not None:
            self._call.cancel()  # type: ignore[no-untyped-call]

    def _requests(self) -> Iterator[pb.AttachRequest]:
        follower, intro = self._follower, self._introduction
        position = follower.position
        limits = follower.limits
        hello = pb.Hello(
            rank=follower.rank,
            world_size=intro.world_size,
            geometry=geometry_message(follower.geometry),
            accepted=position.accepted,
            completed=position.completed,
            digest=position.digest,
            max_rows=limits.max_rows,
            max_batch_tokens=limits.max_batch_tokens,
            max_blocks_per_row=limits.max_blocks_per_row,
            model=pb.ModelDescription(
                id=intro.model_id,
                vocab_size=limits.vocab_size,
                max_context=limits.max_context,
                eos_token_ids=intro.eos_token_ids,
                fingerprint=intro.fingerprint,
            ),
            attachments=attachments(intro.files),
            executor_address=intro.executor_address,
        )
        yield follower.envelope(hello=hello)
        for piece in attachment_pieces(intro.files):
            yield follower.envelope(attachment=piece)
        while (message := self._outbox.get()) is not None:
            yield message

    def _send(self, message: pb.AttachRequest) -> None:
        self._sent_at = time.monotonic()
        self._outbox.put(message)

    def _receive(self, message: pb.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        step_id = message.step.step_id if kind == "step" else 0
        try:
            if kind == "welcome":
                self._welcome(message)
                return
            self._fence(message)
            if kind == "step":
                self._follower.take_step(message.step)
            elif kind == "heartbeat":
                self._follower.set_durable(message.heartbeat.results_durable_through)
            else:
                raise StepInvalid("MESSAGE_UNKNOWN", "a message that is no welcome, step or heartbeat")
        except StepInvalid as refused:
            log.error("refused", step_id=step_id, reason=refused.reason, message=refused.message)
            refusal = pb.Refusal(step_id=step_id, reason=refused.reason, message=refused.message)
            self._send(self._follower.envelope(refusal=refusal))
            self._close(refused.reason, refused.message)

    def _welcome(self, message: pb.AttachResponse) -> None:
        welcome = message.welcome
        if self._welcomed_at is not None or message.boot_id != self._follower.boot_id:
            raise StepInvalid("WELCOME_INVALID", f"a second welcome, or one for boot {message.boot_id!r}")
        if not 0 < welcome.heartbeat_interval_ms < welcome.silence_limit_ms:
            raise StepInvalid(
                "WELCOME_INVALID",
                f"heartbeats every {welcome.heartbeat_interval_ms} ms must come within the silence limit "
                f"of {welcome.silence_limit_ms} ms",
            )
        self._follower.welcome(message.service_id, message.epoch, welcome, self._send)
        self._interval_s = welcome.heartbeat_interval_ms / 1000
        self._silence_s = welcome.silence_limit_ms / 1000
        self._welcomed_at = time.monotonic()
        self._pulse_due.set()
        log.info(
            "attached",
            service_id=message.service_id,
            epoch=message.epoch,
            reset=welcome.reset,
            accepted=self._follower.position.accepted,
            results_durable_through=welcome.results_durable_through,
        )

    def _fence(self, message: pb.AttachResponse) -> None:
        """Lets through only what belongs to the welcome of this stream."""
        if self._welcomed_at is None:
            raise StepInvalid("WELCOME_EXPECTED", "the first message of the service is a welcome")
        position = self._follower.position
        if message.service_id != position.service_id or message.boot_id != self._follower.boot_id:
            raise StepInvalid(
                "IDENTITY_MISMATCH",
                f"a message of service {message.service_id!r} to boot {message.boot_id!r} "
                f"on the stream of {position.service_id!r} and {self._follower.boot_id!r}",
            )
        if message.epoch < position.epoch:
            raise StepInvalid("EPOCH_STALE", f"a message of epoch {message.epoch}, the stream is of {position.epoch}")
        if message.epoch > position.epoch:
            raise StepInvalid("EPOCH_UNKNOWN", f"a message of epoch {message.epoch}, the stream is of {position.epoch}")

    def _pulse(self) -> None:
        """Wakes when the next heartbeat or the end of patience is due, whichever is first."""
        while not self._ended.is_set():
            now = time.monotonic()
            silent_at = self._received_at + self._silence_s
            if self._closing_at is not None:
                silent_at = min(silent_at, self._closing_at + CLOSING_TIMEOUT_S)
            if now >= silent_at:
                if self._own_reason is None:
                    self._own_reason = "SERVICE_SILENT", f"nothing came for {now - self._received_at:.1f} s"
                assert self._call is not None
                self._call.cancel()  # type: ignore[no-untyped-call]
                return
            wake_at = silent_at
            if self._welcomed_at is not None and self._closing_at is None:
                if now >= self._sent_at + self._interval_s:
                    position = self._follower.position
                    heartbeat = pb.Heartbeat(accepted=position.accepted, completed=position.completed)
                    self._send(self._follower.envelope(heartbeat=heartbeat))
                wake_at = min(wake_at, self._sent_at + self._interval_s)
            self._pulse_due.wait(wake_at - now)
            self._pulse_due.clear()


def _reason(error: grpc.RpcError) -> tuple[str, str]:
    """The contract's reason of a failed call when it carries one, else its status code."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info.reason, error.details() or ""
    return error.code().name, error.details() or ""
