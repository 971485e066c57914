"""How sequences come to be: created, begun with all their blocks, forked. `PageTable` inherits it."""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.admission import Verdict, judge, refusal
from block_manager_svc.core.arguments import Integers, check_length, count_column, integers, token_ids
from block_manager_svc.core.chain import find, find_own
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument
from block_manager_svc.core.eviction.retention import Retention
from block_manager_svc.core.extension import carry_out, decide
from block_manager_svc.core.extra_keys import ExtraKeys, by_place
from block_manager_svc.core.promises import Promises
from block_manager_svc.core.results import Begun
from block_manager_svc.core.step import I64
from block_manager_svc.core.tail import check_slots, slots
from block_manager_svc.core.windows import check_window, in_sight, set_window


class Beginnings(Promises):
    """Raises as PageTable's commands do."""

    __slots__ = ()

    def create(
        self,
        tokens: Integers,
        namespace: bytes = b"",
        *,
        owner: int = 0,
        tenant: int = 0,
        retention: Retention | None = None,
        extra: ExtraKeys | None = None,
        window: int = 0,
        sinks: int = 0,
    ) -> int:
        """A new sequence of `tokens` (at least one, int32). It takes no block. Returns its id, never used again.

        owner: whose it is, for `check_owner`. tenant: who is charged for its blocks. retention: of the blocks that it
        seals, finds or has moved; without one it leaves these as they are. extra: its extra keys, at place 0.
        window, sinks: positions that each position sees, itself among them (0: all), and those that all see; blocks out
        of sight are given up as soon as `commit` makes them so. Children of a fork have all as their parent.
        """
        content = token_ids(tokens)
        if not content.size:
            raise InvalidArgument("NO_TOKENS", "a sequence has at least one token, 0 are given", tokens=0)
        keyed = by_place(extra, np.array([0]), np.array([content.size]))
        check_window(window, sinks)
        self._check_tenant(tenant)
        s = self._sequences
        sequence = s.add()
        row = s.row(sequence)
        s.tokens.open(row, content)
        s.length[row] = content.size
        s.root[row] = s.node[row] = self._pool.index.root(namespace)
        s.owner[row], s.tenant[row] = owner, tenant
        set_window(s, np.array([row]), window, sinks)
        self._retentions.begin(np.array([sequence]), retention)
        if keyed:
            s.extra[sequence] = keyed[0]
        self.revision += 1
        s.mark(row, self.revision)
        return sequence

    def begin(
        self,
        counts: Integers,
        tokens: Integers,
        lookahead: Integers,
        namespace: bytes = b"",
        *,
        owner: int = 0,
        tenant: int = 0,
        reservation: int = 0,
        retention: Retention | None = None,
        extra: ExtraKeys | None = None,
        window: int = 0,
        sinks: int = 0,
        most: int | None = None,
    ) -> Begun:
        """New sequences, counts[i] of `tokens` (int32) each, with all their blocks: `create`, `reuse`, `grow` in one.

        Blocks that the index finds are referenced, and not evicted for the others; one sequence does not find what
        another of the same call is still to write. All or nothing, as `admission` judges: OutOfBlocks for LATER,
        ResourceExhausted NEVER_FITS for NEVER. reservation, most: as in `grow`.
        """
        count = integers(counts, "counts")
        count = count_column(count, "counts", count.size)
        ahead = count_column(lookahead, "lookahead", count.size)
        content = token_ids(tokens)
        check_length(content, "tokens", int(count.sum()), "that the counts add up to")
        if (count == 0).any():
            raise InvalidArgument("NO_TOKENS", "a sequence has at least one token, 0 are given", tokens=0)
        keyed = by_place(extra, np.zeros_like(count), count)
        check_window(window, sinks)
        self._check_tenant(tenant)
        s, pool, size = self._sequences, self._pool, self.block_size
        root = pool.index.root(namespace)
        end = count.cumsum()
        prompts = [content[e - n : e] for e, n in zip(end.tolist(), count.tolist(), strict=True)]
        found = [
            find(pool, root, prompt[: (prompt.size - 1) // size * size], keyed.get(i, ()))
            for i, prompt in enumerate(prompts)
        ]
        blocks = np.array([hits.size for _, hits in found], np.int64)
        cached, upto = blocks * size, count + ahead
        check_slots(int((upto - cached).sum()), most)
        seen = [in_sight(size, window, sinks, hits) for _, hits in found]
        distinct = np.unique(np.concatenate([hits[hits > 0] for hits in seen])) if seen else blocks
        new = int(((upto + (size - 1)) // size - blocks).sum())
        promised = self._promised(reservation, owner, tenant)
        admission = judge(
            pool,
            tenant,
            distinct,
            new=new,
            cached=int(cached.sum()),
            watermark=self.watermark,
            promised=promised,
        )
        if admission.verdict != Verdict.OK:
            raise refusal(pool, tenant, admission)
        self._draw(reservation, promised, new)
        ids = np.array([s.add() for _ in prompts], np.int64)
        rows = s.rows(ids)
        for row, prompt, (node, _), hits in zip(rows.tolist(), prompts, found, seen, strict=True):
            s.tokens.open(row, prompt)
            s.node[row] = node
            if hits.size:
                pool.share(hits[hits > 0], tenant)
                s.tables.open(row, hits)
        pool.obey_quotas()
        s.length[rows], s.computed[rows], s.writable[rows], s.blocks[rows] = count, cached, upto, blocks
        s.root[rows], s.owner[rows], s.tenant[rows] = root, owner, tenant
        set_window(s, rows, window, sinks)
        if window:
            s.gone[rows] = np.maximum((cached + 1 - window) // size, 0)
        self._retentions.begin(ids, retention)
        for place, keys in keyed.items():
            s.extra[int(ids[place])] = keys
        self._retentions.apply(s, pool, rows, np.zeros_like(blocks), blocks)
        extended = carry_out(decide(s, pool, size, rows, cached, upto), s, pool)
        pool.note_peaks()
        self.revision += 1
        s.mark(rows, self.revision)
        indptr = np.zeros(ids.size + 1, np.int64)
        np.cumsum(upto - cached, out=indptr[1:])
        return Begun(ids, cached, indptr, slots(s, size, rows, cached, upto), extended.ops())

    def reuse(self, sequence: int) -> int:
        """References what `match` finds and counts it as computed. Returns the tokens that are computed now.

        OutOfBlocks, or ResourceExhausted QUOTA_EXCEEDED, where there are several tenants.
        FailedPrecondition TABLE_NOT_EMPTY: only a sequence without blocks can begin with others'.
        """
        s = self._sequences
        row = s.row(sequence)
        if s.blocks[row]:
            raise FailedPrecondition(
                "TABLE_NOT_EMPTY",
                f"sequence {sequence} has {s.blocks[row]} blocks: drop it first",
                sequence=sequence,
                blocks=int(s.blocks[row]),
            )
        self._residency.check_on_device(s, np.array([row]))
        node, found = find_own(s, self._pool, self.block_size, row)
        blocks = in_sight(self.block_size, int(s.window[row]), int(s.sinks[row]), found)
        if blocks.size:
            tenant = int(s.tenant[row])
            held = blocks[blocks > 0]
            self._check_found(held, tenant)
            self._pool.share(held, tenant)
            self._pool.obey_quotas()
            self._pool.note_peaks()
            s.tables.open(row, blocks)
            self._retentions.apply(s, self._pool, np.array([row]), np.array([0]), np.array([blocks.size]))
            s.blocks[row] = blocks.size
            s.computed[row] = s.writable[row] = blocks.size * self.block_size
            if s.window[row]:
                s.gone[row] = max(0, (s.computed[row] + 1 - s.window[row]) // self.block_size)
            s.node[row] = node
        self.revision += 1
        if blocks.size:
            s.mark(row, self.revision)
        return int(s.computed[row])

    def fork(self, sequence: int, count: int = 1) -> I64:
        """`count` new sequences with the same tokens, computed positions, and the blocks that hold these.

        Takes no block, copies nothing. What the parent may have in flight, its lookahead included, stays its own.
        """
        s = self._sequences
        parent = s.row(sequence)
        if count < 1:
            raise InvalidArgument("COUNT_OUT_OF_RANGE", f"{count} children: at least 1", count=count)
        children = np.array([s.add() for _ in range(count)], np.int64)
        parent, rows = s.row(sequence), s.rows(children)
        length, blocks = int(s.length[parent]), -(-int(s.computed[parent]) // self.block_size)
        entries = s.tables.values(parent, blocks).copy()
        tokens = s.tokens.values(parent, length).copy()
        for row in rows.tolist():
            s.tokens.open(row, tokens)
            if blocks:
                s.tables.open(row, entries)
        for name in ("length", "computed", "node", "root", "owner", "tenant", "window", "sinks", "gone"):
            values = getattr(s, name)
            values[rows] = values[parent]
        s.blocks[rows] = blocks
        s.writable[rows] = s.computed[parent]
        self._retentions.fork(sequence, children)
        if (keyed := s.extra.get(sequence)) is not None:
            s.extra.update(dict.fromkeys(children.tolist(), keyed))
        if s.window[parent]:
            s.windowed += count
            entries = entries[entries > 0]
        self._pool.share(entries.astype(np.int64), int(s.tenant[parent]), count)
        if s.away[parent]:
            self._residency.fork(s, parent, rows)
        self._pool.note_peaks()
        self.revision += 1
        s.mark(rows, self.revision)
        return children

    def _check_found(self, blocks: I64, tenant: int) -> None:
        """That a tenant may take blocks that it has found."""
        pool = self._pool
        if pool.accounts:
            change, needed = pool.change(blocks, tenant), pool.to_take(blocks, tenant)
            idle, joint = int(np.count_nonzero(pool.is_evictable(blocks))), pool.join(blocks, tenant)
            pool.accounts.check(change, idle, pool.available(), needed, joint)
