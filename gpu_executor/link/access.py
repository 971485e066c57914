"""How the executor shows the service who it is, and what it asks of those who read K and V from it."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from gpu_executor.config import Settings, SettingsInvalid
from pagedkv import PagedKvError, Tls
from pagedkv._access import Metadata, bearer


@dataclass(frozen=True, slots=True)
class Access:
    """metadata: goes with the attach. credentials: of the channel; None: plain HTTP/2. readers: the token that callers
    of ReadKv must show; None: whoever reaches the address may read."""

    metadata: Metadata | None = None
    credentials: grpc.ChannelCredentials | None = None
    readers: str | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Raises SettingsInvalid."""
        files = settings.tls_ca, settings.tls_cert, settings.tls_key
        tls = Tls(*files) if settings.tls or any(files) else None
        try:
            token = _token(settings.token_file)
            metadata = bearer(token, settings.service, protected=tls is not None or settings.trust_network)
            readers = _token(settings.listen_token_file)
            if readers is not None:
                bearer(readers, "localhost", protected=True)
            return cls(metadata, tls.credentials() if tls else None, readers)
        except PagedKvError as error:
            raise SettingsInvalid(error.message) from error

    def channel(self, service: str, options: list[tuple[str, int]]) -> grpc.Channel:
        if self.credentials is None:
            return grpc.insecure_channel(service, options=options)
        return grpc.secure_channel(service, self.credentials, options=options)

    def may_read(self, shown: str | bytes | None) -> bool:
        """shown: the value of the caller's `authorization`."""
        if self.readers is None:
            return True
        scheme, _, token = (shown if isinstance(shown, str) else "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.readers.encode())


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"{path}: no file with a token: {error}") from error
