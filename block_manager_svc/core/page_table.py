"""The page table: who owns which blocks, and which block holds which tokens.

One writer, no clock, no I/O, no randomness: the same commands give the same state, bit for bit. Every refusal is raised
before anything was changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from block_manager_svc.core.arguments import Integers, check_length, column, count_column, integers, token_ids
from block_manager_svc.core.audit import audit
from block_manager_svc.core.beginnings import Beginnings
from block_manager_svc.core.chain import canonical, node_at, seal
from block_manager_svc.core.compaction import compact
from block_manager_svc.core.errors import InvalidArgument, OutOfBlocks, ResourceExhausted
from block_manager_svc.core.events import EventLog, HashBlock, chained_sha256
from block_manager_svc.core.eviction import POLICIES, EvictionName
from block_manager_svc.core.extension import Plan, carry_out, decide
from block_manager_svc.core.extra_keys import ExtraKeys, by_place
from block_manager_svc.core.folding import fold
from block_manager_svc.core.geometry import check_pool
from block_manager_svc.core.pins import Pins
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.promises import reservations
from block_manager_svc.core.ragged import ranges
from block_manager_svc.core.residency import Residency
from block_manager_svc.core.results import (
    Extended,
    Grown,
    Moved,
)
from block_manager_svc.core.retentions import Retentions
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I32, I64
from block_manager_svc.core.tail import check_slots, give_back, slots, surplus
from block_manager_svc.core.windows import check_in_sight, give_up

_NONE = np.empty(0, np.int64)


class PageTable(Beginnings):
    """Sequences over a pool of `num_blocks` blocks of `block_size` tokens; block 0 is the null block, never handed out.

    Commands over a batch take `sequences` (int64, distinct) with one value for each, and run in that order.
    Raises SequenceNotFound for an id that is not alive, InvalidArgument for values that cannot be.
    """

    __slots__ = ("_folding", "_plan_key", "_planned")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host: int = 0,
        first_sequence: int = 1,
        eviction: EvictionName = "lru",
        watermark: int = 0,
        zero_crossing: bool = True,
        folding: bool = False,
    ) -> None:
        """num_host: slots of the host pool. Two of them hold nothing at rest: slot 0, and one that exchanges need.

        first_sequence: the lowest id to give; a predecessor's `next_sequence` keeps ids unique across both.

        eviction: which cached block goes first, one of `eviction.POLICIES`.
        watermark: blocks that `begin` leaves to the sequences that are here, see `admission`.
        folding: a block that doubles a canonical one gives way to it, see `folding`.
        zero_crossing: a block that another tenant wrote is zeroed, by a block op, before it is given out.
        """
        check_pool(num_blocks, num_host, block_size, watermark, eviction)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._folding = folding
        self.watermark = watermark
        self.revision = 0  # commands executed
        self.now = 0  # ms, as `advance` was told
        self._sequences = Sequences(first=first_sequence)
        self._pool = BlockPool(num_blocks, num_host, block_size, POLICIES[eviction], zero_crossing=zero_crossing)
        self._pins = Pins()
        self._reservations = reservations()
        self._residency = Residency()
        self._retentions = Retentions()
        # The last plan, good for the same arguments until the next command: `blocks_needed` is mostly asked before.
        self._plan_key: tuple[int, bytes, bytes] | None = None
        self._planned: Plan | None = None

    def blocks_needed(self, sequences: Integers, upto: Integers) -> I32:
        """Blocks that `extend` would take for each, in this order: new ones, and copies of shared ones."""
        ids = integers(sequences, "sequences")
        return self._plan(ids, column(upto, "upto", ids.size)).needed.astype(np.int32)

    def crowded(self, sequences: Integers, upto: Integers) -> frozenset[int]:
        """Empty if `extend` would find its blocks; else tenants of which one must give way first.

        That is who exceeds its quota; or else all that would use more than they are guaranteed.
        """
        ids = integers(sequences, "sequences")
        plan = self._plan(ids, column(upto, "upto", ids.size))
        try:
            self._check_room(plan)
        except ResourceExhausted:
            accounts, who = self._pool.accounts, self._sequences.tenant[plan.rows]
            if accounts is None:
                return frozenset([0])
            change = np.bincount(who, plan.needed, len(accounts.caches)).astype(np.int64)
            asking = frozenset(who.tolist())
            return accounts.to_give_way(change) & asking or asking
        return frozenset()

    def extend(self, sequences: Integers, upto: Integers) -> Extended:
        """Makes positions [computed, upto) of each writable: grows its table, and copies shared blocks in that range.

        A block is copied exactly if its refcount is above 1 when its turn comes; so the last of its holders writes in
        place. All or nothing: OutOfBlocks if free and evictable blocks together fall short.
        """
        ids = integers(sequences, "sequences")
        to = column(upto, "upto", ids.size)
        plan = self._plan(ids, to)
        self._check_room(plan)
        s = self._sequences
        s.writable[plan.rows] = np.maximum(s.writable[plan.rows], to)
        extended = carry_out(plan, s, self._pool)
        self._pool.note_peaks()
        self.revision += 1
        s.mark(plan.rows[extended.delta_sequence], self.revision)
        return extended

    def append(self, sequences: Integers, tokens: Integers) -> None:
        """One more token of content for each, in a slot that `extend` is still to make."""
        s = self._sequences
        ids = integers(sequences, "sequences")
        content = token_ids(tokens)
        check_length(content, "tokens", ids.size)
        rows = s.rows(ids)
        length = s.length[rows]
        longer = length + 1
        s.tokens.reserve(rows, length, longer)
        s.tokens.data[s.tokens.start[rows] + length] = content
        s.length[rows] = longer
        self.revision += 1

    def grow(
        self,
        sequences: Integers,
        counts: Integers | None,
        tokens: Integers,
        lookahead: Integers | None,
        *,
        reservation: int = 0,
        owner: int = 0,
        most: int | None = None,
        extra: ExtraKeys | None = None,
    ) -> Grown:
        """Adds counts[i] of `tokens` to each, and makes all that is not computed and lookahead[i] slots more writable.

        counts, lookahead: None is one for each, and none, as in a decode step.
        tokens: int32, those of one sequence after those of another. Afterwards a table has the blocks for
        length + lookahead positions, neither more nor less: what an earlier lookahead did not use comes back.
        Copies as `extend` does. All or nothing: OutOfBlocks if free and evictable blocks and those that come back
        together fall short. reservation: `owner`'s, that is drawn from first; 0: none. most: slots in the answer, or
        InvalidArgument TOO_MANY_SLOTS. extra: extra keys of the new tokens.
        """
        ids = integers(sequences, "sequences")
        count = 1 if counts is None else count_column(counts, "counts", ids.size)
        ahead = 0 if lookahead is None else count_column(lookahead, "lookahead", ids.size)
        content = token_ids(tokens)
        added = ids.size if counts is None else int(np.add.reduce(count))
        check_length(content, "tokens", added, "that the counts add up to")
        s, size = self._sequences, self.block_size
        rows = s.rows(ids)
        self._residency.check_on_device(s, rows)
        length = s.length[rows]
        longer = length + count
        keyed = by_place(extra, length, longer) if extra else None
        upto = longer if lookahead is None else longer + ahead
        first = np.minimum(length, s.writable[rows])
        indptr = np.zeros(ids.size + 1, np.int64)
        np.cumsum(upto - first, out=indptr[1:])
        check_slots(int(indptr[-1]), most)
        plan = decide(s, self._pool, size, rows, s.computed[rows], upto)
        shrinks = plan.blocks > plan.pages
        back = surplus(s, rows, plan.pages) if b"\1" in shrinks.tobytes() else _NONE
        promised = self._promised(reservation, owner, *s.tenant[rows].tolist()) if reservation else 0
        self._check_room(plan, back.size, promised)
        self._draw(reservation, promised, plan.total)
        give_back(s, self._pool, rows, plan.pages, back)
        if added:
            s.tokens.reserve(rows, length, longer)
            at = s.tokens.start[rows] + length
            s.tokens.data[at if isinstance(count, int) else ranges(at, count)] = content
            s.length[rows] = longer
        if keyed:
            for place, keys in keyed.items():
                sequence = int(ids[place])
                s.extra[sequence] = s.extra.get(sequence, ()) + keys
        s.writable[rows] = upto
        extended = carry_out(plan, s, self._pool)
        self._pool.note_peaks()
        self.revision += 1
        if extended.delta_sequence.size:
            s.mark(rows[extended.delta_sequence], self.revision)
        if back.size:
            s.mark(rows[shrinks], self.revision)
        return Grown(extended, indptr, slots(s, size, rows, first, upto))

    def truncate(self, sequences: Integers, lengths: Integers) -> None:
        """Forgets the tokens from position lengths[i] on (rejected drafts), and gives back the blocks behind.

        What was computed below stays. A block that is sealed and only partly kept can be found until it is written.
        InvalidArgument LENGTH_OUT_OF_RANGE: not within 1 and the tokens that are known.
        FailedPrecondition WINDOW_PASSED: what its window would reach then was given up.
        """
        s, size = self._sequences, self.block_size
        ids = integers(sequences, "sequences")
        to = column(lengths, "lengths", ids.size)
        rows = s.rows(ids)
        length = s.length[rows]
        wrong = ((to < 1) | (to > length)).nonzero()[0]
        if wrong.size:
            sequence, asked, known = (int(values[wrong[0]]) for values in (ids, to, length))
            raise InvalidArgument(
                "LENGTH_OUT_OF_RANGE",
                f"sequence {sequence} cut to {asked} tokens: at least 1, at most the {known} that it has",
                sequence=sequence,
                asked=asked,
                length=known,
            )
        if s.windowed:
            check_in_sight(s, size, rows, to)
            s.gone[rows] = np.minimum(s.gone[rows], (to + (size - 1)) // size)
        computed = s.computed[rows]
        kept = np.minimum(computed, to)
        pages = (to + (size - 1)) // size
        shorter = rows[kept // size < computed // size]
        if s.extra:
            s.cut_extra(ids, to)
        s.length[rows] = to
        s.computed[rows] = kept
        s.writable[rows] = np.minimum(s.writable[rows], to)
        for row in shorter.tolist():
            s.node[row] = node_at(s, self._pool, size, row, int(s.computed[row]) // size)
        shorter = rows[s.blocks[rows] > pages]
        if self._residency.away:
            self._residency.release(s, rows, pages)
        give_back(s, self._pool, rows, pages, surplus(s, rows, pages))
        self.revision += 1
        s.mark(shorter, self.revision)

    def commit(self, sequences: Integers, upto: Integers) -> I64:
        """K/V of positions < upto[i] are written. Blocks that are full by it are sealed and can be found by others.

        Returns the sequences whose tables changed by it: of a sequence with a window, what no position from upto[i] on
        sees is given up; with `folding`, doubles of canonical blocks give way to these.

        InvalidArgument UPTO_NOT_WRITABLE: upto lies beyond the tokens known, or beyond what `extend` or `grow` made
        writable.
        """
        s = self._sequences
        ids = integers(sequences, "sequences")
        to = column(upto, "upto", ids.size)
        rows = s.rows(ids)
        self._residency.check_on_device(s, rows)
        computed = s.computed[rows]
        limit = np.minimum(s.writable[rows], s.length[rows])
        self._check_upto(ids, to, computed, limit, "UPTO_NOT_WRITABLE", "positions are known and writable")
        full = to // self.block_size
        before = computed // self.block_size
        crossing = (full != before).nonzero()[0]
        changed = _NONE
        if crossing.size:
            sealing = rows[crossing], before[crossing], full[crossing] - before[crossing]
            parents = seal(s, self._pool, self.block_size, *sealing)
            if self._folding:
                changed = self._fold(parents, *sealing)
            self._retentions.apply(s, self._pool, *sealing)
        s.computed[rows] = to
        self.revision += 1
        if s.windowed:
            changed = np.union1d(changed, give_up(s, self._pool, self.block_size, rows, to))
        if changed.size:
            self._pool.note_peaks()
            s.mark(changed, self.revision)
        return s.id[changed]

    def drop(self, sequences: Integers) -> None:
        """Preemption by recomputation: gives all blocks back and keeps the tokens; nothing is computed any more."""
        s = self._sequences
        rows = s.rows(integers(sequences, "sequences"))
        self._release(rows)
        s.tables.close(rows)
        for values in (s.blocks, s.computed, s.writable, s.gone):
            values[rows] = 0
        s.node[rows] = s.root[rows]
        self.revision += 1
        s.mark(rows, self.revision)

    def free(self, sequences: Integers) -> None:
        """Ends sequences and gives their blocks back; what is sealed stays findable until its space is needed."""
        s = self._sequences
        ids = integers(sequences, "sequences")
        rows = s.rows(ids)
        self._release(rows)
        s.remove(rows)
        self._retentions.end(ids)
        self.revision += 1

    def swap(self, out: Integers, in_: Integers) -> Moved:
        """Sequences of `out` leave the device for the host, and those of `in_` come back. All or nothing.

        A block that several share moves once, for all of them; one that a sequence on the device or a pin needs stays
        there, and another swap of its holder moves it when nothing needs it any more. A swapped-out sequence keeps what
        is computed, and can be forked, truncated, dropped and freed; it is not written before it is back.
        OutOfBlocks: free and evictable blocks, and those that leave now, fall short. ResourceExhausted
        OUT_OF_HOST_SLOTS: the host does.
        """
        s = self._sequences
        leaving, coming = integers(out, "out"), integers(in_, "in_")
        rows = s.rows(np.concatenate((leaving, coming)))
        plan = self._residency.decide(s, self._pool, self.block_size, rows[: leaving.size], rows[leaving.size :])
        ops, changed = self._residency.carry_out(plan, s, self._pool)
        self._pool.note_peaks()
        self.revision += 1
        s.mark(changed, self.revision)
        blocks = s.blocks[plan.coming]
        self._retentions.apply(s, self._pool, plan.coming, np.zeros_like(blocks), blocks)
        return Moved(ops, np.sort(s.id[changed]))

    def compact(self, sequences: Integers, most: int) -> Moved:
        """Moves at most `most` blocks of `sequences`, the highest first, into the lowest free ones.

        Blocks that others hold too stay where they are, and so do sequences that are swapped out. Repeated until
        nothing moves, it leaves what it may move as low as it can lie.
        """
        s = self._sequences
        rows = s.rows(integers(sequences, "sequences"))
        ops, changed = compact(s, self._pool, self._pins, rows[s.away[rows] == 0], most)
        changed = changed[s.id[changed].argsort()]
        blocks = s.blocks[changed]
        self._retentions.apply(s, self._pool, changed, np.zeros_like(blocks), blocks)
        self.revision += 1
        s.mark(changed, self.revision)
        return Moved(ops, s.id[changed])

    def watch(self, wake: Callable[[], object], hash_block: HashBlock = chained_sha256) -> EventLog:
        """Records events from now on; the log knows already what is stored. `wake`: see EventLog.

        Costs time proportional to what is in the index.
        """
        log = EventLog(wake, hash_block)
        self._pool.index.watch(log)
        log.drain()
        self._sequences.events = log
        return log

    def unwatch(self) -> None:
        """Records nothing any more."""
        self._pool.index.events = self._sequences.events = None

    def check(self) -> list[str]:
        """Every invariant over the whole table: one sentence, with its numbers, for each that does not hold."""
        reserved = sum(reserved.blocks for reserved in self._reservations.values())
        return audit(self._sequences, self._pool, self._pins, reserved, self._residency, self.block_size)

    def _check_room(self, plan: Plan, back: int = 0, promised: int = 0) -> None:
        """That a plan finds its blocks: `back` come back by it before, `promised` may be drawn from a reservation."""
        pool, s = self._pool, self._sequences
        accounts = pool.accounts
        if accounts is None:
            if plan.total > (room := pool.available() + back + promised):
                raise OutOfBlocks(plan.total, room)
            return
        who = s.tenant[plan.rows]
        more = plan.needed - np.maximum(plan.blocks - plan.pages, 0) if back else plan.needed
        change = np.bincount(who, more, len(accounts.caches)).astype(np.int64)
        drawn = min(promised, plan.total)
        if drawn:
            change[who[0]] -= drawn
        accounts.check(change, plan.total - back - drawn, pool.available(), plan.total)

    def _check_upto(self, ids: I64, upto: I64, computed: I64, limit: I64, beyond: str, what: str) -> None:
        wrong = (upto < computed) | (upto > limit)
        if b"\1" not in wrong.tobytes():
            return
        i = int(wrong.nonzero()[0][0])
        sequence, to, done, most = int(ids[i]), int(upto[i]), int(computed[i]), int(limit[i])
        if to < done:
            raise InvalidArgument(
                "UPTO_BELOW_COMPUTED",
                f"upto {to} of sequence {sequence} lies below the {done} positions that are computed",
                sequence=sequence,
                upto=to,
                computed=done,
            )
        raise InvalidArgument(
            beyond, f"upto {to} of sequence {sequence}: only {most} {what}", sequence=sequence, upto=to, limit=most
        )

    def _plan(self, ids: I64, upto: I64) -> Plan:
        key = (self.revision, ids.tobytes(), upto.tobytes())
        if self._planned is None or self._plan_key != key:
            s = self._sequences
            rows = s.rows(ids)
            self._residency.check_on_device(s, rows)
            computed = s.computed[rows]
            self._check_upto(ids, upto, computed, s.length[rows], "UPTO_BEYOND_LENGTH", "tokens are known")
            self._planned = decide(s, self._pool, self.block_size, rows, computed, upto)
            self._plan_key = key
        return self._planned

    def _fold(self, parents: list[int], rows: I64, first: I64, count: I64) -> I64:
        s, pool = self._sequences, self._pool
        sealed = zip(rows.tolist(), parents, first.tolist(), count.tolist(), strict=True)
        paths = [canonical(s, pool, self.block_size, *each) for each in sealed]
        return fold(s, pool, rows, parents, paths, first)

    def _release(self, rows: I64) -> None:
        s = self._sequences
        if self._residency.away:
            self._residency.release(s, rows, np.zeros_like(rows))
            self._residency.end(s, rows)
        blocks = s.blocks[rows]
        # Tail before head: a block that is found only behind another goes before that other.
        tables = [s.tables.values(row, n)[::-1] for row, n in zip(rows.tolist(), blocks.tolist(), strict=True)]
        if not tables:
            return
        held, who = np.concatenate(tables).astype(np.int64), np.repeat(s.tenant[rows], blocks)
        if s.windowed:
            held, who = held[held > 0], who[held > 0]
        if len(tables) == 1:
            self._pool.release(held, who)
        else:
            self._pool.release_repeated(held, who)
