from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from sdk_scripted import Scripted

from pagedkv import Client


@pytest.fixture
def service() -> Iterator[Scripted]:
    scripted = Scripted()
    server = scripted.serve()
    yield scripted
    server.stop(None).wait()


@pytest.fixture
def client(service: Scripted) -> Iterator[Client]:
    with Client(service.address) as client:
        yield client


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address where connections are refused: the port is bound, so nobody else takes it, and does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
