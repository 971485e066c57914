"""How long a sequence wants its blocks to stay findable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from block_manager_svc.core.errors import InvalidArgument

MAX_PRIORITY: Final = 100
DEFAULT_PRIORITY: Final = 35  # of blocks that nobody said anything about


@dataclass(frozen=True, slots=True)
class Retention:
    """The higher the priority, the later a block goes, if the pool evicts by priority.

    It counts for ttl_ms from the moment that nothing references the block, and anew each time; then the block is one
    of DEFAULT_PRIORITY. None: for good.

    InvalidArgument PRIORITY_OUT_OF_RANGE: not within 0 and MAX_PRIORITY. TTL_OUT_OF_RANGE: less than 1 ms.
    """

    priority: int
    ttl_ms: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidArgument(
                "PRIORITY_OUT_OF_RANGE",
                f"priority {self.priority}: at least 0, at most {MAX_PRIORITY}",
                priority=self.priority,
            )
        if self.ttl_ms is not None and self.ttl_ms < 1:
            raise InvalidArgument("TTL_OUT_OF_RANGE", f"{self.ttl_ms} ms: at least 1", ttl_ms=self.ttl_ms)
