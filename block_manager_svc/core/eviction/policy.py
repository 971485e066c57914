"""What an eviction policy is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod

from block_manager_svc.core.eviction.retention import Retention
from block_manager_svc.core.step import I64


class EvictionPolicy(ABC):
    """An order over the cached blocks: those that nothing references and the prefix index still finds."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks held."""

    @abstractmethod
    def add(self, blocks: I64) -> None:
        """Holds blocks from now on; of equals, the earlier in `blocks`, the earlier to go. None may be held already."""

    @abstractmethod
    def remove(self, blocks: I64) -> None:
        """Lets go of blocks, because they were found: referenced again, or pinned. All must be held."""

    @abstractmethod
    def evict(self, count: int) -> I64:
        """Lets go of the `count` blocks to be given up first, in that order. At least `count` must be held."""

    @abstractmethod
    def order(self) -> I64:
        """The blocks held, first to go first, for audits. Costs time proportional to the pool."""

    # What follows is heeded by those policies alone that remember something of a block, or know the time.

    def forget(self, blocks: I64) -> None:
        """Blocks that are not held are to get other content."""
        return

    def retain(self, blocks: I64, retention: Retention) -> None:
        """Somebody who references these blocks says how long they are to stay; the last word counts."""
        return

    def advance(self, now: int) -> None:
        """The clock, ms."""
        return
