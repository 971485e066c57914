"""The block manager's side of the link, played by a test: a real gRPC server that says what the test tells it to."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import grpc
import numpy as np

from pagedkv.v1 import executor_link_pb2 as pb
from pagedkv.v1 import executor_link_pb2_grpc

DEADLINE_S = 30.0
SERVICE_ID = "test-service"

_DTYPES = {"seed": "<u8", "temperature": "<f4", "top_p": "<f4"}


def column(name: str, values: list[float]) -> bytes:
    return np.array(values, _DTYPES.get(name, "u1" if name == "op_kind" else "<i4")).tobytes()


def greedy(*sample_from: int) -> dict[str, list[float]]:
    """Columns of greedy samples, one of each of these rows of the batch."""
    n = len(sample_from)
    return {
        "sample_from": list(sample_from),
        "sample_index": [0] * n,
        "seed": [0] * n,
        "temperature": [0.0] * n,
        "top_p": [1.0] * n,
        "top_k": [0] * n,
        "logprobs": [-1] * n,
    }


@dataclass
class Steps:
    """Numbers and digests steps as the contract says; kept, so that they can be sent again byte for byte."""

    sent: list[pb.Step] = field(default_factory=list)

    def make(self, durable: int = 0, **columns: list[float]) -> pb.Step:
        step_id = len(self.sent) + 1
        packed = {name: column(name, values) for name, values in columns.items()}
        body = pb.StepBody(step_id=step_id, **packed).SerializeToString()
        before = self.sent[-1].digest if self.sent else bytes(32)
        digest = hashlib.sha256(before + body).digest()
        self.sent.append(pb.Step(step_id=step_id, digest=digest, results_durable_through=durable, body=body))
        return self.sent[-1]

    def prefill(self, prompt: list[int], *, row: int = 0, blocks: tuple[int, ...] = (1, 2)) -> pb.Step:
        """The whole prompt into `blocks` of `row`; its next token is sampled."""
        return self.make(
            delta_row=[row],
            delta_first=[0],
            delta_count=[len(blocks)],
            delta_blocks=list(blocks),
            row=[row],
            start=[0],
            count=[len(prompt)],
            token_ids=list(prompt),
            **greedy(0),
        )


class Stream:
    """One Attach call, from the service's side."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context
        self.received: SimpleQueue[pb.AttachRequest | None] = SimpleQueue()  # None: the executor half-closed
        # None ends the stream with OK; also put when the executor closes its side.
        self.outbox: SimpleQueue[pb.AttachResponse | None] = SimpleQueue()
        self.heartbeats: list[tuple[float, pb.Heartbeat]] = []
        self.messages: list[pb.AttachRequest] = []
        self.epoch = 0
        self.boot_id = ""

    def send(self, *, epoch: int | None = None, service_id: str = SERVICE_ID, **message: object) -> None:
        self.outbox.put(
            pb.AttachResponse(
                service_id=service_id,
                epoch=self.epoch if epoch is None else epoch,
                boot_id=self.boot_id,
                **message,  # type: ignore[arg-type]
            )
        )

    def hello(self) -> pb.Hello:
        hello = self.expect("hello").hello
        self.boot_id = self.messages[-1].boot_id
        self.files = self._attachments(hello)
        return hello

    def _attachments(self, hello: pb.Hello) -> dict[str, bytes]:
        files = {}
        for announced in hello.attachments:
            data = b""
            while len(data) < announced.size:
                piece = self.expect("attachment").attachment
                assert (piece.name, piece.offset) == (announced.name, len(data))
                assert 0 < len(piece.data) <= 1 << 20
                data += piece.data
            assert len(data) == announced.size
            assert hashlib.sha256(data).digest() == announced.sha256
            files[announced.name] = data
        return files

    def welcome(
        self, epoch: int, *, reset: bool, durable: int = 0, interval_ms: int = 1000, silence_ms: int = 30_000
    ) -> None:
        self.epoch = epoch
        self.send(
            welcome=pb.Welcome(
                reset=reset,
                results_durable_through=durable,
                heartbeat_interval_ms=interval_ms,
                silence_limit_ms=silence_ms,
            )
        )

    def expect(self, kind: str) -> pb.AttachRequest:
        """The next message other than a heartbeat, which must be a `kind`."""
        message = self.next(kind)
        assert message is not None, f"the executor closed the stream, {kind} was expected"
        assert message.WhichOneof("message") == kind, f"{kind} was expected: {message}"
        return message

    def result(self) -> pb.StepResult:
        return self.expect("result").result

    def expect_end(self) -> None:
        """The executor half-closes without a further word."""
        message = self.next("the end")
        assert message is None, f"the end of the stream was expected: {message}"

    def next(self, what: str = "a message") -> pb.AttachRequest | None:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                message = self.received.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                raise AssertionError(f"nothing came in {DEADLINE_S} s, {what} was expected") from None
            if message is None:
                return None
            self.messages.append(message)
            if message.WhichOneof("message") != "heartbeat":
                return message

    def end(self) -> None:
        self.outbox.put(None)


class LinkService(executor_link_pb2_grpc.ExecutorLinkServiceServicer):
    """Listens on `port` (0: any) until `close`; `stream` gives the Attach calls in the order they came."""

    def __init__(self, port: int = 0) -> None:
        self._streams: SimpleQueue[Stream] = SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", 16 << 20)])
        executor_link_pb2_grpc.add_ExecutorLinkServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def Attach(  # noqa: N802
        self, requests: Iterator[pb.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachResponse]:
        stream = Stream(context)
        context.add_callback(lambda: stream.outbox.put(None))
        self._streams.put(stream)
        reader = ThreadPoolExecutor(1)
        reader.submit(self._read, requests, stream)
        try:
            while (message := stream.outbox.get()) is not None:
                yield message
        finally:
            reader.shutdown(wait=False)

    @staticmethod
    def _read(requests: Iterator[pb.AttachRequest], stream: Stream) -> None:
        try:
            for message in requests:
                if message.WhichOneof("message") == "heartbeat":
                    stream.heartbeats.append((time.monotonic(), message.heartbeat))
                stream.received.put(message)
        except grpc.RpcError:
            pass  # the call was cancelled or its connection is gone: to the test the same as the end
        finally:
            stream.received.put(None)
            stream.end()

    def stream(self, deadline_s: float = DEADLINE_S) -> Stream:
        """The next Attach call."""
        try:
            return self._streams.get(timeout=deadline_s)
        except Empty:
            raise AssertionError(f"no executor attached in {deadline_s} s") from None

    def close(self) -> None:
        self._server.stop(0).wait()
