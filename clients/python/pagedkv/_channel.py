"""How a channel to the service is set up, for both clients."""

from __future__ import annotations

import json
from typing import Final

from pagedkv._errors import InvalidArgument

DEFAULT_ADDRESS: Final = "127.0.0.1:50061"
DEFAULT_TIMEOUT: Final = 10.0  # seconds, of a unary call
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

# Only reads are tried again, and only when nobody was there: they change nothing. Generate is never sent twice.
_RETRIED_READS: Final = (
    ("pagedkv.v1.GenerationService", "ListModels"),
    ("pagedkv.v1.BlockManagerService", "GetPool"),
    ("pagedkv.v1.BlockManagerService", "ListSequences"),
    ("pagedkv.v1.BlockManagerService", "GetBlockTables"),
    ("pagedkv.v1.BlockManagerService", "GetSequence"),
    ("pagedkv.v1.BlockManagerService", "Match"),
    ("pagedkv.v1.BlockManagerService", "Audit"),
)
_SERVICE_CONFIG: Final = {
    "methodConfig": [
        {
            "name": [{"service": service, "method": method} for service, method in _RETRIED_READS],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # A connection attempt that gets no answer ends after 5 s (gRPC's own default is 20), sooner than a unary call's
    # default timeout: the error then says that nobody is there. After a failure the next attempt comes soon.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A peer that vanished without closing is noticed; the service allows a ping every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # http_proxy in the environment is not meant for this: a loopback address would be dialled at the proxy.
    ("grpc.enable_http_proxy", 0),
)

_SCHEMES: Final = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")


def check_address(address: str) -> str:
    """`address` if gRPC will read it as meant: host:port, [IPv6]:port, or one of gRPC's schemes.

    Raises InvalidArgument otherwise; gRPC itself would take port 443 when there is none, and never say so.
    """
    if address.startswith(_SCHEMES):
        return address
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(
            "ADDRESS_INVALID",
            f"{address!r} is no address: write host:port, such as {DEFAULT_ADDRESS}",
            numbers={"address": address},
        )
    return address
