"""What a failed call becomes."""

from __future__ import annotations

import os
import pickle
import re
import socket

import grpc
import pytest
from google.rpc import code_pb2
from sdk_scripted import Scripted, refusing, silent, wait_until

import pagedkv
from pagedkv import Client, DeadlineExceeded, Internal, InvalidArgument, PagedKvError, ResourceExhausted, Unavailable

CLASSES = [
    (code_pb2.INVALID_ARGUMENT, "InvalidArgument"),
    (code_pb2.OUT_OF_RANGE, "InvalidArgument"),
    (code_pb2.NOT_FOUND, "NotFound"),
    (code_pb2.FAILED_PRECONDITION, "FailedPrecondition"),
    (code_pb2.RESOURCE_EXHAUSTED, "ResourceExhausted"),
    (code_pb2.UNAVAILABLE, "Unavailable"),
    (code_pb2.DEADLINE_EXCEEDED, "DeadlineExceeded"),
    (code_pb2.CANCELLED, "Cancelled"),
    (code_pb2.ABORTED, "Aborted"),
    (code_pb2.INTERNAL, "Internal"),
    (code_pb2.UNKNOWN, "Internal"),
    (code_pb2.PERMISSION_DENIED, "Internal"),
]


@pytest.mark.parametrize(("code", "name"), CLASSES)
def test_a_status_with_details_becomes_its_class_with_exact_numbers(
    service: Scripted, client: Client, code: int, name: str
) -> None:
    service.generate = refusing(
        code,
        "too long, shorten it",
        reason="SOME_REASON",
        retry_after=1.5,
        tokens=9000,
        share=0.5,
        model="tiny",
        no="nan",
    )
    with pytest.raises(PagedKvError) as caught:
        client.complete("x")
    error = caught.value
    assert type(error) is getattr(pagedkv, name)
    assert (error.reason, error.message, error.retry_after) == ("SOME_REASON", "too long, shorten it", 1.5)
    assert error.code == code_pb2.Code.Name(code)
    assert error.numbers == {"tokens": 9000, "share": 0.5, "model": "tiny", "no": "nan"}
    assert isinstance(error.numbers["tokens"], int)
    assert str(error) == "SOME_REASON: too long, shorten it"
    assert len(service.requests("Generate")) == 1


def test_a_status_without_details_keeps_code_and_message(service: Scripted, client: Client) -> None:
    service.unary["GetPool"] = refusing(code_pb2.FAILED_PRECONDITION, "not now")
    with pytest.raises(pagedkv.FailedPrecondition) as caught:
        client.pool()
    error = caught.value
    assert (error.reason, error.message, error.numbers) == ("FAILED_PRECONDITION", "not now", {})
    assert error.retry_after is None


def test_details_that_cannot_be_read_do_not_hide_the_status(service: Scripted, client: Client) -> None:
    def broken(request: object, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff\xff"),))
        context.abort(grpc.StatusCode.NOT_FOUND, "gone")

    service.unary["GetPool"] = broken
    with pytest.raises(pagedkv.NotFound, match="gone"):
        client.pool()


def test_an_exception_in_the_service_is_internal(service: Scripted, client: Client) -> None:
    def bug(request: object, context: grpc.ServicerContext) -> None:
        raise ZeroDivisionError("boom")

    service.unary["GetPool"] = bug
    with pytest.raises(Internal, match="boom") as caught:
        client.pool()
    assert caught.value.code == "UNKNOWN"


def test_a_refused_connection_names_the_address(closed_port: str) -> None:
    with Client(closed_port) as client:
        for call in (client.pool, lambda: client.complete("x")):
            with pytest.raises(Unavailable, match=closed_port) as caught:
                call()
            assert caught.value.reason == "UNREACHABLE"
        assert not client.healthy()


def test_a_listener_that_never_answers_is_no_hang() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with Client(address) as client, pytest.raises(Unavailable, match=address):
            client.complete("x")


def test_a_client_finds_a_service_again_that_was_away() -> None:
    service = Scripted()
    server = service.serve()
    with Client(service.address) as client:
        assert client.healthy()
        server.stop(None).wait()
        assert not client.healthy()
        server = service.serve(int(service.address.rpartition(":")[2]))
        wait_until(client.healthy, "the client is connected again")
    server.stop(None).wait()


def test_a_unary_call_has_a_deadline(service: Scripted) -> None:
    service.unary["GetPool"] = lambda request, context: next(silent(request, context))
    with Client(service.address, timeout=0.2) as client:
        with pytest.raises(DeadlineExceeded, match=re.escape(f"{service.address} did not finish within 0.2 s")):
            client.pool()
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            client.pool(timeout=0.1)


def test_a_message_over_the_limit_is_refused_with_its_size(service: Scripted, client: Client) -> None:
    with pytest.raises(ResourceExhausted) as caught:
        client.complete("x" * (17 << 20))
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert caught.value.numbers["limit"] == 16 << 20
    assert caught.value.numbers["size"] > 17 << 20
    assert service.calls == []


def test_a_message_just_below_the_limit_passes(service: Scripted, client: Client) -> None:
    assert client.complete("x" * ((16 << 20) - 64)).text == "Paris."


@pytest.mark.parametrize(
    "address",
    ["", "localhost", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "::1:50061", "http://localhost:1", ":5"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client(address)
    assert caught.value.reason == "ADDRESS_INVALID"


@pytest.mark.parametrize("address", ["localhost:1", "[::1]:50061", "unix:/tmp/socket", "dns:///service:50061"])
def test_what_is_an_address_is_taken(address: str) -> None:
    with Client(address) as client:
        assert client.address == address


def test_a_proxy_in_the_environment_is_not_used(
    service: Scripted, closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{closed_port}")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "no_proxy" not in os.environ
    with Client(service.address) as client:
        assert client.healthy()


def test_an_error_survives_pickling(service: Scripted, client: Client) -> None:
    service.generate = refusing(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after=2, waiting=9)
    with pytest.raises(ResourceExhausted) as caught:
        client.complete("x")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ResourceExhausted
    assert (str(copy), copy.numbers, copy.retry_after, copy.code) == (
        "QUEUE_FULL: full",
        {"waiting": 9},
        2.0,
        "RESOURCE_EXHAUSTED",
    )
