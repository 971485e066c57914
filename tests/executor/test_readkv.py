"""ReadKv of a running executor: in its order, with a deadline, refused with a reason and the numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from support.link_service import SERVICE_ID, LinkService, Steps, Stream
from support.running_executor import BLOCK_SIZE, BLOCKS, Running, slots
from support.waiting import wait_for

from gpu_executor.link.server import ExecutorServer
from pagedkv.v1 import executor_pb2 as pb
from pagedkv.v1 import executor_pb2_grpc

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def service() -> Iterator[LinkService]:
    service = LinkService()
    yield service
    service.close()


@pytest.fixture
def running(service: LinkService, tiny_llama_dir: Path) -> Iterator[Running]:
    running = Running(tiny_llama_dir, service.address)
    yield running
    running.close()


@pytest.fixture
def stream(service: LinkService, running: Running) -> Stream:
    """Attached, epoch 1; PROMPT lies in blocks 1 and 2 of row 0, step 1."""
    stream = service.stream()
    stream.hello()
    stream.welcome(1, reset=True)
    stream.send(step=Steps().prefill(PROMPT))
    stream.result()
    return stream


def read(running: Running, timeout: float | None = 30, **changed: object) -> list[pb.ReadKvResponse]:
    fields = {"service_id": SERVICE_ID, "epoch": 1, "after_step": 1, "layer": 0, "slots": [4]} | changed
    stub = executor_pb2_grpc.ExecutorServiceStub(running.channel)
    return list(stub.ReadKv(pb.ReadKvRequest(**fields), timeout=timeout))


def refused(running: Running, **changed: object) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    with pytest.raises(grpc.RpcError) as error:
        read(running, **changed)
    return refusal_of(error.value)


def refusal_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    status = rpc_status.from_call(error)
    assert status is not None, error
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "pagedkv"
    assert error.details()
    return error.code(), info


def test_slots_come_in_the_order_asked_with_their_shape(running: Running, stream: Stream) -> None:
    wanted = [9, 4, 4, 5]
    [piece] = read(running, slots=wanted, layer=1, timeout=None)
    assert (piece.first, piece.count, piece.dtype) == (0, 4, "float64")
    assert (piece.num_kv_heads, piece.key_head_dim, piece.value_head_dim) == (2, 16, 16)
    for data, views in ((piece.k, "k_view"), (piece.v, "v_view")):
        got = np.frombuffer(data, "<f8").reshape(4, 2, 16)
        pool = running.executor.engine._pool
        expected = getattr(pool, views)(1).reshape(-1, 2, 16)[wanted].numpy()
        np.testing.assert_array_equal(got, expected)
        assert np.isfinite(got).all()


def test_no_slots_give_an_empty_stream(running: Running, stream: Stream) -> None:
    assert read(running, slots=[]) == []


def test_large_reads_come_in_pieces_below_one_mebibyte(running: Running, stream: Stream) -> None:
    wanted = (slots(1, 2) * 8192)[:65_536]
    pieces = read(running, slots=wanted)
    assert len(pieces) > 1
    assert max(piece.ByteSize() for piece in pieces) < 1 << 20
    firsts = np.cumsum([0, *(piece.count for piece in pieces)])
    assert [piece.first for piece in pieces] == firsts[:-1].tolist()
    assert firsts[-1] == len(wanted)
    k = np.frombuffer(b"".join(piece.k for piece in pieces), "<f8").reshape(-1, 8, 2, 16)
    np.testing.assert_array_equal(k, np.broadcast_to(k[0], k.shape))


def test_a_read_waits_for_the_step_it_names(running: Running, stream: Stream) -> None:
    steps = Steps()
    steps.prefill(PROMPT)
    zero = steps.make(op_kind=[2], op_src=[0], op_dst=[1])
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(read, running, after_step=2)
        # A later read has its answer while the first one waits.
        assert np.frombuffer(read(running, after_step=1)[0].k, "<f8").all()
        assert not early.done()
        stream.send(step=zero)
        assert not np.frombuffer(early.result(30)[0].k, "<f8").any()


def test_a_step_that_does_not_come_is_answered_before_the_deadline(running: Running, stream: Stream) -> None:
    code, info = refused(running, after_step=9, timeout=0.5)
    assert (code, info.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STEP_NOT_REACHED")
    assert dict(info.metadata) == {"after_step": "9", "completed": "1"}


def test_a_read_behind_a_long_step_keeps_its_deadline(running: Running, stream: Stream) -> None:
    held, release = running.hold()
    assert held.wait(30)
    code, info = refused(running, timeout=0.5)
    assert (code, info.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STEP_NOT_REACHED")
    release.set()
    assert read(running)


@pytest.mark.parametrize(
    ("changed", "reason", "numbers"),
    [
        ({"slots": [4, BLOCKS * BLOCK_SIZE]}, "SLOT_OUT_OF_RANGE", {"slot": "128", "num_slots": "128"}),
        ({"slots": [2**64 - 1]}, "SLOT_OUT_OF_RANGE", {"slot": str(2**64 - 1), "num_slots": "128"}),
        ({"layer": 2}, "LAYER_OUT_OF_RANGE", {"layer": "2", "num_layers": "2"}),
        ({"slots": [0] * 65_537}, "TOO_MANY_ITEMS", {"slots": "65537", "limit": "65536"}),
    ],
)
def test_arguments_out_of_range_are_refused_with_the_numbers(
    running: Running, stream: Stream, changed: dict[str, object], reason: str, numbers: dict[str, str]
) -> None:
    code, info = refused(running, **changed)
    assert (code, info.reason, dict(info.metadata)) == (grpc.StatusCode.INVALID_ARGUMENT, reason, numbers)


@pytest.mark.parametrize("changed", [{"epoch": 0}, {"epoch": 2}, {"service_id": "another"}])
def test_another_epoch_is_refused(running: Running, stream: Stream, changed: dict[str, object]) -> None:
    code, info = refused(running, **changed)
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_STALE")
    assert dict(info.metadata) == {"epoch": "1", "service_id": SERVICE_ID}


def test_a_reset_ends_the_reads_that_wait(service: LinkService, running: Running, stream: Stream) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refused, running, after_step=2)
        stream.end()
        code, info = waiting.result(30)
        assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_ATTACHED")
    again = service.stream()
    again.hello()
    again.welcome(2, reset=True)
    wait_for(lambda: running.executor.follower.attached, 30, "attached again")
    assert refused(running)[1].reason == "EPOCH_STALE"
    assert read(running, epoch=2, after_step=0)


def test_before_the_first_welcome_nothing_can_be_read(running: Running) -> None:
    code, info = refused(running, service_id="", epoch=0, after_step=0)
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_ATTACHED")


def test_reads_that_wait_are_bounded_and_leave_health_free(running: Running, stream: Stream) -> None:
    stub = executor_pb2_grpc.ExecutorServiceStub(running.channel)
    request = pb.ReadKvRequest(service_id=SERVICE_ID, epoch=1, after_step=9, slots=[4])
    waiting = [stub.ReadKv(request, timeout=60) for _ in range(40)]
    wait_for(lambda: sum(not call.is_active() for call in waiting) == 8, 30, "eight reads refused")
    assert {call.code() for call in waiting if not call.is_active()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert running.health("live") == 1
    # Reads that were given up make room.
    for call in waiting:
        call.cancel()
    wait_for(lambda: readable(running), 30, "a read that is not refused")


def test_bytes_that_are_no_request_are_refused(running: Running) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(running.channel.unary_stream("/pagedkv.v1.ExecutorService/ReadKv")(b"\x0a\x02\xff\xfe", timeout=30))
    code, info = refusal_of(error.value)
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_MALFORMED")


@contextmanager
def short_limits(running: Running, **limits: float) -> Iterator[grpc.Channel]:
    """A second server of the same executor, that waits for its callers less long; they buffer 64 KiB of a reply."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    server = ExecutorServer("127.0.0.1:0", running.executor.follower, running.executor.engine, **limits)
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        yield channel
    server.stop()


def test_replies_that_are_not_read_are_cancelled_and_make_room(running: Running, stream: Stream) -> None:
    with short_limits(running, max_reply_s=8.0) as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        large = pb.ReadKvRequest(service_id=SERVICE_ID, epoch=1, after_step=1, slots=[4] * 65_536)
        unread = [stub.ReadKv(large) for _ in range(32)]
        small = pb.ReadKvRequest(service_id=SERVICE_ID, epoch=1, after_step=1, slots=[4])

        def reason() -> str:
            try:
                list(stub.ReadKv(small, timeout=30))
            except grpc.RpcError as error:
                return refusal_of(error)[1].reason
            return ""

        begun = [next(call).count for call in unread]  # all are under way, and none is read to its end
        assert reason() == "TOO_MANY_READS"
        wait_for(lambda: reason() == "", 30, "there is room again")
        codes = []
        for call, count in zip(
            unread, begun, strict=True
        ):  # one whose time is not over yet comes whole; none ends early as if it had
            try:
                assert count + sum(piece.count for piece in call) == 65_536
            except grpc.RpcError as error:
                codes.append(error.code())
        assert set(codes) == {grpc.StatusCode.CANCELLED}


def test_idle_reflection_streams_are_bounded_end_and_leave_health_free(running: Running) -> None:
    with short_limits(running, max_reflection_s=2.0) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        over = threading.Event()

        def nothing() -> Iterator[reflection_pb2.ServerReflectionRequest]:
            over.wait()
            yield from ()

        idle = [stub.ServerReflectionInfo(nothing()) for _ in range(60)]
        try:
            live = health_pb2.HealthCheckRequest(service="live")
            assert health_pb2_grpc.HealthStub(channel).Check(live, timeout=30).status == 1
            wait_for(lambda: not any(call.is_active() for call in idle), 30, "every stream has ended")
        finally:
            over.set()
        codes = [call.code() for call in idle]
        assert set(codes) == {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "grpc.health.v1.Health" in ProtoReflectionDescriptorDatabase(channel).get_services()


def readable(running: Running) -> bool:
    try:
        return bool(read(running))
    except grpc.RpcError:
        return False


def test_reflection_names_the_services(running: Running) -> None:
    services = ProtoReflectionDescriptorDatabase(running.channel).get_services()
    assert "pagedkv.v1.ExecutorService" in services
    assert "grpc.health.v1.Health" in services
