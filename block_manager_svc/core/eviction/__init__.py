"""Which cached block goes first when space is needed: one policy a file, all behind `EvictionPolicy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from block_manager_svc.core.eviction.lfu import LFU
from block_manager_svc.core.eviction.lru import LRU
from block_manager_svc.core.eviction.policy import EvictionPolicy
from block_manager_svc.core.eviction.priority import Priority
from block_manager_svc.core.eviction.s3fifo import S3FIFO

EvictionName = Literal["lru", "lfu", "s3fifo", "priority"]
# Makes the policy for a pool of so many blocks, given what tells the content of an indexed block.
MakePolicy = Callable[[int, Callable[[int], bytes]], EvictionPolicy]
POLICIES: Final[dict[EvictionName, MakePolicy]] = {
    "lru": lambda num_blocks, held: LRU(num_blocks),
    "lfu": lambda num_blocks, held: LFU(num_blocks),
    "s3fifo": S3FIFO,
    "priority": lambda num_blocks, held: Priority(num_blocks),
}

__all__ = ["LFU", "LRU", "POLICIES", "S3FIFO", "EvictionName", "EvictionPolicy", "MakePolicy", "Priority"]
