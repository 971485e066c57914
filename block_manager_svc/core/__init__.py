"""The page table: a single-writer, deterministic state machine. No I/O, no clock, no randomness, no threads."""

from __future__ import annotations

from block_manager_svc.core.eviction.retention import Retention
from block_manager_svc.core.page_table import PageTable
from block_manager_svc.core.results import BlockStates, Counters, Extended, Grown, Match, Pinned, Sharing, Tables

__all__ = [
    "BlockStates",
    "Counters",
    "Extended",
    "Grown",
    "Match",
    "PageTable",
    "Pinned",
    "Retention",
    "Sharing",
    "Tables",
]
