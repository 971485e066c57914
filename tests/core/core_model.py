"""The page table again, as slow and as obvious as can be: dictionaries, lists, one block at a time.

Also a device: each slot holds what was last written to it, so that what a sequence reads back is seen, not argued.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from core_model_accounts import ModelAccounts, ModelQuota

from block_manager_svc.core import Extended, PageTable, Retention
from block_manager_svc.core.admission import Verdict
from block_manager_svc.core.extra_keys import ExtraKeys
from block_manager_svc.core.step import BlockOps, OpKind

GARBAGE = -1  # in a slot that nothing is read from any more

# A token, and the extra key of its position if it has one: they are one thing here.
Token = int | tuple[int, bytes]


def plain(tokens: Iterable[Token]) -> list[int]:
    return [token if isinstance(token, int) else token[0] for token in tokens]


def keys_of(*new: list[Token], first: list[int] | None = None) -> ExtraKeys | None:
    """Columns of the extra keys of new tokens, those of sequence i from position first[i] on."""
    found = [
        (place, position, token[1])
        for place, (tokens, start) in enumerate(zip(new, first or [0] * len(new), strict=True))
        for position, token in enumerate(tokens, start)
        if not isinstance(token, int)
    ]
    if not found:
        return None
    of, positions, keys = zip(*found, strict=True)
    return ExtraKeys(np.array(of, np.int64), np.array(positions, np.int64), keys)


@dataclass
class ModelSequence:
    tokens: list[Token]
    namespace: bytes
    computed: int = 0
    writable: int = 0
    table: list[int] = field(default_factory=list)
    away: bool = False  # swapped out
    tenant: int = 0
    window: int = 0  # positions that each sees, itself among them; 0: all
    sinks: int = 0  # positions that all see
    node: object = None  # of the index, after the computed full blocks; None: what follows is not indexed

    @property
    def held(self) -> list[int]:
        """Its blocks, without the null entries of what it gave up."""
        return [block for block in self.table if block]

    def sees(self, entry: int, size: int, following: int) -> bool:
        """Whether a position from `following` on sees one of this entry's positions."""
        positions = range(entry * size, (entry + 1) * size)
        return not self.window or any(p > following - self.window or p < self.sinks for p in positions)


class Model:
    """Predicts every number that a PageTable answers, block numbers included."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: str = "lru",
        num_host: int = 0,
        watermark: int = 0,
        folding: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks  # what is numbered from here on lies on the host
        self.free_slots = set(range(num_blocks + 1, num_blocks + num_host))
        self.eviction = eviction
        self.watermark = watermark
        self.folding = folding
        self.uses: Counter[int] = Counter()  # times that a cached block was found, since it holds what it does
        self.main: set[int] = set()  # S3-FIFO: blocks of the main queue
        self.known: set[int] = set()  # blocks that were cached since they hold what they do
        # Tokens of blocks that left the small queue, the oldest first; by tenant.
        self.ghosts: dict[int, list[list[Token]]] = defaultdict(list)
        self.most_ghosts = num_blocks * 9 // 10
        self.retention: dict[int, Retention] = {}  # of sequences
        self.retained: dict[int, Retention] = {}  # of blocks
        self.ends: dict[int, int] = {}  # cached blocks whose priority ends -> when
        self.now = 0
        self.free_blocks = set(range(1, num_blocks))
        self.cached: list[int] = []  # that can be evicted; the one that came first first
        self.sealed: set[int] = set()
        self.index: dict[tuple[object, tuple[Token, ...]], int] = {}  # (node before, tokens) -> block
        self.node_of: dict[int, object] = {}  # block -> its node; nodes are never used again
        self.sequences: dict[int, ModelSequence] = {}
        self.pins: dict[int, tuple[int, list[tuple[int, object]]]] = {}  # pin -> until, (block, its node) each
        self.reservations: dict[int, tuple[int, int]] = {}  # reservation -> until, blocks
        self.reservation_of: dict[int, int] = {}  # reservation -> tenant
        self.withheld = 0  # blocks above the limit
        self.owner: dict[int, int] = defaultdict(int)  # place -> the tenant whose cache knows it
        self.accounts: ModelAccounts | None = None
        self.places = num_blocks + num_host
        self.writer: dict[int, int] = {}  # place -> whose K/V it holds, or held last, since there are accounts
        self.zeroed: list[int] = []  # by the last extend, grow or begin
        self.copies = self.evicted = self.allocated = 0
        self.peaks: tuple[int, ...] = (0, 0, 0)  # of all states that were compared
        self._nodes = itertools.count()

    def refcount(self, block: int) -> int:
        return sum(s.table.count(block) for s in self.sequences.values()) if block else 0

    def pinned(self, block: int) -> bool:
        return any((block, self.node_of.get(block)) in held for _, held in self.pins.values())

    def admit(self, tenant: int) -> None:
        if tenant or self.accounts:
            self._open_accounts()
            self.accounts.admit(tenant)

    def _open_accounts(self) -> None:
        if not self.accounts:
            self.accounts = ModelAccounts(self)
            self.writer = dict.fromkeys(range(self.places), 0) if self.allocated else {}

    def fits(self, change: dict[int, int], physical: int, joint: Counter[int] | None = None) -> bool:
        """change: by tenant, the blocks that are used more, and jointly; physical: those that are available less."""
        if self.accounts:
            return self.accounts.fits(Counter(change), physical, joint)
        return physical <= self.available()

    def room(self, tenant: int) -> int:
        return self.accounts.room(tenant) if self.accounts else self.available()

    def obey_quotas(self) -> None:
        if self.accounts:
            self.accounts.obey()

    def set_quota(self, tenant: int, quota: ModelQuota) -> bool:
        self._open_accounts()
        self.accounts.admit(tenant)
        before, self.accounts.quotas[tenant] = self.accounts.quotas[tenant], quota
        host = sum(
            max(0, q.host_floor - self.accounts.host(t) + self.accounts.joint(t, on_host=True))
            for t, q in enumerate(self.accounts.quotas)
        )
        if sum(self.accounts.protected()) > self.available() or host > max(0, len(self.free_slots) - 1):
            self.accounts.quotas[tenant] = before
            return False
        self.obey_quotas()
        return True

    def new_for(self, found: list[int], tenant: int) -> int:
        """Blocks that are found, and that the tenant uses more by taking them."""
        return sum(
            block in self.cached or (self.accounts is not None and not self.accounts.is_charged(block, tenant))
            for block in set(found)
        )

    def _take_over(self, found: list[int], tenant: int) -> None:
        """Idle blocks are the tenant's from now on; before it is in anybody's table."""
        for block in found:
            if not self.refcount(block) and self.owner[block] != tenant:
                self._forget(block)
                self.owner[block] = tenant

    def _pop(self, s: ModelSequence) -> int:
        """A sequence gives back its last entry. What one tenant alone holds then is its own."""
        block = s.table.pop()
        if not block:
            return block
        holders = {other.tenant for other in self.sequences.values() if block in other.table}
        if s.tenant not in holders and len(holders) == 1 and holders != {self.owner[block]}:
            if block < self.num_blocks:
                self._forget(block)
            (self.owner[block],) = holders
        return block

    def pin(self, pin: int, tokens: list[Token], namespace: bytes, until: int) -> int | None:
        """Returns the blocks that are pinned; 0 makes no pin. None: others need them to be evictable."""
        node: object = ("root", namespace)
        held: list[tuple[int, object]] = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = self.index.get((node, tuple(tokens[start : start + self.block_size])))
            if block is None or block >= self.num_blocks:
                break
            node = self.node_of[block]
            held.append((block, node))
        idle = [block for block, _ in held if block in self.cached]
        if not self.fits(Counter(self.owner[block] for block in idle), len(idle)):
            return None
        if held:
            self.pins[pin] = until, held
            self._uncache([block for block, _ in held])
        return len(held)

    def unpin(self, pin: int) -> None:
        for block, node in reversed(self.pins.pop(pin)[1]):  # the tail first
            if self.node_of.get(block) == node and not self.pinned(block) and self.refcount(block) == 0:
                self._cache(block)

    def advance(self, now: int) -> None:
        self.now = now
        # Of those that end at once, the one that was cached first comes first.
        for block in sorted(self.cached, key=lambda block: self.ends.get(block, 0)):
            if block in self.ends and self.ends[block] <= now:
                del self.ends[block], self.retained[block]
                self.cached.remove(block)
                self.cached.append(block)
        for until, pin in sorted((until, pin) for pin, (until, _) in self.pins.items()):
            if until <= now:
                self.unpin(pin)
        self.reservations = {i: (until, n) for i, (until, n) in self.reservations.items() if until > now}

    def reset_cache(self) -> int:
        """Returns the cached blocks that become free."""
        idle = [block for block in self.node_of if self.refcount(block) == 0]
        self.sealed -= set(idle)
        self.free_blocks |= set(idle)
        while self.cached:
            self.victim()
        for block in list(self.node_of):
            self._forget(block)
        self.index, self.node_of = {}, {}
        for s in self.sequences.values():
            if s.computed:
                s.node = None
        return len(idle)

    def available(self) -> int:
        return len(self.free_blocks) + len(self.cached) - self.kept()

    def kept(self) -> int:
        """Blocks that stay free: reserved, or above the limit."""
        return sum(blocks for _, blocks in self.reservations.values()) + self.withheld

    def reserve(self, reservation: int, blocks: int, until: int, tenant: int = 0) -> bool:
        self.admit(tenant)
        if not self.fits({tenant: blocks}, blocks):
            return False
        self.reservation_of[reservation] = tenant
        self.reservations[reservation] = until, blocks
        self.obey_quotas()
        self._evict_for(0)
        return True

    def resize(self, limit: int) -> int | None:
        """Returns how many blocks are evicted; None if too many cannot be."""
        withheld = self.num_blocks - 1 - limit
        guaranteed = sum(self.accounts.protected()) if self.accounts else 0
        if self.available() - guaranteed + self.withheld < withheld:
            return None
        before, self.withheld = self.evicted, withheld
        self._evict_for(0)
        return self.evicted - before

    def compact(self, sequences: list[int], most: int) -> list[tuple[int, int]]:
        """The copies. Blocks that others hold stay, and so do sequences that are swapped out."""
        chosen = [i for i in sequences if not self.sequences[i].away]
        held = {b for i in chosen for b in self.sequences[i].held}
        others = {b for i, s in self.sequences.items() if i not in chosen for b in s.held}
        # Pairs are made of what is free before: what moves vacates no place for another.
        pairs = zip(sorted(held - others, reverse=True)[:most], sorted(self.free_blocks), strict=False)
        to = {block: place for block, place in pairs if place < block}
        for block, place in to.items():
            self._forget(block)
            self.free_blocks ^= {block, place}
        self._move(to)
        for i in sorted(chosen):
            if set(self.sequences[i].table) & set(to.values()):
                self._retain(i, [block for block in self.sequences[i].table if block in self.node_of])
        return list(to.items())

    def _move(self, to: dict[int, int]) -> None:
        self.sealed = {to.get(b, b) for b in self.sealed}
        self.index = {key: to.get(b, b) for key, b in self.index.items()}
        pinned = {
            pin: [(to.get(b, b), n) if self.node_of.get(b) == n else (b, n) for b, n in held]
            for pin, (_, held) in self.pins.items()
        }
        self.pins = {pin: (until, pinned[pin]) for pin, (until, _) in self.pins.items()}
        self.node_of = {to.get(b, b): node for b, node in self.node_of.items()}
        self.owner.update({new: self.owner[old] for old, new in to.items()})
        self.writer.update({new: self.writer[old] for old, new in to.items() if old in self.writer})
        for s in self.sequences.values():
            s.table = [to.get(b, b) for b in s.table]

    def create(
        self,
        sequence: int,
        tokens: list[Token],
        namespace: bytes,
        retention: Retention | None = None,
        tenant: int = 0,
        window: tuple[int, int] = (0, 0),
    ) -> None:
        self.admit(tenant)
        s = ModelSequence(list(tokens), namespace, tenant=tenant, node=("root", namespace))
        s.window, s.sinks = window
        self.sequences[sequence] = s
        if retention:
            self.retention[sequence] = retention

    def admission(
        self,
        prompts: list[list[Token]],
        lookahead: list[int],
        namespace: bytes,
        reservation: int = 0,
        tenant: int = 0,
        window: tuple[int, int] = (0, 0),
    ) -> tuple[Verdict, int, int]:
        """The verdict, the tokens found, and the blocks that fall short."""
        self.admit(tenant)
        found, new = set(), 0
        cached = 0
        for tokens, ahead in zip(prompts, lookahead, strict=True):
            _, hits = self._hits(tokens, namespace)
            found |= set(self._in_sight(hits, window)) - {0}
            cached += len(hits) * self.block_size
            new += self._pages(len(tokens) + ahead) - len(hits)
        limit = self.num_blocks - 1 - self.withheld
        most = self.accounts.most(tenant, limit) if self.accounts else limit
        if new + len(found) > most:
            return Verdict.NEVER, cached, new + len(found) - most
        in_use = any(block < self.num_blocks for s in self.sequences.values() for block in s.held)
        promised, watermark = self.reservations.get(reservation, (0, 0))[1], self.watermark if in_use else 0
        needed = new + self.new_for(list(found), tenant)
        short = max(0, needed - self.available() - promised + watermark)
        if self.accounts:
            drawn = min(promised, new)
            physical = new - drawn + len(found & set(self.cached)) + watermark
            joins = self.accounts.joins(list(found), tenant)
            change = self.accounts.change(list(found), tenant)
            change[tenant] += new - drawn
            short = self.accounts.short(change, joins, physical)
        return Verdict.LATER if short else Verdict.OK, cached, short

    def begin(
        self,
        ids: list[int],
        prompts: list[list[Token]],
        lookahead: list[int],
        namespace: bytes,
        reservation: int = 0,
        tenant: int = 0,
        window: tuple[int, int] = (0, 0),
    ) -> None:
        hits = [self._hits(tokens, namespace) for tokens in prompts]
        new = sum(
            self._pages(len(tokens) + ahead) - len(found)
            for tokens, ahead, (_, found) in zip(prompts, lookahead, hits, strict=True)
        )
        until, promised = self.reservations.pop(reservation, (0, 0))
        if promised > new:
            self.reservations[reservation] = until, promised - new
        for sequence, tokens, (node, found) in zip(ids, prompts, hits, strict=True):
            computed = len(found) * self.block_size
            seen = self._in_sight(found, window)
            s = ModelSequence(list(tokens), namespace, computed, computed, seen, tenant=tenant, node=node)
            s.window, s.sinks = window
            self._uncache(s.held)
            self._take_over(s.held, tenant)
            self.sequences[sequence] = s
        self.obey_quotas()
        upto = [len(tokens) + ahead for tokens, ahead in zip(prompts, lookahead, strict=True)]
        extended = self.extend(ids, upto)
        assert extended is not None
        assert not extended[0]  # no copies

    def hits(self, sequence: int) -> tuple[object, list[int]]:
        s = self.sequences[sequence]
        return self._hits(s.tokens, s.namespace)

    def _hits(self, tokens: list[Token], namespace: bytes) -> tuple[object, list[int]]:
        node: object = ("root", namespace)
        found = []
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block = self.index.get((node, tuple(tokens[start : start + self.block_size])))
            if block is None or block >= self.num_blocks:
                break
            found.append(block)
            node = self.node_of[block]
        return node, found

    def _in_sight(self, found: list[int], window: tuple[int, int]) -> list[int]:
        """Blocks of a prefix as a table with this window takes them: null where nothing behind sees them."""
        s = ModelSequence([], b"", window=window[0], sinks=window[1])
        size = self.block_size
        return [block if s.sees(entry, size, len(found) * size) else 0 for entry, block in enumerate(found)]

    def give_up(self, sequences: list[int]) -> None:
        """After a commit: what no position that is still to be computed sees is given up, the tail first."""
        given: list[int] = []
        for sequence in sequences:
            s = self.sequences[sequence]
            for entry in reversed(range(s.computed // self.block_size)):
                if s.table[entry] and not s.sees(entry, self.block_size, s.computed):
                    s.table.append(s.table[entry])
                    s.table[entry] = 0
                    given.append(self._pop(s))
        for i, block in enumerate(given):
            if block and block not in given[i + 1 :] and self.refcount(block) == 0:
                self._give_back(block)

    def passed(self, sequence: int, length: int) -> bool:
        """Whether a cut to this length would see what was given up."""
        s = self.sequences[sequence]
        entries = enumerate(s.table[: self._pages(length)])
        return any(not block and s.sees(entry, self.block_size, length) for entry, block in entries)

    def reuse(self, sequence: int) -> int | None:
        """None: its tenant may not take what is found."""
        node, whole = self.hits(sequence)
        s = self.sequences[sequence]
        seen = self._in_sight(whole, (s.window, s.sinks))
        found = [block for block in seen if block]
        if self.accounts and found:
            more, idle = self.accounts.change(found, s.tenant), sum(block in self.cached for block in found)
            if not self.fits(more, idle, self.accounts.joins(found, s.tenant)):
                return None
        self._uncache(found)
        self._take_over(found, s.tenant)
        s.table = seen
        s.computed = s.writable = len(seen) * self.block_size
        s.node = node
        self.obey_quotas()
        self._retain(sequence, found)
        return s.computed

    def changes(self, sequences: list[int], upto: list[int]) -> list[list[tuple[str, int]]]:
        """For each, its entries that need a block, in logical order: ("copy" or "new", logical block)."""
        refcount = {block: self.refcount(block) for s in self.sequences.values() for block in s.table}
        changes: list[list[tuple[str, int]]] = []
        for sequence, to in zip(sequences, upto, strict=True):
            s = self.sequences[sequence]
            mine: list[tuple[str, int]] = []
            if to > s.computed:
                for place in range(s.computed // self.block_size, -(-to // self.block_size)):
                    if place >= len(s.table):
                        mine.append(("new", place))
                    elif refcount[s.table[place]] > 1:
                        refcount[s.table[place]] -= 1
                        mine.append(("copy", place))
            changes.append(mine)
        return changes

    def extend(
        self, sequences: list[int], upto: list[int], checked: bool = True
    ) -> tuple[list[tuple[int, int]], dict[int, dict[int, int]]] | None:
        """The copies, and for each sequence its changed entries; None if there are too few blocks."""
        changes = self.changes(sequences, upto)
        needed: Counter[int] = Counter()
        for sequence, mine in zip(sequences, changes, strict=True):
            needed[self.sequences[sequence].tenant] += len(mine)
        if checked and not self.fits(needed, needed.total()):
            return None
        # What is written in place stops being findable.
        for sequence, to, mine in zip(sequences, upto, changes, strict=True):
            s = self.sequences[sequence]
            if to > s.computed:
                moved = {place for _, place in mine}
                for place in range(s.computed // self.block_size, -(-to // self.block_size)):
                    if place < len(s.table) and place not in moved:
                        self._unseal(s.table[place])
        if needed.total() and self.accounts:
            self.accounts.pending = needed
            self.obey_quotas()
        self._evict_for(needed.total())
        if self.accounts:
            self.accounts.pending = Counter()
        copies = []
        self.zeroed = []
        deltas: dict[int, dict[int, int]] = {}
        for i, (sequence, to, mine) in enumerate(zip(sequences, upto, changes, strict=True)):
            s = self.sequences[sequence]
            for kind, place in mine:
                block = min(self.free_blocks)
                self.free_blocks.remove(block)
                self.owner[block] = s.tenant
                self.allocated += 1
                if self.accounts:
                    if kind == "new" and self.writer.get(block, s.tenant) != s.tenant:
                        self.zeroed.append(block)
                    self.writer[block] = s.tenant
                if kind == "copy":
                    copies.append((s.table[place], block))
                    self.copies += 1
                    self._swap_entry(s, place, block)
                else:
                    s.table.append(block)
                deltas.setdefault(i, {})[place] = block
            s.writable = max(s.writable, to)
        return copies, deltas

    def _evict_for(self, needed: int) -> None:
        while len(self.free_blocks) < needed + self.kept():
            self.evict(self.victim())

    def evict(self, victim: int) -> None:
        self._unseal(victim)
        self.free_blocks.add(victim)
        self.evicted += 1

    def _swap_entry(self, s: ModelSequence, place: int, block: int) -> None:
        """A copy comes into the place of a shared block, which its sequence gives back."""
        s.table[place], s.table[-1] = s.table[-1], s.table[place]
        self._pop(s)
        s.table.append(block)
        s.table[place], s.table[-1] = s.table[-1], s.table[place]

    def commit(self, sequence: int, upto: int) -> None:
        s = self.sequences[sequence]
        first = s.computed // self.block_size
        if upto // self.block_size > first and not self._is_alive(s.node):
            s.node = self._node_at(s, first)
        for place in range(first, upto // self.block_size):
            block = s.table[place]
            self.sealed.add(block)
            if s.node is None:
                continue
            key = (s.node, tuple(s.tokens[place * self.block_size : (place + 1) * self.block_size]))
            if key not in self.index:
                self.index[key] = block
                self.node_of[block] = next(self._nodes)
            canonical = self.index[key]
            s.node = self.node_of[canonical]
            if self.folding and canonical not in (block, *range(self.num_blocks, self.places)):
                self._fold(s, place, canonical)
            self._retain(sequence, [b for b in s.table[place : place + 1] if b in self.node_of])
        s.computed = upto

    def _fold(self, s: ModelSequence, place: int, canonical: int) -> None:
        """The canonical block comes into the place of its double, which its sequence gives back."""
        self._uncache([canonical])
        self._take_over([canonical], s.tenant)
        double, s.table[place] = s.table[place], canonical
        s.table.append(double)
        self._pop(s)
        if self.refcount(double) == 0:
            self._give_back(double)

    def fork(self, sequence: int, child: int) -> None:
        s = self.sequences[sequence]
        held = s.table[: -(-s.computed // self.block_size)]
        if sequence in self.retention:
            self.retention[child] = self.retention[sequence]
        self.sequences[child] = ModelSequence(
            list(s.tokens), s.namespace, s.computed, s.computed, held, s.away, s.tenant, s.window, s.sinks, s.node
        )

    def swap(self, out: list[int], in_: list[int]) -> list[tuple[str, int, int]] | str:
        """The moves, each in the numbers of its own pool; or which side has too little room."""
        leaving = [i for i in out if not self.sequences[i].away]
        coming = [i for i in in_ if self.sequences[i].away]
        after = ({i for i, s in self.sequences.items() if s.away} | set(leaving)) - set(coming)
        back: Counter[int] = Counter()
        outs, ins = [], []
        for i in out:
            s = self.sequences[i]
            kept = s.table[: self._pages(s.computed)]
            back[s.tenant] += len(s.table) - len(kept)
            kept = [block for block in kept if block]
            for block in kept:
                holders = {k for k, other in self.sequences.items() if block in other.table}
                if block < self.num_blocks and block not in outs and holders <= after and not self.pinned(block):
                    outs.append(block)
        for i in coming:
            ins += [b for b in self.sequences[i].table if b >= self.num_blocks and b not in ins]
        free, moved = max(0, len(self.free_slots) - 1), len(outs) - len(ins)
        bill: Counter[int] = Counter()  # by tenant, what leaves the device, less what comes
        joint: Counter[int] = Counter()  # of this, what is joint
        for places, sign in ((outs, 1), (ins, -1)):
            for holders in map(self.accounts.holders, places) if self.accounts else ():
                bill.update(dict.fromkeys(holders, sign))
                joint.update(dict.fromkeys(holders, sign * (len(holders) > 1)))
        if not (self.accounts.fits_host(bill, joint, moved, free) if self.accounts else moved <= free):
            return "host"
        change = {t: -bill[t] - back[t] for t in bill.keys() | back.keys()}
        if not self.fits(change, -moved - back.total(), Counter({t: -n for t, n in joint.items()})):
            return "device"

        for i in leaving:
            s = self.sequences[i]
            self._cut(s, self._pages(s.computed))
            s.writable = s.computed
        if self.accounts:
            self.accounts.pending = Counter({t: -n for t, n in bill.items()})
            self.accounts.pending_joint = Counter({t: -n for t, n in joint.items()})
            self.obey_quotas()
        moves, to = [], {}
        outs_left, ins_left = list(outs), list(ins)
        while outs_left or ins_left:
            while outs_left and self.free_slots:
                block, place = outs_left.pop(0), min(self.free_slots)
                self.free_slots.remove(place)
                self.free_blocks.add(block)
                moves.append(("out", block, place - self.num_blocks))
                to[block] = place
            room = min(len(ins_left), self.available())
            self._evict_for(room)
            vacated = []
            for place in ins_left[:room]:
                block = min(self.free_blocks)
                self.free_blocks.remove(block)
                vacated.append(place)
                moves.append(("in", place - self.num_blocks, block))
                to[place] = block
            self.free_slots |= set(vacated)
            del ins_left[:room]
        for block in outs:
            self._forget(block)
        self._move(to)
        if self.accounts:
            self.accounts.pending = Counter()
            self.accounts.pending_joint = Counter()
        for i in leaving:
            self.sequences[i].away = True
        for i in coming:
            self.sequences[i].away = False
            self._retain(i, [block for block in self.sequences[i].table if block in self.node_of])
        return moves

    def grow(
        self, sequences: list[int], tokens: list[list[Token]], lookahead: list[int], reservation: int = 0
    ) -> tuple[list[tuple[int, int]], dict[int, dict[int, int]], list[list[int]]] | None:
        """What `extend` gives, and the slots that are new of each; None if there are too few blocks."""
        chosen = [self.sequences[sequence] for sequence in sequences]
        length = [len(s.tokens) + len(new) for s, new in zip(chosen, tokens, strict=True)]
        upto = [n + ahead for n, ahead in zip(length, lookahead, strict=True)]
        until, promised = self.reservations.get(reservation, (0, 0))
        change: Counter[int] = Counter()
        needed = 0
        for s, to, mine in zip(chosen, upto, self.changes(sequences, upto), strict=True):
            needed += len(mine)
            change[s.tenant] += len(mine) - max(len(s.table) - self._pages(to), 0)
        physical = change.total() - min(promised, needed)
        if promised and chosen:
            change[chosen[0].tenant] -= min(promised, needed)
        if not self.fits(change, physical):
            return None
        if promised > needed:
            self.reservations[reservation] = until, promised - needed
        elif promised:
            del self.reservations[reservation]
        first = [min(len(s.tokens), s.writable) for s in chosen]
        for s, new, to in zip(chosen, tokens, upto, strict=True):
            self._cut(s, self._pages(to))
            s.tokens += new
            s.writable = to
        extended = self.extend(sequences, upto, checked=False)
        assert extended is not None
        size = self.block_size
        slots = [
            [s.table[position // size] * size + position % size for position in range(start, to)]
            for s, start, to in zip(chosen, first, upto, strict=True)
        ]
        return *extended, slots

    def truncate(self, sequences: list[int], lengths: list[int]) -> None:
        for sequence, length in zip(sequences, lengths, strict=True):
            s = self.sequences[sequence]
            if length // self.block_size < s.computed // self.block_size:
                s.node = self._node_at(s, length // self.block_size)
            s.tokens = s.tokens[:length]
            s.computed = min(s.computed, length)
            s.writable = min(s.writable, length)
        # One command: its sequences give back one after another, and a block that several give back has its place in
        # the order from the last of them.
        given: list[int] = []
        for sequence, length in zip(reversed(sequences), reversed(lengths), strict=True):
            s = self.sequences[sequence]
            while len(s.table) > self._pages(length):
                given.append(self._pop(s))
        for i, block in enumerate(given):
            if block and block not in given[i + 1 :] and self.refcount(block) == 0:
                self._give_back(block)

    def _is_alive(self, node: object) -> bool:
        return isinstance(node, tuple) or node in self.node_of.values()

    def _node_at(self, s: ModelSequence, full: int) -> object:
        """The node that its first `full` blocks end in; None if the index finds them no more."""
        node: object = ("root", s.namespace)
        if s.node is None:
            return None
        if full and s.table[full - 1] in self.node_of:
            return self.node_of[s.table[full - 1]]
        for start in range(0, full * self.block_size, self.block_size):
            block = self.index.get((node, tuple(s.tokens[start : start + self.block_size])))
            if block is None:
                return None
            node = self.node_of[block]
        return node

    def _pages(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _cut(self, s: ModelSequence, pages: int) -> None:
        while len(s.table) > pages:  # the tail first
            block = self._pop(s)
            if block and self.refcount(block) == 0:
                self._give_back(block)

    def _give_back(self, block: int) -> None:
        if block >= self.num_blocks:
            self._unseal(block)
            self.free_slots.add(block)
        elif block in self.node_of:
            if not self.pinned(block):
                self._cache(block)
        else:
            self._unseal(block)
            self.free_blocks.add(block)

    def drop(self, sequence: int) -> None:
        s = self.sequences[sequence]
        self._cut(s, 0)
        s.computed = s.writable = 0
        s.away = False
        s.node = ("root", s.namespace)

    def free(self, sequence: int) -> None:
        self.drop(sequence)
        del self.sequences[sequence]
        self.retention.pop(sequence, None)

    def _cache(self, block: int) -> None:
        self.cached.append(block)
        ghosts = self.ghosts[self.owner[block]]
        if block not in self.known and self.held(block) in ghosts:
            ghosts.remove(self.held(block))
            self.main.add(block)
        self.known.add(block)
        retention = self.retained.get(block)
        if retention and retention.ttl_ms and self.priority(block) != 35:
            self.ends[block] = self.now + retention.ttl_ms

    def _uncache(self, found: list[int]) -> None:
        most = {"lru": 0, "lfu": 63, "s3fifo": 3, "priority": 0}[self.eviction]
        for block in found:
            if block in self.cached:
                self.cached.remove(block)
                self.ends.pop(block, None)
                self.uses[block] = min(self.uses[block] + 1, most)

    def victim(self, tenant: int | None = None) -> int:
        """Takes out of `cached` the block that goes first, of a tenant's if there are any."""
        if self.accounts and tenant is None:
            tenant = self.accounts.who_gives()
        cached = [block for block in self.cached if tenant is None or self.owner[block] == tenant]
        if self.eviction == "s3fifo":
            return self._s3fifo_victim(cached, self.ghosts[tenant or 0])
        key = self.priority if self.eviction == "priority" else self.uses.__getitem__
        victim = min(cached, key=key)
        self.cached.remove(victim)
        return victim

    def _s3fifo_victim(self, cached: list[int], ghosts: list[list[Token]]) -> int:
        """S3-FIFO, algorithm 1: EVICT, EVICTS and EVICTM. The tail of the paper is what came first."""
        while True:
            small = [block for block in cached if block not in self.main]
            from_small = len(small) / len(cached) >= 0.1
            block = next(block for block in cached if (block in self.main) != from_small)
            stays = self.uses[block] > (1 if from_small else 0)
            for queue in (cached, self.cached):
                queue.remove(block)
                if stays:
                    queue.append(block)
            if stays:
                self.uses[block] = 0 if from_small else self.uses[block] - 1
                self.main.add(block)
                continue
            if from_small:
                ghosts[:] = [*[tokens for tokens in ghosts if tokens != self.held(block)], self.held(block)]
                del ghosts[: -self.most_ghosts]
            return block

    def priority(self, block: int) -> int:
        return self.retained[block].priority if block in self.retained else 35

    def _retain(self, sequence: int, blocks: list[int]) -> None:
        if self.eviction == "priority" and sequence in self.retention:
            self.retained.update(dict.fromkeys(blocks, self.retention[sequence]))

    def held(self, block: int) -> list[Token]:
        """The tokens that an indexed block is found by."""
        return next(list(tokens) for (_, tokens), found in self.index.items() if found == block)

    def _forget(self, block: int) -> None:
        del self.uses[block]
        self.retained.pop(block, None)
        self.ends.pop(block, None)
        self.main.discard(block)
        self.known.discard(block)

    def _unseal(self, block: int) -> None:
        self._forget(block)
        self.sealed.discard(block)
        self.node_of.pop(block, None)
        self.index = {key: found for key, found in self.index.items() if found != block}

    def compare(self, table: PageTable) -> None:
        """Asserts that `table` is in the state that this model is in."""
        ids = sorted(self.sequences)
        assert table.sequences().tolist() == ids
        held = {b for s in self.sequences.values() for b in s.held}
        counts = [self.refcount(block) for block in held if block < self.num_blocks]
        host = [self.refcount(block) for block in held if block >= self.num_blocks]
        columns = table.tables(ids)
        last = []
        for i, sequence in enumerate(ids):
            s = self.sequences[sequence]
            entries = slice(columns.indptr[i], columns.indptr[i + 1])
            assert columns.indices[entries].tolist() == s.table
            assert columns.refcount[entries].tolist() == [self.refcount(block) for block in s.table]
            assert table.tokens(sequence).tolist() == plain(s.tokens)
            before = (len(s.table) - 1) * self.block_size
            last.append(min(max(s.writable - before, 0), self.block_size) if s.table else 0)
            match = table.match(sequence)
            _, found = self.hits(sequence)
            idle = sum(self.refcount(block) == 0 for block in found)
            assert (match.tokens, match.blocks, match.idle_blocks) == (len(found) * self.block_size, len(found), idle)
        assert columns.last_page_len.tolist() == last
        assert table.length(ids).tolist() == [len(self.sequences[i].tokens) for i in ids]
        assert table.computed(ids).tolist() == [self.sequences[i].computed for i in ids]

        states = table.states()
        sealed = sum(self.refcount(block) > 0 for block in self.sealed if block < self.num_blocks)
        host_sealed = sum(block >= self.num_blocks for block in self.sealed)
        states_of_host = table.host_states()
        assert (states_of_host.free, states_of_host.active, states_of_host.sealed) == (
            len(self.free_slots),
            len(host) - host_sealed,
            host_sealed,
        )
        idle_pinned = sum(self.refcount(block) == 0 and self.pinned(block) for block in self.node_of)
        reserved = sum(blocks for _, blocks in self.reservations.values())
        assert (states.null, states.reserved, states.quarantined) == (1, reserved, 0)
        assert (states.free + states.reserved, states.active, states.sealed, states.cached) == (
            len(self.free_blocks),
            len(counts) - sealed,
            sealed,
            len(self.cached) + idle_pinned,
        )
        assert table.available() == self.room(0)
        for tenant in self.accounts.tenants() if self.accounts else ():
            told, accounts = table.usage(tenant), self.accounts
            assert table.available(tenant) == accounts.room(tenant)
            assert (told.charged, told.cached, told.reserved, told.host) == (
                accounts.charged(tenant),
                accounts.evictable(tenant),
                accounts.reserved(tenant),
                accounts.host(tenant),
            ), tenant
        sharing = table.sharing()
        assert sharing.table_entries == sum(counts)
        assert (sharing.referenced_blocks, sharing.shared_blocks) == (len(counts), sum(n > 1 for n in counts))
        counters = table.counters
        assert (counters.copies_on_write, counters.evicted_blocks) == (self.copies, self.evicted)
        assert counters.allocated_blocks == self.allocated
        now = (sharing.table_entries, sharing.referenced_blocks, sharing.shared_blocks)
        self.peaks = tuple(map(max, self.peaks, now))
        assert (
            counters.peak_table_entries,
            counters.peak_referenced_blocks,
            counters.peak_shared_blocks,
        ) == self.peaks
        assert table.check() == []


class Device:
    """What is in each slot of the pool: for the K/V of position p, the namespace and the tokens up to p."""

    def __init__(self, num_blocks: int, block_size: int, num_host: int = 0) -> None:
        self.block_size = block_size
        self.first_slot = num_blocks  # of the host, as the core numbers it
        self.slots: Any = [None] * ((num_blocks + num_host) * block_size)
        self.writer: dict[int, int] = {}  # place -> the tenant that wrote it

    def run(self, model: Model, sequences: list[int], upto: list[int], extended: Extended) -> None:
        """Copies in order, then writes K/V of the new positions, as a step would."""
        self.copy(extended.ops())
        self.write(model, sequences, upto)

    def copy(self, ops: BlockOps) -> None:
        """Copies, and zeroes, in order."""
        self.apply(ops)
        for source, target, kind in self._places(ops):
            if kind == OpKind.ZERO:
                self.writer.pop(target, None)
            elif source in self.writer:
                self.writer[target] = self.writer[source]

    def move(self, ops: BlockOps) -> None:
        """Moves in order; what is left behind is garbage, unless something has come there since."""
        self.copy(ops)
        size, vacated = self.block_size, set()
        for source, target, _ in self._places(ops):
            vacated.add(source)
            vacated.discard(target)
        for place in vacated:
            self.slots[place * size : (place + 1) * size] = [GARBAGE] * size

    def apply(self, ops: BlockOps) -> None:
        """Carries the ops out, one by one."""
        size = self.block_size
        for source, target, kind in self._places(ops):
            kept = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = [None] * size if kind == OpKind.ZERO else kept

    def _places(self, ops: BlockOps) -> Iterator[tuple[int, int, int]]:
        """Source, target and kind of each, in the core's numbering of device and host."""
        for kind, src, dst in zip(ops.kind.tolist(), ops.src.tolist(), ops.dst.tolist(), strict=True):
            yield (
                src + self.first_slot * (kind == OpKind.SWAP_IN),
                dst + self.first_slot * (kind == OpKind.SWAP_OUT),
                kind,
            )

    def give(self, block: int, tenant: int) -> None:
        """Asserts that a tenant which is given a new block finds nothing there that another has written."""
        assert self.writer.get(block, tenant) == tenant, (block, tenant)
        self.writer[block] = tenant

    def write(self, model: Model, sequences: list[int], upto: list[int]) -> None:
        """Writes K/V of positions [computed, upto[i]) of each."""
        for sequence, to in zip(sequences, upto, strict=True):
            s = model.sequences[sequence]
            for position in range(s.computed, to):
                self.slots[self._slot(s, position)] = (s.namespace, tuple(s.tokens[: position + 1]))

    def verify(self, model: Model) -> None:
        """Asserts that every sequence reads back exactly what belongs at its computed positions."""
        for sequence, s in model.sequences.items():
            for position in range(s.computed):
                if not s.table[position // self.block_size]:
                    continue
                held = self.slots[self._slot(s, position)]
                assert held == (s.namespace, tuple(s.tokens[: position + 1])), (sequence, position)

    def _slot(self, s: ModelSequence, position: int) -> int:
        return s.table[position // self.block_size] * self.block_size + position % self.block_size


def snapshot(table: PageTable) -> object:
    """All that can be seen of a table, to show that a refusal changed nothing."""
    ids = table.sequences()
    columns = table.tables(ids)
    return (
        table.revision,
        table.next_sequence,
        ids.tolist(),
        [table.tokens(i).tolist() for i in ids],
        [table.match(i) for i in ids],
        table.length(ids).tolist(),
        table.computed(ids).tolist(),
        [column.tolist() for column in (columns.indptr, columns.indices, columns.last_page_len, columns.refcount)],
        table.states(),
        table.host_states(),
        table.sharing(),
        str(table.counters),
        table.check(),
    )


def run(table: PageTable, sequence: int, upto: int | None = None) -> Extended:
    """A step of one sequence: extend, then commit."""
    to = [int(table.length([sequence])[0]) if upto is None else upto]
    extended = table.extend([sequence], to)
    table.commit([sequence], to)
    return extended


def prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)
