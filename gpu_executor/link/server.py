"""What the executor serves itself: ReadKv, health, reflection."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_status import rpc_status

from gpu_executor.engine import Engine
from gpu_executor.link.access import Access
from gpu_executor.link.client import MAX_MESSAGE_BYTES
from gpu_executor.link.convert import PIECE_BYTES
from gpu_executor.link.follower import Follower
from pagedkv.v1 import executor_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
LIVE = "live"
"""Health entry that is SERVING while the process answers at all; the others say whether it is attached."""

MAX_SLOTS = 65_536
MAX_WAIT_S = 60.0
MAX_REPLY_S = 60.0
MAX_REFLECTION_S = 60.0
_READS = 32  # at a time; each holds a worker
_REFLECTIONS = 8  # streams at a time; each holds a worker
_WORKERS = _READS + _REFLECTIONS + 8  # the rest stays free for health, and to refuse what is too many
_PIECE_ROOM = 4096  # for what surrounds K and V in a piece

Code = grpc.StatusCode


class Servicer:
    """max_reply_s: how long a caller may take to read a reply, before the call is cancelled."""

    def __init__(
        self,
        follower: Follower,
        engine: Engine,
        max_reply_s: float = MAX_REPLY_S,
        access: Access = Access(),  # noqa: B008
    ) -> None:
        self._follower = follower
        self._engine = engine
        self._max_reply_s = max_reply_s
        self._access = access
        self._reads = threading.BoundedSemaphore(_READS)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """As the generated one, but for bytes that are no request."""
        method = grpc.unary_stream_rpc_method_handler(self.ReadKv, _decode, pb.ReadKvResponse.SerializeToString)
        return grpc.method_handlers_generic_handler(SERVICE, {"ReadKv": method})

    def ReadKv(  # noqa: N802
        self, request: pb.ReadKvRequest | DecodeError, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadKvResponse]:
        self._check_caller(context)
        if isinstance(request, DecodeError):
            _abort(context, Code.INVALID_ARGUMENT, "MESSAGE_MALFORMED", f"the request is no ReadKvRequest: {request}")
        if not self._reads.acquire(blocking=False):
            _abort(context, Code.RESOURCE_EXHAUSTED, "TOO_MANY_READS", f"{_READS} reads are under way", limit=_READS)
        try:
            yield from self._read_kv(request, context)
        finally:
            self._reads.release()

    def _check_caller(self, context: grpc.ServicerContext) -> None:
        shown = dict(context.invocation_metadata()).get("authorization")
        if not self._access.may_read(shown):
            if shown is None:
                _abort(context, Code.UNAUTHENTICATED, "TOKEN_MISSING", "send `authorization: Bearer TOKEN`")
            _abort(context, Code.UNAUTHENTICATED, "TOKEN_UNKNOWN", "this token is not the one for reading K and V")

    def _read_kv(self, request: pb.ReadKvRequest, context: grpc.ServicerContext) -> Iterator[pb.ReadKvResponse]:
        geometry = self._engine.geometry
        slots = self._checked_slots(request, context)
        remaining = context.time_remaining()
        # A reply that comes with the caller's deadline is lost: answer a little before it.
        wait_s = min(MAX_WAIT_S, remaining * 0.95) if remaining is not None else MAX_WAIT_S
        deadline = time.monotonic() + wait_s
        context.add_callback(self._follower.look_again)  # a call that was cancelled gives its thread back
        self._follower.wait_completed(
            request.service_id, request.epoch, request.after_step, deadline, lambda: not context.is_active()
        )
        self._check_standing(request, context)

        def read() -> tuple[np.ndarray, np.ndarray] | None:
            # On the main thread: no step runs, and a reset that was welcomed meanwhile is seen.
            position = self._follower.position
            if (position.service_id, position.epoch) != (request.service_id, request.epoch):
                return None
            return self._engine.read_kv(request.layer, slots)

        try:
            values = self._follower.call(read).result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._abort_not_reached(request, context)
        except CancelledError:
            _abort(context, Code.UNAVAILABLE, "STOPPING", "the executor stops")
        if values is None:
            self._check_standing(request, context)
            _abort(context, Code.FAILED_PRECONDITION, "EPOCH_STALE", "the pool was reset meanwhile")
        k, v = values
        each = max(1, (PIECE_BYTES - _PIECE_ROOM) // (k.shape[1] + v.shape[1]))
        with _cancelled_after(self._max_reply_s, context):
            for first in range(0, len(slots), each):
                piece = slice(first, first + each)
                yield pb.ReadKvResponse(
                    first=first,
                    count=len(k[piece]),
                    dtype=geometry.dtype,
                    num_kv_heads=geometry.num_kv_heads,
                    key_head_dim=geometry.key_head_dim,
                    value_head_dim=geometry.value_head_dim,
                    k=k[piece].tobytes(),
                    v=v[piece].tobytes(),
                )

    def _checked_slots(self, request: pb.ReadKvRequest, context: grpc.ServicerContext) -> np.ndarray:
        geometry = self._engine.geometry
        if len(request.slots) > MAX_SLOTS:
            _abort(
                context,
                Code.INVALID_ARGUMENT,
                "TOO_MANY_ITEMS",
                f"{len(request.slots)} slots are asked for, the limit is {MAX_SLOTS}: ask in parts",
                slots=len(request.slots),
                limit=MAX_SLOTS,
            )
        if request.layer >= geometry.num_layers:
            _abort(
                context,
                Code.INVALID_ARGUMENT,
                "LAYER_OUT_OF_RANGE",
                f"layer {request.layer} must lie in [0, {geometry.num_layers})",
                layer=request.layer,
                num_layers=geometry.num_layers,
            )
        slots = np.array(request.slots, np.uint64)
        num_slots = geometry.num_blocks * geometry.block_size
        if len(slots) and slots.max() >= num_slots:
            _abort(
                context,
                Code.INVALID_ARGUMENT,
                "SLOT_OUT_OF_RANGE",
                f"slot {slots.max()} must lie in [0, {num_slots})",
                slot=int(slots.max()),
                num_slots=num_slots,
            )
        return slots.astype(np.int64)

    def _check_standing(self, request: pb.ReadKvRequest, context: grpc.ServicerContext) -> None:
        """Ends the call unless the executor follows the service and epoch of the request, and has reached its step."""
        position = self._follower.position
        if not self._follower.attached:
            _abort(context, Code.FAILED_PRECONDITION, "NOT_ATTACHED", "the executor follows no service now")
        if (position.service_id, position.epoch) != (request.service_id, request.epoch):
            _abort(
                context,
                Code.FAILED_PRECONDITION,
                "EPOCH_STALE",
                f"epoch {request.epoch} of service {request.service_id!r} is asked for, "
                f"the pool is in epoch {position.epoch} of {position.service_id!r}: read the tables again",
                epoch=position.epoch,
                service_id=position.service_id,
            )
        if position.completed < request.after_step:
            self._abort_not_reached(request, context)

    def _abort_not_reached(self, request: pb.ReadKvRequest, context: grpc.ServicerContext) -> NoReturn:
        completed = self._follower.position.completed
        _abort(
            context,
            Code.DEADLINE_EXCEEDED,
            "STEP_NOT_REACHED",
            f"step {request.after_step} was not completed in time, {completed} is the last that is",
            after_step=request.after_step,
            completed=completed,
        )


class _Reflection:
    """Few streams at a time and none for long: one that asks nothing would keep its thread for ever."""

    def __init__(self, service_names: list[str], max_stream_s: float) -> None:
        self._inner: Any = reflection.ReflectionServicer(service_names)
        self._max_stream_s = max_stream_s
        self._streams = threading.BoundedSemaphore(_REFLECTIONS)

    def ServerReflectionInfo(self, request_iterator: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        if not self._streams.acquire(blocking=False):
            context.abort(Code.RESOURCE_EXHAUSTED, f"{_REFLECTIONS} reflection streams are open: try again")
        try:
            with _cancelled_after(self._max_stream_s, context):
                yield from self._inner.ServerReflectionInfo(request_iterator, context)
        finally:
            self._streams.release()


@contextlib.contextmanager
def _cancelled_after(seconds: float, context: grpc.ServicerContext) -> Iterator[None]:
    """A caller that neither reads nor writes blocks its call's thread; only cancelling the call wakes that up."""
    timer = threading.Timer(seconds, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _decode(data: bytes) -> pb.ReadKvRequest | DecodeError:
    """gRPC turns what a deserializer raises into INTERNAL; so an error is returned, and the servicer refuses it."""
    try:
        return pb.ReadKvRequest.FromString(data)
    except DecodeError as error:
        return error


def _abort(
    context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, message: str, **numbers: object
) -> NoReturn:
    """Ends the call with google.rpc.Status details: ErrorInfo with the reason and the numbers."""
    detail = any_pb2.Any()
    # Details travel as metadata, of which gRPC takes 8 KiB; what a caller sent may be echoed in them.
    message, metadata = message[:1000], {name: str(value)[:100] for name, value in numbers.items()}
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="pagedkv", metadata=metadata))
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


class ExecutorServer:
    """Serves on `listen` from `start` to `stop`; health follows the link."""

    def __init__(
        self,
        listen: str,
        follower: Follower,
        engine: Engine,
        *,
        max_reply_s: float = MAX_REPLY_S,
        max_reflection_s: float = MAX_REFLECTION_S,
        access: Access = Access(),  # noqa: B008
    ) -> None:
        """Binds. Raises OSError when the address cannot be had."""
        self._health = health.HealthServicer()
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
        self._server = grpc.server(ThreadPoolExecutor(_WORKERS, thread_name_prefix="serve"), options=options)
        self._server.add_generic_rpc_handlers((Servicer(follower, engine, max_reply_s, access).handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(names, max_reflection_s), self._server)
        try:
            self.port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: is it this machine's, and free?") from error
        self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        self.show_attached(False)
        follower.on_attached = self.show_attached

    def show_attached(self, attached: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if attached else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("", status)
        self._health.set(SERVICE, status)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._health.enter_graceful_shutdown()
        self._server.stop(1.0).wait()
