"""What the page table answers: plain columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from block_manager_svc.core.step import I32, I64, BlockOps, OpKind


@dataclass(slots=True)
class Counters:
    """Since the page table was made; the peaks are the highest that `Sharing` was after any command."""

    allocated_blocks: int = 0
    evicted_blocks: int = 0
    copies_on_write: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    peak_table_entries: int = 0
    peak_referenced_blocks: int = 0
    peak_shared_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What of a sequence's own tokens the prefix index finds."""

    tokens: int
    blocks: int
    idle_blocks: int  # of these, how many nothing references: taking them lowers `available`


@dataclass(frozen=True, slots=True)
class Pinned:
    pin: int  # its id, never used again
    tokens: int  # how many of the prefix are held


@dataclass(slots=True)
class Extended:
    """Copies in decision order, and the changed part of each table that changed.

    copy_src, copy_dst: i32, device blocks; dst is to become src, before anything is written.
    delta_sequence:     i32, index into the argument; ascending, at most once each.
    delta_first, delta_count: i32; entries delta_first .. + delta_count of that table changed ...
    delta_blocks:       i32, ... to these, one delta after another.
    zeroed:             i32, of the new blocks those that hold what another tenant wrote.
    """

    copy_src: I32
    copy_dst: I32
    delta_sequence: I32
    delta_first: I32
    delta_count: I32
    delta_blocks: I32
    zeroed: I32

    def ops(self) -> BlockOps:
        """The block ops, to be carried out before anything is written."""
        copies, zeros = self.copy_src.size, self.zeroed.size
        if not zeros:
            return BlockOps(np.full(copies, OpKind.COPY, np.uint8), self.copy_src, self.copy_dst)
        return BlockOps(
            np.repeat(np.array([OpKind.COPY, OpKind.ZERO], np.uint8), [copies, zeros]),
            np.concatenate((self.copy_src, np.zeros_like(self.zeroed))),
            np.concatenate((self.copy_dst, self.zeroed)),
        )


@dataclass(frozen=True, slots=True)
class Grown:
    """What `extended` says, and the slots (block * block_size + offset) of the positions that are new to write.

    Sequence i owns slots[slot_indptr[i] : slot_indptr[i + 1]] (i64 both): those of its positions from the first that
    was not yet known and writable through the end of its lookahead.
    """

    extended: Extended
    slot_indptr: I64
    slots: I64


@dataclass(frozen=True, slots=True)
class Begun:
    """New sequences (i64, their ids), the tokens of each that are computed already (i64), slots as in Grown, and block
    ops as of an `Extended`."""

    sequences: I64
    cached: I64
    slot_indptr: I64
    slots: I64
    ops: BlockOps


@dataclass(frozen=True, slots=True)
class Moved:
    """The moves of a swap or compaction in decision order, and the sequences (i64) whose tables changed by it.

    A block that several sequences share moves once, and is then elsewhere for all of them, also for those that were
    not named.
    """

    ops: BlockOps
    changed: I64


@dataclass(frozen=True, slots=True)
class Tables:
    """Block tables as CSR: sequence i owns indices[indptr[i] : indptr[i + 1]] (i32 all).

    indices:       device blocks, and num_blocks + h for host slot h.
    last_page_len: writable positions in the last block, 0 for an empty table.
    refcount:      references to indices[j], over all tables.
    changed:       i64, the page table's revision at which the entries of each last changed.
    """

    indptr: I32
    indices: I32
    last_page_len: I32
    refcount: I32
    changed: I64


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Blocks by state; their sum is the size of the pool."""

    null: int
    free: int
    reserved: int
    active: int  # referenced, not full or not yet computed
    sealed: int  # referenced, full and computed
    cached: int  # not referenced, findable, evictable
    quarantined: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the free blocks lie: runs of neighbours, and the highest block that is not free (0: none)."""

    free_runs: int
    largest_free_run: int
    highest_used_block: int


@dataclass(frozen=True, slots=True)
class Sharing:
    table_entries: int  # over all block tables
    referenced_blocks: int  # distinct blocks that these name
    shared_blocks: int  # blocks named by two entries or more


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Blocks of the device that a tenant is charged for, of which `cached` can be evicted; its part of the host."""

    charged: int
    cached: int
    reserved: int
    host: int
    floor: int
    quota: int | None  # None: none
    host_floor: int
    host_quota: int | None


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one sequence. Positions below `computed` have their K/V in the pool, below `writable` a slot."""

    tokens: int
    computed: int
    writable: int
    blocks: int
    shared_blocks: int  # of these, in another table too
    host_blocks: int  # of these, on the host
    swapped_out: bool
    table_revision: int  # at which its entries last changed
    priority: int | None
