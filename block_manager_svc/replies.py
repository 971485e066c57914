"""Replies that are kept for a while, so that a request that is sent again is not executed again.

Kept in the order of their arrival, so what is too old, and what is too much, lies at the front.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from block_manager_svc.core.errors import AlreadyExists

KEPT_MS: Final = 600_000
MAX_REPLIES: Final = 65_536
MAX_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptReply:
    digest: bytes  # of the request
    at: int  # ms
    reply: bytes


class Replies:
    """By the caller's id of the request. The clock is an argument, ms, and never goes backwards."""

    __slots__ = ("_bytes", "_kept")

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptReply] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, request_id: str, digest: bytes, now: int) -> KeptReply | None:
        """What the same request was answered; None: not known. AlreadyExists REQUEST_ID_REUSED: it was another one."""
        while self._kept and next(iter(self._kept.values())).at + KEPT_MS <= now:
            self._drop_oldest()
        kept = self._kept.get(request_id)
        if kept is not None and kept.digest != digest:
            raise AlreadyExists(
                "REQUEST_ID_REUSED",
                f"request id {request_id!r} was used for another request less than {KEPT_MS // 60_000} minutes ago",
                age_ms=now - kept.at,
            )
        return kept

    def keep(self, request_id: str, reply: KeptReply) -> None:
        """Of a request that `find` did not know. The oldest go when there are too many, or too many bytes of them."""
        self._kept[request_id] = reply
        self._bytes += len(reply.reply)
        while len(self._kept) > MAX_REPLIES or self._bytes > MAX_BYTES:
            self._drop_oldest()

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def _drop_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._bytes -= len(oldest.reply)
