"""Who calls: bearer tokens, the tenants that they stand for, and what these may do.

The tokens file has one entry a line; `#` begins a comment:

    token SHA256 TENANT ROLE[,ROLE…]     whoever sends the token with this hash is TENANT, in these roles
    share GROUP TENANT TENANT…           these tenants find each other's cached prefixes

Tokens are long random strings (`kvctl token new` makes them), so a plain SHA-256 cannot be searched backwards.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from block_manager_svc.core.errors import Unauthenticated

MAX_FILE_BYTES: Final = 16 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_OTHERS_MAY_READ_OR_WRITE: Final = 0o006


class Role(StrEnum):
    GATEWAY = "gateway"  # generates
    ENGINE = "engine"  # changes sequences of its own, and reads them
    OPERATOR = "operator"  # administers, and reads what is every tenant's
    EXECUTOR = "executor"  # attaches


ALL_ROLES: Final = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose sequences, pins and reservations something is, and whose prefixes it may find.

    number: from 1, the same for as long as the process runs.
    realm:  begins the name of every prefix cache namespace of this tenant. Only tenants of one share group have one
            realm, and no realm begins another.
    """

    name: str
    number: int
    realm: bytes

    @property
    def calls(self) -> int:
        """Owner, in the page table, of the sequences that the step loop computes for this tenant."""
        return self.number

    @property
    def account(self) -> int:
        """Who is charged, in the page table; the default tenant's needs no book-keeping."""
        return self.number - 1

    @property
    def engines(self) -> int:
        """Owner of what the tenant's engines bring: neither of the two kinds is there for the other."""
        return -self.number


DEFAULT: Final = Tenant("default", 1, b"tenant\0default\0")


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: Tenant
    roles: frozenset[Role]

    @property
    def is_operator(self) -> bool:
        return Role.OPERATOR in self.roles


EVERYBODY: Final = Caller(DEFAULT, ALL_ROLES)


class BadTokensFile(Exception):
    """The message, one line, names the file, the line and what to do."""


class Callers:
    """Turns tokens into callers. Without a file everybody is tenant `default`, and may do everything."""

    def __init__(self, tokens_file: Path | None = None) -> None:
        """Raises BadTokensFile."""
        self._path = tokens_file
        self._numbers = {DEFAULT.name: DEFAULT.number}
        # Callers lie under keyed hashes of their tokens' hashes. The key is this process's secret: how long a look-up
        # takes tells nothing about how much of a hash was right, as a comparison in constant time would not either
        # ("double HMAC verification").
        self._key = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self.reload()

    @property
    def ask_for_tokens(self) -> bool:
        return self._path is not None

    def __len__(self) -> int:
        """Tokens that are known."""
        return len(self._callers)

    def identify(self, token: str | None) -> Caller:
        """Unauthenticated TOKEN_MISSING, TOKEN_UNKNOWN."""
        if self._path is None:
            return EVERYBODY
        if not token:
            raise Unauthenticated(
                "TOKEN_MISSING", "this service wants a token: send it as metadata `authorization: Bearer TOKEN`"
            )
        caller = self._callers.get(self._blind(hashlib.sha256(token.encode()).digest()))
        if caller is None:
            raise Unauthenticated(
                "TOKEN_UNKNOWN", "this token is not one of the service's: it was mistyped, or taken out of its file"
            )
        return caller

    def tenants(self) -> list[Tenant]:
        """All that there are, the default one first."""
        named = {who.tenant.name: who.tenant for who in self._callers.values()}
        return [DEFAULT, *(tenant for name, tenant in sorted(named.items()) if name != DEFAULT.name)]

    def reload(self) -> None:
        """Reads the file again; all of it counts from now on, or nothing. Raises BadTokensFile."""
        if self._path is None:
            return
        entries, groups = _parse(self._path, _read(self._path))
        self._callers = {
            self._blind(digest): Caller(self._tenant(name, groups.get(name)), roles)
            for digest, (name, roles) in entries.items()
        }

    def _tenant(self, name: str, group: str | None) -> Tenant:
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        realm = f"tenant\0{name}\0" if group is None else f"group\0{group}\0"
        return Tenant(name, number, realm.encode())

    def _blind(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=32).digest()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & _OTHERS_MAY_READ_OR_WRITE:
                raise BadTokensFile(
                    f"{path}: everybody on this machine may read or write it (mode {mode & 0o777:03o}): chmod o= {path}"
                )
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadTokensFile(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise BadTokensFile(f"{path}: more than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadTokensFile(f"{path}: not UTF-8 at byte {error.start}") from error


def _parse(path: Path, text: str) -> tuple[dict[bytes, tuple[str, frozenset[Role]]], dict[str, str]]:
    """Tenant and roles by the token's hash, and share group by tenant."""
    entries: dict[bytes, tuple[str, frozenset[Role]]] = {}
    groups: dict[str, str] = {}
    for where, words in _lines(path, text):
        match words:
            case ["token", digest, tenant, roles]:
                if not _HASH.fullmatch(digest):
                    raise BadTokensFile(
                        f"{where}: a SHA-256 has 64 lowercase hexadecimal digits; never the token itself"
                    )
                key = bytes.fromhex(digest)
                if key in entries:
                    raise BadTokensFile(f"{where}: this token has a line already")
                entries[key] = _named(where, tenant), _roles(where, roles)
            case ["share", group, _, _, *_]:
                _named(where, group)
                for tenant in words[2:]:
                    if groups.setdefault(_named(where, tenant), group) != group:
                        raise BadTokensFile(f"{where}: {tenant} is in group {groups[tenant]} already, one is the most")
            case _:
                raise BadTokensFile(f"{where}: neither `token SHA256 TENANT ROLES` nor `share GROUP TENANT TENANT…`")
    return entries, groups


def _lines(path: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            yield f"{path}:{number}", words


def _named(where: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BadTokensFile(f"{where}: a name has 1 to 64 letters, digits, dots, dashes and underscores, not {name!r}")
    return name


def _roles(where: str, text: str) -> frozenset[Role]:
    try:
        return frozenset(Role(name) for name in text.split(","))
    except ValueError:
        raise BadTokensFile(f"{where}: roles are {', '.join(Role)}, not {text!r}") from None
