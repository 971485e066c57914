"""The certificate that the service shows, and whose certificates it asks callers for."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Self

import grpc


class BadCertificate(Exception):
    """The message, one line, names the file."""


class Tls:
    """PEM files, read once: a service with a new certificate is a service that was started again."""

    def __init__(self, certificate: bytes, key: bytes, client_ca: bytes | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca

    @classmethod
    def from_files(cls, certificate: Path, key: Path, client_ca: Path | None = None) -> Self:
        """client_ca: callers must show a certificate that one of these authorities signed. Raises BadCertificate."""
        # gRPC takes whatever it is given, and every handshake fails then; OpenSSL says now what is wrong.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair, authorities = f"{certificate}, {key}", str(client_ca)
        where = pair
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
            if client_ca is not None:
                where = authorities
                context.load_verify_locations(client_ca)
            return cls(
                certificate.read_bytes(), key.read_bytes(), None if client_ca is None else client_ca.read_bytes()
            )
        except ssl.SSLError as error:
            raise BadCertificate(f"{where}: no PEM of a certificate and its key: {error.reason or error}") from error
        except OSError as error:
            raise BadCertificate(f"{error.filename or where}: {error.strerror or error}") from error
        except ValueError as error:
            raise BadCertificate(f"{where}: {error}") from error

    @property
    def verifies_clients(self) -> bool:
        return self._client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self._key, self._certificate)], self._client_ca, require_client_auth=self.verifies_clients
        )


def _no_password() -> str:
    """Asked for a key that is encrypted; without this, OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted: give one that is not, readable for this user alone")
