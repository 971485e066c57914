"""What can be asked of the page table and changes nothing: `PageTable` inherits it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from block_manager_svc.core.admission import Admission, judge
from block_manager_svc.core.arguments import Integers, column, integers, token_ids
from block_manager_svc.core.chain import find, find_own
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, Refused, SequenceNotFound
from block_manager_svc.core.extra_keys import ExtraKeys, by_place
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.residency import Residency
from block_manager_svc.core.results import BlockStates, Counters, Facts, Layout, Match, Sharing, Tables, TenantUsage
from block_manager_svc.core.retentions import Retentions
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I32, I64
from block_manager_svc.core.tail import slots
from block_manager_svc.core.windows import check_window, in_sight


class Reads:
    """Raises as PageTable's commands do."""

    __slots__ = (
        "_pool",
        "_residency",
        "_retentions",
        "_sequences",
        "block_size",
        "num_blocks",
        "revision",
        "watermark",
    )

    _pool: BlockPool
    _residency: Residency
    _retentions: Retentions
    _sequences: Sequences
    block_size: int
    num_blocks: int
    revision: int
    watermark: int

    @property
    def counters(self) -> Counters:
        return self._pool.counters

    def available(self, tenant: int = 0) -> int:
        """Blocks that a tenant can take: free, or cached and evictable, within its quota.

        Without what is reserved, above the limit, or needed to bring other tenants up to their floors.
        """
        return self._pool.room(tenant)

    def available_above_quota(self, tenant: int = 0) -> int:
        """As `available`, whatever the tenant's quota."""
        pool = self._pool
        return pool.accounts.room_above_quota(tenant, pool.available()) if pool.accounts else pool.available()

    def most(self, tenant: int = 0) -> int:
        """Blocks that a tenant can ever hold at once: within the limit, its quota, and what others are guaranteed."""
        return self._pool.most(tenant)

    def usage(self, tenant: int) -> TenantUsage:
        """What a tenant is charged for, and may be."""
        return self._pool.usage(tenant)

    @property
    def limit(self) -> int:
        """Blocks that may be in use, cached or reserved at once."""
        return self.num_blocks - 1 - self._pool.withheld

    def admission(
        self,
        tokens: Integers,
        lookahead: int = 0,
        namespace: bytes = b"",
        *,
        tenant: int = 0,
        extra: ExtraKeys | None = None,
        window: int = 0,
        sinks: int = 0,
    ) -> Admission:
        """Whether `begin` would let in one sequence of `tokens` (int32, at least one) now. Takes nothing."""
        pool, size = self._pool, self.block_size
        content = token_ids(tokens)
        if not content.size:
            raise InvalidArgument("NO_TOKENS", "a sequence has at least one token, 0 are given", tokens=0)
        check_window(window, sinks)
        keyed = by_place(extra, np.array([0]), np.array([content.size]))
        whole = (content.size - 1) // size * size
        _, blocks = find(pool, pool.index.root(namespace), content[:whole], keyed.get(0, ()))
        seen = in_sight(size, window, sinks, blocks)
        total = -(-(content.size + lookahead) // size)
        return judge(
            pool,
            tenant,
            seen[seen > 0],
            new=total - blocks.size,
            cached=blocks.size * size,
            watermark=self.watermark,
            promised=0,
        )

    def match(self, sequence: int) -> Match:
        """The longest prefix of the sequence's own tokens that the index finds: whole blocks, below its last token."""
        _, blocks = find_own(self._sequences, self._pool, self.block_size, self._sequences.row(sequence))
        idle = int(np.count_nonzero(self._pool.refcount[blocks] == 0))
        return Match(blocks.size * self.block_size, blocks.size, idle)

    def tokens(self, sequence: int) -> I32:
        """The tokens known of a sequence, a copy."""
        s = self._sequences
        row = s.row(sequence)
        return s.tokens.values(row, int(s.length[row])).copy()

    def token_range(self, sequences: Integers, first: Integers, upto: Integers) -> I32:
        """Tokens at positions [first[i], upto[i]) of each, one sequence after another."""
        s = self._sequences
        ids = integers(sequences, "sequences")
        begin, end = column(first, "first", ids.size), column(upto, "upto", ids.size)
        rows = s.rows(ids)
        length = s.length[rows]
        wrong = ((begin < 0) | (end < begin) | (end > length)).nonzero()[0]
        if wrong.size:
            sequence, start, stop, known = (int(values[wrong[0]]) for values in (ids, begin, end, length))
            raise InvalidArgument(
                "POSITION_OUT_OF_RANGE",
                f"positions {start} to {stop} of sequence {sequence}: it has {known} tokens",
                sequence=sequence,
                first=start,
                upto=stop,
                length=known,
            )
        return s.tokens.gather(rows, begin, end - begin)

    def length(self, sequences: Integers) -> I32:
        """Tokens known of each."""
        s = self._sequences
        return s.length[s.rows(integers(sequences, "sequences"))].astype(np.int32)

    def computed(self, sequences: Integers) -> I32:
        """Positions of each whose K/V are written."""
        s = self._sequences
        return s.computed[s.rows(integers(sequences, "sequences"))].astype(np.int32)

    def tables(self, sequences: Integers) -> Tables:
        """Block tables as CSR."""
        s = self._sequences
        rows = s.rows(integers(sequences, "sequences"))
        blocks = s.blocks[rows]
        indptr = np.zeros(rows.size + 1, np.int32)
        indptr[1:] = blocks.cumsum()
        indices = s.tables.gather(rows, np.zeros_like(blocks), blocks)
        last = s.writable[rows] - (blocks - 1) * self.block_size
        last = np.where(blocks > 0, np.clip(last, 0, self.block_size), 0).astype(np.int32)
        return Tables(indptr, indices, last, self._pool.refcount[indices], s.changed[rows])

    @property
    def next_sequence(self) -> int:
        """No id from here on was given out."""
        return self._sequences.next

    def sequences(self, *, owner: int | None = None) -> I64:
        """Ids that are alive, in order of creation. owner: only those that are its."""
        s = self._sequences
        rows = s.alive()
        return s.id[rows if owner is None else rows[s.owner[rows] == owner]]

    def owners(self, sequences: Integers) -> I64:
        """Whose each is."""
        s = self._sequences
        return s.owner[s.rows(integers(sequences, "sequences"))]

    def alive(self, sequences: Integers) -> NDArray[np.bool_]:
        """Whether each of these ids, given out by this page table, is alive."""
        return self._sequences.holds(integers(sequences, "sequences"))

    def changed(self, sequences: Integers) -> I64:
        """The revision at which the entries of each table last changed."""
        s = self._sequences
        return s.changed[s.rows(integers(sequences, "sequences"))]

    def check_revisions(self, sequences: Integers, revisions: Integers) -> None:
        """FailedPrecondition TABLE_REVISION_STALE for the first whose table has not last changed at revisions[i]."""
        ids = integers(sequences, "sequences")
        expected = column(revisions, "revisions", ids.size)
        changed = self._sequences.changed[self._sequences.rows(ids)]
        if (stale := (changed != expected).nonzero()[0]).size:
            sequence, told, last = (int(values[stale[0]]) for values in (ids, expected, changed))
            raise FailedPrecondition(
                "TABLE_REVISION_STALE",
                f"the table of sequence {sequence} last changed at revision {last}, expected is {told}: read it again",
                sequence=sequence,
                expected=told,
                revision=last,
            )

    def slots(self, sequences: Integers, first: Integers, upto: Integers) -> tuple[I64, I64]:
        """block * block_size + offset of positions [first[i], upto[i]) of each, as CSR: indptr, slots.

        InvalidArgument POSITION_NOT_WRITABLE: there are no slots for some. FailedPrecondition SEQUENCE_SWAPPED_OUT, or
        WINDOW_PASSED: blocks of some were given up.
        """
        s, size = self._sequences, self.block_size
        ids = integers(sequences, "sequences")
        begin, end = column(first, "first", ids.size), column(upto, "upto", ids.size)
        rows = s.rows(ids)
        self._residency.check_on_device(s, rows)
        writable = s.writable[rows]
        wrong = ((begin < 0) | (end < begin) | (end > writable)).nonzero()[0]
        if wrong.size:
            sequence, start, stop, there = (int(values[wrong[0]]) for values in (ids, begin, end, writable))
            raise InvalidArgument(
                "POSITION_NOT_WRITABLE",
                f"slots of positions {start} to {stop} of sequence {sequence}: it has {there}",
                sequence=sequence,
                first=start,
                upto=stop,
                limit=there,
            )
        indptr = np.zeros(ids.size + 1, np.int64)
        np.cumsum(end - begin, out=indptr[1:])
        found = slots(s, size, rows, begin, end)
        if s.windowed and (null := (found < size).nonzero()[0]).size:
            i = int(indptr.searchsorted(null[0], "right")) - 1
            sequence, position = int(ids[i]), int(begin[i] + null[0] - indptr[i])
            raise FailedPrecondition(
                "WINDOW_PASSED",
                f"position {position} of sequence {sequence} is out of sight, and its block was given up",
                sequence=sequence,
                length=position,
                least=int(s.gone[rows[i]]) * size,
            )
        return indptr, found

    def facts(self, sequence: int) -> Facts:
        """What is known of one sequence."""
        s = self._sequences
        row = s.row(sequence)
        entries = s.tables.values(row, int(s.blocks[row])).astype(np.int64)
        return Facts(
            tokens=int(s.length[row]),
            computed=int(s.computed[row]),
            writable=int(s.writable[row]),
            blocks=int(np.count_nonzero(entries)),
            shared_blocks=int(np.count_nonzero(self._pool.refcount[entries] > 1)),
            host_blocks=int(np.count_nonzero(entries >= self.num_blocks)),
            swapped_out=bool(s.away[row]),
            table_revision=int(s.changed[row]),
            priority=self._retentions.priority(sequence),
        )

    def check_owner(self, sequences: Integers, owner: int) -> None:
        """SequenceNotFound for the first that is not alive, or not `owner`'s: others' are none of its business."""
        s = self._sequences
        ids = integers(sequences, "sequences")
        try:
            others = s.owner[s.rows(ids)] != owner
        except Refused:
            # Before all else that may be wrong: nothing tells another's sequence from one that never was.
            others = ~self.owned(ids, owner)
            if not others.any():
                raise
        if b"\1" in others.tobytes():
            raise SequenceNotFound(int(ids[others.nonzero()[0][0]])) from None

    def owned(self, sequences: Integers, owner: int) -> NDArray[np.bool_]:
        """Whether each of these numbers is a sequence that is alive, and `owner`'s."""
        return self._sequences.owned(integers(sequences, "sequences"), owner)

    def states(self) -> BlockStates:
        return self._pool.states()

    def host_states(self) -> BlockStates:
        """As `states`, of the host's slots. Nothing is cached there."""
        return self._pool.host_states()

    def layout(self) -> Layout:
        """Where the device's free blocks lie. Costs time proportional to the pool."""
        free = self._pool.allocator.free_blocks()
        starts = np.flatnonzero(np.diff(free, prepend=-1) > 1)
        runs = np.diff(starts, append=free.size)
        # The free blocks above the last that is used are the last run, if they reach the pool's end.
        top = free.size > 0 and int(free[-1]) == self.num_blocks - 1
        highest = int(free[starts[-1]]) - 1 if top else self.num_blocks - 1
        return Layout(starts.size, int(runs.max(initial=0)), highest)

    def sharing(self) -> Sharing:
        return self._pool.sharing()
