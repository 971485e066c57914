"""How a caller shows who it is, and knows whom it talks to: a bearer token, and TLS."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

import grpc

from pagedkv._errors import InvalidArgument

_LOCAL_SCHEMES: Final = ("unix:", "unix-abstract:")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files, read when the connection is made.

    ca:        authorities that may have signed the service's certificate; None: those that gRPC brings along.
    cert, key: what this caller shows, where the service asks for it (mutual TLS): both or none.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgument TLS_FILE_UNREADABLE, TLS_PAIR_INCOMPLETE."""
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("TLS_PAIR_INCOMPLETE", "a certificate and its key belong together: give both or none")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def _read(path: str | PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        why = f"{path}: {error.strerror or error}"
        raise InvalidArgument("TLS_FILE_UNREADABLE", why, numbers={"file": str(path)}) from error


def access(
    token: str | None, tls: Tls | None, address: str, *, trust_network: bool
) -> tuple[Metadata | None, grpc.ChannelCredentials | None]:
    """What a client's calls carry, and what its channel is made with; None: plain HTTP/2.

    A token or TLS that is not given comes from the environment. Raises what `bearer` and `Tls.credentials` raise.
    """
    if token is None:
        token = os.environ.get("PAGEDKV_TOKEN") or None
    if tls is None:
        tls = _tls_of_environment()
    return bearer(token, address, protected=tls is not None or trust_network), tls.credentials() if tls else None


def _tls_of_environment() -> Tls | None:
    # Not PAGEDKV_TLS_CERT and _KEY: these are settings of the service, for the certificate that it serves with.
    names = "PAGEDKV_TLS_CA", "PAGEDKV_CLIENT_CERT", "PAGEDKV_CLIENT_KEY"
    files = [os.environ.get(name) or None for name in names]
    return Tls(*files) if any(files) else None


def bearer(token: str | None, address: str, *, protected: bool) -> Metadata | None:
    """What goes with every call; None without a token.

    protected: it may be sent to `address`: over TLS, or since the caller says so. Raises InvalidArgument TOKEN_INVALID,
    TOKEN_UNPROTECTED.
    """
    if token is None:
        return None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument("TOKEN_INVALID", "a token is printable ASCII without spaces: is it the right file?")
    if not protected and not _is_local(address):
        raise InvalidArgument(
            "TOKEN_UNPROTECTED",
            f"a token for {address} would travel unencrypted: use TLS, or say that the network is trusted",
            numbers={"address": address},
        )
    return (("authorization", f"Bearer {token}"),)


def _is_local(address: str) -> bool:
    if address.startswith(_LOCAL_SCHEMES):
        return True
    host = address.rpartition(":")[0].rpartition(":")[2] if address.startswith("dns:") else address
    host = host.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]") or host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
