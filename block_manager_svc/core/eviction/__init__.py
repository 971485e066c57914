"""Which cached block goes first when space is needed: one policy a file, all behind `EvictionPolicy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol

from block_manager_svc.core.eviction.lfu import LFU
from block_manager_svc.core.eviction.lru import LRU
from block_manager_svc.core.eviction.s3fifo import S3FIFO
from block_manager_svc.core.step import I64


class EvictionPolicy(Protocol):
    """An order over the cached blocks: those that nothing references and the prefix index still finds."""

    def __len__(self) -> int:
        """Number of blocks held."""

    def add(self, blocks: I64) -> None:
        """Holds blocks from now on; the earlier in `blocks`, the earlier to go. None may be held already."""

    def remove(self, blocks: I64) -> None:
        """Lets go of blocks, because they were found: referenced again, or pinned. All must be held."""

    def evict(self, count: int) -> I64:
        """Lets go of the `count` blocks to be given up first, in that order. At least `count` must be held."""

    def forget(self, blocks: I64) -> None:
        """Blocks that are not held are to get other content."""

    def order(self) -> I64:
        """The blocks held, first to go first, for audits. Costs time proportional to their number."""


EvictionName = Literal["lru", "lfu", "s3fifo"]
# Makes the policy for a pool of so many blocks, given what tells the tokens (int32) of an indexed block.
MakePolicy = Callable[[int, Callable[[int], bytes]], EvictionPolicy]
POLICIES: Final[dict[EvictionName, MakePolicy]] = {
    "lru": lambda num_blocks, tokens: LRU(num_blocks),
    "lfu": lambda num_blocks, tokens: LFU(num_blocks),
    "s3fifo": S3FIFO,
}

__all__ = ["LFU", "LRU", "POLICIES", "S3FIFO", "EvictionName", "EvictionPolicy", "MakePolicy"]
