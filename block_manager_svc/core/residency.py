"""Residency: which blocks of swapped-out sequences leave the device for the host, and how they come back.

    A  P1 P2 P3      A is swapped out: P2 and P3 move to host slots, once for all that hold them. P1 stays, since B on
    B  P1 P4         the device shares it; A keeps its reference. When B goes too, P1 moves for both.

A block is on the host only if all its holders are swapped out, so what a sequence on the device names is on the device.
Who else holds a block that moves is read from `_holders`, so the cost follows the sequences that a swap is about.

Moves are decided in an order in which each can be carried out by itself: blocks leave while host slots are free, then
blocks come in while the device has room, and so on. One host slot is kept free at rest, so that even a full device and
a full host can exchange.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from block_manager_svc.core.errors import FailedPrecondition, OutOfBlocks, ResourceExhausted
from block_manager_svc.core.moves import distinct, entries_of, point
from block_manager_svc.core.pool import SPARE_SLOTS, BlockPool
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I32, I64, BlockOps, OpKind
from block_manager_svc.core.tail import give_back, surplus


class SwapPlan(NamedTuple):
    """What is decided and not done yet."""

    out: I64  # rows that are to be away, also those that are already ...
    leaving: I64  # ... and those that are not yet
    coming: I64  # rows that are away and come back
    pages: I64  # entries that each leaving row keeps
    surplus: I64  # blocks that they give back
    outs: I64  # device blocks that move to the host, in order
    ins: I64  # places on the host that move to the device, in order


class Residency:
    """Of each block that several hold or that stayed on the device, the swapped-out sequences that hold it."""

    __slots__ = ("_holders", "away")

    def __init__(self) -> None:
        self.away = 0  # sequences that are swapped out
        self._holders: dict[int, list[int]] = {}  # place -> ids; a block on the host with one holder has no entry

    def check_on_device(self, s: Sequences, rows: I64) -> None:
        """FailedPrecondition SEQUENCE_SWAPPED_OUT if one of them is not."""
        if self.away and s.away[rows].any():
            sequence = int(s.id[rows[s.away[rows].nonzero()[0][0]]])
            raise FailedPrecondition(
                "SEQUENCE_SWAPPED_OUT", f"sequence {sequence} is on the host: swap it in first", sequence=sequence
            )

    def decide(self, s: Sequences, pool: BlockPool, size: int, out: I64, in_: I64) -> SwapPlan:
        """What it takes for rows `out` to be away and rows `in_` to be on the device. Changes nothing.

        Raises OutOfBlocks, or ResourceExhausted OUT_OF_HOST_SLOTS.
        """
        leaving = out[s.away[out] == 0]
        coming = in_[s.away[in_] > 0]
        pages = (s.computed[leaving] + (size - 1)) // size
        back = surplus(s, leaving, pages)
        kept = s.blocks[out]
        kept[s.away[out] == 0] = pages
        outs = self._movable(s, pool, out, kept, leaving, coming)
        entries = entries_of(s, coming, s.blocks[coming])
        ins = distinct(entries[entries >= pool.num_blocks])

        _check_room(s, pool, leaving, back, pages, outs, ins)
        return SwapPlan(out, leaving, coming, pages, back, outs, ins)

    def carry_out(self, plan: SwapPlan, s: Sequences, pool: BlockPool) -> tuple[BlockOps, I64]:
        """Moves the blocks, and points all tables at them. Returns the moves, and the rows whose tables changed."""
        shrunk = plan.leaving[s.blocks[plan.leaving] > plan.pages]
        give_back(s, pool, plan.leaving, plan.pages, plan.surplus)
        s.writable[plan.leaving] = s.computed[plan.leaving]
        old = np.concatenate((plan.outs, plan.ins))
        left = plan.outs.size
        if pool.accounts:
            pool.accounts.cross(plan.outs, plan.ins)
            pool.obey_quotas()
        new, ops = _claim(pool, plan.outs, plan.ins)
        pool.move(old, new)
        pool.cross(new[:left], pool.device, pool.host)
        pool.cross(new[left:], pool.host, pool.device)
        pool.counters.swapped_out_blocks += left
        pool.counters.swapped_in_blocks += plan.ins.size
        named = np.concatenate((plan.out, plan.coming, self._others(s, old)))
        changed = np.concatenate((shrunk, point(s, named, old, new)))
        moved = [
            (self._holders.pop(a), b) for a, b in zip(old.tolist(), new.tolist(), strict=True) if a in self._holders
        ]
        self._holders.update((place, ids) for ids, place in moved)
        s.away[plan.leaving] = 1
        s.away[plan.coming] = 0
        self.away += plan.leaving.size - plan.coming.size
        for row in plan.coming.tolist():
            self._forget(int(s.id[row]), s.tables.values(row, int(s.blocks[row])))
        for row in plan.leaving.tolist():
            entries = s.tables.values(row, int(s.blocks[row]))
            kept = (entries > 0) & ((entries < pool.num_blocks) | (pool.refcount[entries] > 1))
            for place in entries[kept].tolist():
                self._holders.setdefault(place, []).append(int(s.id[row]))
        return ops, np.unique(changed)

    def fork(self, s: Sequences, parent: int, children: I64) -> None:
        """Children of a swapped-out sequence, with the same blocks, are swapped out too."""
        s.away[children] = 1
        self.away += children.size
        ids = s.id[children].tolist()
        for place in entries_of(s, children[:1], s.blocks[children[:1]]).tolist():
            self._holders.setdefault(place, [int(s.id[parent])]).extend(ids)

    def release(self, s: Sequences, rows: I64, pages: I64) -> None:
        """Rows, of which some may be away, are about to give back their entries from pages[i] on."""
        for i in s.away[rows].nonzero()[0].tolist():
            row = int(rows[i])
            self._forget(int(s.id[row]), s.tables.values(row, int(s.blocks[row]))[int(pages[i]) :])

    def end(self, s: Sequences, rows: I64) -> None:
        """Rows that gave back all their blocks are not away any more."""
        self.away -= int(np.count_nonzero(s.away[rows]))
        s.away[rows] = 0

    def check(self, s: Sequences, pool: BlockPool) -> list[str]:
        """One sentence for each way in which residency and tables disagree."""
        wrong = []
        away = [row for row in s.alive().tolist() if s.away[row]]
        if len(away) != self.away:
            wrong.append(f"{len(away)} sequences are swapped out, {self.away} are counted")
        named: dict[int, list[int]] = {}
        for row in away:
            for place in entries_of(s, np.array([row]), s.blocks[[row]]).tolist():
                named.setdefault(place, []).append(int(s.id[row]))
        for place, ids in named.items():
            known = self._holders.get(place, ids if place >= pool.num_blocks and len(ids) == 1 else [])
            if sorted(known) != sorted(ids):
                wrong.append(f"place {place} is held by swapped-out sequences {ids}, known are {known}")
            if place >= pool.num_blocks and pool.refcount[place] != len(ids):
                wrong.append(f"host slot {place - pool.num_blocks} is also held by a sequence on the device")
        wrong += [
            f"place {place} is held by nobody that is swapped out" for place in self._holders.keys() - named.keys()
        ]
        if pool.num_host > SPARE_SLOTS + 1 and len(pool.host_allocator) < SPARE_SLOTS:
            wrong.append("the spare host slot is taken")
        return wrong

    def _movable(self, s: Sequences, pool: BlockPool, out: I64, kept: I64, leaving: I64, coming: I64) -> I64:
        """Device blocks of rows `out` that only swapped-out sequences hold once all is done, and no pin does."""
        named = entries_of(s, out, kept)
        entries = distinct(named[named < pool.num_blocks])
        entries = entries[pool.pinned[entries] == 0]
        refcount = pool.refcount[entries]
        shared = (refcount > 1).nonzero()[0]
        if not shared.size:
            return np.asarray(entries)
        back = set(s.id[coming].tolist())
        mine = entries_of(s, leaving, kept[s.away[out] == 0])
        going = dict(zip(*(values.tolist() for values in np.unique(mine, return_counts=True)), strict=True))
        stay = np.zeros(entries.size, bool)
        for i in shared.tolist():
            place = int(entries[i])
            held = sum(holder not in back for holder in self._holders.get(place, ()))
            stay[i] = held + going.get(place, 0) < refcount[i]
        movable: I64 = entries[~stay]
        return movable

    def _others(self, s: Sequences, old: I64) -> I64:
        """Rows of swapped-out sequences that share what moves, the named ones possibly among them."""
        ids = {holder for place in old.tolist() for holder in self._holders.get(place, ())}
        return np.array(sorted(s.row(holder) for holder in ids), np.int64)

    def _forget(self, sequence: int, entries: I32) -> None:
        """A sequence does not hold these any more, or is not swapped out any more."""
        for place in entries.tolist() if self._holders else ():
            ids = self._holders.get(place)
            if ids is None:
                continue
            ids.remove(sequence)
            if not ids:
                del self._holders[place]


def _check_room(s: Sequences, pool: BlockPool, leaving: I64, back: I64, pages: I64, outs: I64, ins: I64) -> None:
    """That both sides have room for what moves, once rows `leaving` gave `back` what lies behind their `pages`."""
    free = pool.host_room()
    short = max(0, outs.size - ins.size - free)
    accounts = pool.accounts
    if accounts:
        bill = accounts.bill(outs) - accounts.bill(ins)
        joint = accounts.bill_joint(outs) - accounts.bill_joint(ins)
        short = accounts.check_host(bill, joint, outs.size - ins.size, free)
    if short:
        raise ResourceExhausted(
            "OUT_OF_HOST_SLOTS",
            f"{outs.size} blocks are to move to the host, {outs.size - short} of its slots are free: swap fewer "
            "sequences out, or drop them, to compute them again",
            needed=outs.size,
            available=outs.size - short,
        )
    if accounts:
        given = np.bincount(s.tenant[leaving], s.blocks[leaving] - pages, len(accounts.caches)).astype(np.int64)
        accounts.check(-bill - given, ins.size - outs.size - back.size, pool.available(), ins.size, -joint)
    elif ins.size > (room := pool.available() + back.size + outs.size):
        raise OutOfBlocks(ins.size, room)


def _claim(pool: BlockPool, outs: I64, ins: I64) -> tuple[I64, BlockOps]:
    """Gives up all of `outs` and `ins`, and claims a place for each, in an order that can be carried out.

    Returns the new places of outs and then of ins, and the moves in the order decided.
    """
    out, in_ = 0, 0
    left: list[I64] = []
    came: list[I64] = []
    moves: list[tuple[OpKind, I64, I64]] = []
    while out < outs.size or in_ < ins.size:
        if count := min(outs.size - out, len(pool.host_allocator)):
            old, slots = outs[out : out + count], pool.host_allocator.allocate(count)
            pool.allocator.free(old)
            moves.append((OpKind.SWAP_OUT, old, slots))
            left.append(slots + pool.num_blocks)
            out += count
        if count := min(ins.size - in_, pool.available()):
            slots, blocks = ins[in_ : in_ + count] - pool.num_blocks, pool.claim(count)
            pool.host_allocator.free(slots)
            moves.append((OpKind.SWAP_IN, slots, blocks))
            came.append(blocks)
            in_ += count
    if not moves:
        return np.empty(0, np.int64), BlockOps()
    ops = BlockOps(
        np.concatenate([np.full(old.size, kind, np.uint8) for kind, old, _ in moves]),
        np.concatenate([old for _, old, _ in moves]).astype(np.int32),
        np.concatenate([new for _, _, new in moves]).astype(np.int32),
    )
    return np.concatenate(left + came), ops
