"""A seeded random walk over the page table, for as long as it is told: `python tests/core/core_walk.py --commands N`.

A device stands beside the table: every slot holds a hash of the tokens up to its position. It does what the table says,
and nothing else, so a wrong block, a missing copy or a block that two sequences write is seen when they read. The
invariants are checked every few hundred commands. A refusal must change nothing. With `--model`, the plain model walks
along, and everything is compared after each command.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from core_model import Device, Model, Token, keys_of, plain
from core_model_accounts import ModelQuota

from block_manager_svc.core import Extended, PageTable, Retention
from block_manager_svc.core.admission import Verdict
from block_manager_svc.core.errors import FailedPrecondition, NotFound, OutOfBlocks, ResourceExhausted
from block_manager_svc.core.eviction import POLICIES
from block_manager_svc.core.step import OpKind

_MASK = (1 << 61) - 1


@dataclass
class Held:
    """What a sequence must read: a hash of the tokens up to each position."""

    hashes: list[int]
    tokens: list[Token]
    computed: int = 0
    away: bool = False  # swapped out
    tenant: int = 0
    namespace: bytes = b""


def chained(before: int, token: Token) -> int:
    content = token if isinstance(token, int) else token[0] + 7
    return hash((before, content, 0x9E3779B9)) & _MASK


class Walk:
    """One walk: the same seed takes the same steps."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int,
        num_host: int,
        block_size: int,
        sequences: int,
        longest: int = 60,
        beside_model: bool = False,
        make_device: Callable[[int, int, int], Device] = Device,
    ) -> None:
        self.draw = random.Random(seed)
        self.size = block_size
        self.most, self.longest = sequences, longest
        eviction = self.draw.choice(sorted(POLICIES))
        watermark, folding = self.draw.choice((0, 3)), self.draw.choice((False, True))
        self.table = PageTable(
            num_blocks, block_size, num_host=num_host, eviction=eviction, watermark=watermark, folding=folding
        )
        self.device = make_device(num_blocks, block_size, num_host)
        self.model = Model(num_blocks, block_size, eviction, num_host, watermark, folding) if beside_model else None
        self.held: dict[int, Held] = {}
        self.counts: Counter[str] = Counter()
        self.reservation = self.reserved_for = 0  # for the next `grow` or `begin` of this tenant
        self.tenants = self.draw.choice((1, 3))
        self.keyed = self.draw.choice((0, 0, 0.05))  # tokens that have extra keys
        # Of windows and sinks; whole walks without any too.
        self.windows = self.draw.choice((((0, 0),), ((0, 0), (0, 0), (6, 0), (9, 3), (1, 0), (20, 8))))
        # Few beginnings, so that prefixes meet.
        self.beginnings = [[self.token() for _ in range(longest // 2)] for _ in range(4)]

    def step(self) -> None:
        """One command, and what follows from it."""
        draw, alive = self.draw, list(self.held)
        if not alive or (len(alive) < self.most and draw.random() < 0.15):
            draw.choice((self.create, self.begin))()
        else:
            self.change(alive)
        if self.model:
            self.model.obey_quotas()
            self.model.compare(self.table)
        self.read(draw.choice(list(self.held) or [0]))

    def change(self, alive: list[int]) -> None:
        draw = self.draw
        command = draw.choices(
            (
                self.grow,
                self.commit,
                self.fork,
                self.truncate,
                self.drop,
                self.free,
                self.extend,
                self.pin,
                self.swap,
                self.reserve,
                self.resize,
                self.compact,
                self.set_quota,
            ),
            (40, 25, 6, 10, 3, 6, 5, 3, 12, 3, 2, 3, 2),
        )[0]
        some = draw.sample(alive, min(len(alive), draw.randint(1, 4)))
        if command in (self.grow, self.commit, self.extend):
            some = [sequence for sequence in some if not self.held[sequence].away]
        if some:
            command(some)

    def token(self) -> Token:
        token = self.draw.randrange(2)
        return (token, b"key") if self.draw.random() < self.keyed else token

    def prompt(self) -> list[Token]:
        tokens = self.draw.choice(self.beginnings)[: self.draw.randint(1, self.longest // 2)]
        return tokens + [self.token() for _ in range(self.draw.randrange(4))]

    def whose(self) -> tuple[int, bytes]:
        """A tenant, and a namespace: its own, or the one that all share."""
        tenant = self.draw.randrange(self.tenants)
        return tenant, self.draw.choice((b"", b"", b"", b"of %d" % tenant))

    def drawn(self, tenants: set[int]) -> int:
        """The reservation, if it is for these."""
        if tenants != {self.reserved_for}:
            return 0
        reservation, self.reservation = self.reservation, 0
        return reservation

    def hold(self, sequence: int, tokens: list[Token], namespace: bytes, tenant: int) -> Held:
        hashes, last = [], chained(int.from_bytes(namespace, "little"), -1)
        for token in tokens:
            last = chained(last, token)
            hashes.append(last)
        held = self.held[sequence] = Held(hashes, list(tokens), tenant=tenant, namespace=namespace)
        return held

    def begin(self) -> None:
        draw = self.draw
        prompts = [self.prompt() for _ in range(draw.randint(1, 3))]
        lookahead = [draw.choice((0, 1, 5)) for _ in prompts]
        tenant, namespace = self.whose()
        reservation, (window, sinks) = self.drawn({tenant}), draw.choice(self.windows)
        flat, extra = plain(token for tokens in prompts for token in tokens), keys_of(*prompts)
        judged = (
            self.model.admission(prompts, lookahead, namespace, reservation, tenant, (window, sinks))
            if self.model
            else None
        )
        if self.model and len(prompts) == 1:
            told = self.table.admission(
                flat, lookahead[0], namespace, tenant=tenant, extra=extra, window=window, sinks=sinks
            )
            expected = self.model.admission(prompts, lookahead, namespace, tenant=tenant, window=(window, sinks))
            assert (told.verdict, told.cached, told.shortfall) == expected
        lengths = [len(tokens) for tokens in prompts]
        try:
            begun = self.table.begin(
                lengths,
                flat,
                lookahead,
                namespace,
                reservation=reservation,
                tenant=tenant,
                extra=extra,
                window=window,
                sinks=sinks,
            )
        except ResourceExhausted as refusal:
            verdict = Verdict.LATER if isinstance(refusal, OutOfBlocks) else Verdict.NEVER
            assert not judged or judged[0] == verdict
            self.counts[f"admitted {verdict.name}"] += 1
            return
        ids, cached = begun.sequences.tolist(), begun.cached.tolist()
        self.device.copy(begun.ops)
        for block in np.unique(begun.slots // self.size).tolist():
            self.device.give(block, tenant)
        if self.model and judged:
            assert (judged[0], judged[1]) == (Verdict.OK, sum(cached))
            self.model.begin(ids, prompts, lookahead, namespace, reservation, tenant, (window, sinks))
            assert begun.ops.dst.tolist() == self.model.zeroed
        for sequence, tokens, found in zip(ids, prompts, cached, strict=True):
            self.hold(sequence, tokens, namespace, tenant).computed = found
        self.counts["begin"] += 1

    def create(self) -> None:
        tokens, (tenant, namespace) = self.prompt(), self.whose()
        retention = self.draw.choice((None, None, Retention(self.draw.randrange(101), self.draw.choice((None, 1, 30)))))
        extra, (window, sinks) = keys_of(tokens), self.draw.choice(self.windows)
        sequence = self.table.create(
            plain(tokens), namespace, retention=retention, tenant=tenant, extra=extra, window=window, sinks=sinks
        )
        held = self.hold(sequence, tokens, namespace, tenant)
        if self.model:
            self.model.create(sequence, tokens, namespace, retention, tenant, (window, sinks))
        expected = self.model.reuse(sequence) if self.model else None
        try:
            held.computed = self.table.reuse(sequence)
            assert not self.model or expected == held.computed
        except ResourceExhausted:
            assert expected is None
            self.counts["refused"] += 1
        self.counts["create"] += 1
        self.counts["tokens found"] += held.computed

    def grow(self, some: list[int]) -> None:
        draw = self.draw
        new = [[self.token() for _ in range(draw.randrange(4))] for _ in some]
        new = [tokens[: max(0, self.longest - len(self.held[i].hashes))] for i, tokens in zip(some, new, strict=True)]
        lookahead = [draw.choice((0, 0, 1, 3, 9)) for _ in some]
        flat = plain(token for tokens in new for token in tokens)
        extra = keys_of(*new, first=[len(self.held[i].hashes) for i in some])
        revision = self.table.revision
        reservation = self.drawn({self.held[i].tenant for i in some})
        expected = self.model.grow(some, new, lookahead, reservation) if self.model else None
        try:
            grown = self.table.grow(
                some, [len(tokens) for tokens in new], flat, lookahead, reservation=reservation, extra=extra
            )
        except ResourceExhausted:
            assert self.table.revision == revision
            assert expected is None
            self.counts["refused"] += 1
            self.free(some[:1])
            return
        self.take(some, grown.extended)
        ends = grown.slot_indptr.tolist()
        for i, (sequence, tokens, ahead) in enumerate(zip(some, new, lookahead, strict=True)):
            hashes = self.held[sequence].hashes
            self.held[sequence].tokens += tokens
            for token in tokens:
                hashes.append(chained(hashes[-1], token))
            # The slots end with the lookahead; what lies before them was given and written before.
            slots = grown.slots[ends[i] : ends[i + 1]].tolist()
            known = slots[: len(slots) - ahead]
            for slot, value in zip(known, hashes[len(hashes) - len(known) :], strict=True):
                self.device.slots[slot] = value
        self.counts["grow"] += 1

    def extend(self, some: list[int]) -> None:
        upto = [self.draw.randint(self.held[i].computed, len(self.held[i].hashes)) for i in some]
        expected = self.model.extend(some, upto) if self.model else None
        try:
            extended = self.table.extend(some, upto)
        except ResourceExhausted:
            assert expected is None
            self.counts["refused"] += 1
            self.free(some[:1])
            return
        self.take(some, extended)
        for sequence, to in zip(some, upto, strict=True):
            self.write(sequence, to)
        self.counts["extend"] += 1

    def take(self, some: list[int], extended: Extended) -> None:
        """Does what comes before writing; nobody gets a new block with what another tenant has written."""
        assert not self.model or extended.zeroed.tolist() == self.model.zeroed
        self.device.copy(extended.ops())
        tenants = np.repeat([self.held[some[i]].tenant for i in extended.delta_sequence.tolist()], extended.delta_count)
        copied = set(extended.copy_dst.tolist())
        for block, tenant in zip(extended.delta_blocks.tolist(), tenants.tolist(), strict=True):
            if block in copied:  # of what it found, and so may read
                self.device.writer[block] = tenant
            self.device.give(block, tenant)
        self.counts["zeroed"] += extended.zeroed.size

    def commit(self, some: list[int]) -> None:
        """Of what was made writable; written at the latest now."""
        tables = self.table.tables(some)
        pages = np.diff(tables.indptr)
        room = [max(0, int(n) - 1) * self.size + int(last) for n, last in zip(pages, tables.last_page_len, strict=True)]
        upto = []
        for sequence, slots in zip(some, room, strict=True):
            held = self.held[sequence]
            upto.append(self.draw.choice((min(len(held.hashes), max(slots, held.computed)), held.computed)))
            self.write(sequence, upto[-1])
        self.table.commit(some, upto)
        for sequence, to in zip(some, upto, strict=True):
            self.held[sequence].computed = to
            if self.model:
                self.model.commit(sequence, to)
        if self.model:
            self.model.give_up(some)
        self.counts["commit"] += 1

    def swap(self, some: list[int]) -> None:
        """Mostly what changes something: who is here goes, who is away comes."""
        out = [i for i in some if self.held[i].away == (self.draw.random() < 0.1)]
        in_ = [i for i in some if i not in out]
        revision = self.table.revision
        moves = self.model.swap(out, in_) if self.model else None
        try:
            ops = self.table.swap(out, in_).ops
        except ResourceExhausted:
            assert self.table.revision == revision
            assert not isinstance(moves, list)
            self.counts["refused"] += 1
            self.free(some[:1])
            return
        if self.model:
            kinds = ["out" if kind == OpKind.SWAP_OUT else "in" for kind in ops.kind.tolist()]
            assert list(zip(kinds, ops.src.tolist(), ops.dst.tolist(), strict=True)) == moves
        for sequence in some:
            self.held[sequence].away = sequence in out
        self.device.move(ops)
        self.counts["swap"] += 1
        self.counts["exchange"] += bool((np.diff(ops.kind.astype(int)) < 0).any())

    def fork(self, some: list[int]) -> None:
        if len(self.held) >= self.most:
            return
        parent = self.held[some[0]]
        for child in self.table.fork(some[0], self.draw.randint(1, 3)).tolist():
            self.held[child] = replace(parent, hashes=list(parent.hashes), tokens=list(parent.tokens))
            if self.model:
                self.model.fork(some[0], child)
        self.counts["fork"] += 1

    def truncate(self, some: list[int]) -> None:
        lengths = [max(1, len(self.held[i].hashes) - self.draw.choice((0, 1, 2, 5, 20))) for i in some]
        revision = self.table.revision
        passed = self.model and any(self.model.passed(i, length) for i, length in zip(some, lengths, strict=True))
        try:
            self.table.truncate(some, lengths)
        except FailedPrecondition:
            assert self.table.revision == revision
            assert passed is not False
            self.counts["window passed"] += 1
            return
        assert not passed
        for sequence, length in zip(some, lengths, strict=True):
            held = self.held[sequence]
            del held.hashes[length:], held.tokens[length:]
            held.computed = min(held.computed, length)
        if self.model:
            self.model.truncate(some, lengths)
        self.counts["truncate"] += 1

    def drop(self, some: list[int]) -> None:
        self.table.drop(some)
        for sequence in some:
            self.held[sequence].computed = 0
            self.held[sequence].away = False
            if self.model:
                self.model.drop(sequence)
        self.counts["drop"] += 1

    def free(self, some: list[int]) -> None:
        self.table.free(some)
        for sequence in some:
            del self.held[sequence]
            if self.model:
                self.model.free(sequence)
        self.counts["free"] += 1

    def pin(self, some: list[int]) -> None:
        """A prefix that somebody may come for; the clock goes on, and ends what was pinned before."""
        self.table.advance(self.table.now + self.draw.randint(0, 20))
        until = self.table.now + self.draw.randint(1, 100)
        if self.model:
            self.model.advance(self.table.now)
        self.reservation = 0  # its time may be over
        tokens, namespace = self.held[some[0]].tokens, self.held[some[0]].namespace
        try:
            pinned = self.table.pin(plain(tokens), until, namespace, extra=keys_of(tokens))
        except (NotFound, ResourceExhausted):
            assert not self.model or not self.model.pin(0, tokens, namespace, until)
            return
        if self.model:
            assert self.model.pin(pinned.pin, tokens, namespace, until) == pinned.tokens // self.size
        self.counts["pin"] += 1

    def reserve(self, some: list[int]) -> None:
        blocks = self.draw.randint(1, 6)
        until, tenant = self.table.now + self.draw.randint(1, 50), self.draw.randrange(self.tenants)
        try:
            reservation = self.table.reserve(blocks, until, tenant=tenant)
        except ResourceExhausted:
            assert not self.model or not self.model.reserve(-1, blocks, until, tenant)
            self.counts["refused"] += 1
            return
        if self.model:
            assert self.model.reserve(reservation, blocks, until, tenant)
        self.reservation, self.reserved_for = reservation, tenant
        self.counts["reserve"] += 1

    def set_quota(self, some: list[int]) -> None:
        """Of one of several tenants, mostly with a floor that can be, and above what it uses."""
        if self.tenants == 1:
            return
        draw, blocks, host = self.draw, self.table.num_blocks, self.table.host_states().free
        tenant = draw.randrange(self.tenants)
        quota = ModelQuota(draw.randrange(blocks // 3), blocks, draw.randrange(host // 3 + 1), 2 * blocks)
        if draw.random() < 0.5:
            quota.quota = draw.randint(quota.floor, blocks)
        if draw.random() < 0.3:
            quota.host_quota = draw.randint(quota.host_floor, host + 1)
        expected = self.model.set_quota(tenant, quota) if self.model else None
        try:
            self.table.set_quota(tenant, **vars(quota))
        except FailedPrecondition:
            assert not expected
            self.counts["refused"] += 1
            return
        assert not self.model or expected
        self.counts["quota"] += 1

    def resize(self, some: list[int]) -> None:
        """Mostly back to all blocks."""
        most = self.table.num_blocks - 1
        limit = self.draw.choice((most, most, self.draw.randint(most // 2, most)))
        expected = self.model.resize(limit) if self.model else None
        try:
            evicted = self.table.resize(limit)
        except FailedPrecondition:
            assert expected is None
            self.counts["refused"] += 1
            return
        assert not self.model or evicted == expected
        self.counts["resize"] += 1

    def compact(self, some: list[int]) -> None:
        sequences = self.draw.choice((some, list(self.held)))
        most = self.draw.randint(1, 30)
        moves = self.model.compact(sequences, most) if self.model else None
        ops = self.table.compact(sequences, most).ops
        assert not self.model or list(zip(ops.src.tolist(), ops.dst.tolist(), strict=True)) == moves
        self.device.move(ops)
        self.counts["compact"] += 1
        self.counts["compacted"] += ops.src.size

    def write(self, sequence: int, upto: int) -> None:
        held = self.held[sequence]
        entries = self.table.tables([sequence]).indices.tolist()
        for position in range(held.computed, upto):
            self.device.slots[entries[position // self.size] * self.size + position % self.size] = held.hashes[position]

    def read(self, sequence: int) -> None:
        """Asserts that a sequence finds at its computed positions exactly what belongs there."""
        if sequence not in self.held:
            return
        held, size = self.held[sequence], self.size
        for place, block in enumerate(self.table.tables([sequence]).indices.tolist()):
            first, upto = place * size, min((place + 1) * size, held.computed)
            if first >= upto:
                break
            if not block:  # given up
                continue
            found = self.device.slots[block * size : block * size + upto - first]
            assert found == held.hashes[first:upto], (sequence, place, block)

    def check(self) -> None:
        for sequence in self.held:
            self.read(sequence)
        assert self.table.sequences().tolist() == sorted(self.held)
        assert (wrong := self.table.check()) == [], wrong


def walk(
    seed: int,
    commands: int,
    *,
    check_every: int = 500,
    beside_model: bool = False,
    make_device: Callable[[int, int, int], Device] = Device,
) -> Counter[str]:
    """Walks, and returns what was done. Raises AssertionError with the seed and the step."""
    num_blocks = (24, 64, 200)[seed // 4 % 3]
    it = Walk(
        seed,
        num_blocks=num_blocks,
        num_host=(num_blocks // 3, 4, 0)[seed % 3],
        block_size=(1, 2, 4, 7)[seed % 4],
        sequences=min(24, num_blocks // 4),
        beside_model=beside_model,
        make_device=make_device,
    )
    for step in range(commands):
        try:
            it.step()
            if step % check_every == 0 or step == commands - 1:
                it.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {error}") from error
    counters = it.table.counters
    it.counts.update(
        copies=counters.copies_on_write,
        evicted=counters.evicted_blocks,
        swapped_out=counters.swapped_out_blocks,
        swapped_in=counters.swapped_in_blocks,
    )
    return it.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=1_000_000)
    parser.add_argument("--a-seed", type=int, default=100_000, help="commands of one seed")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--model", action="store_true", help="compare with the plain model after each command")
    parser.add_argument("--record", type=Path, help="a folder for the record of this run, as JSON")
    options = parser.parse_args()
    began, total = time.monotonic(), Counter[str]()
    seeds = range(options.first_seed, options.first_seed + -(-options.commands // options.a_seed))
    for seed in seeds:
        total += walk(seed, options.a_seed, beside_model=options.model)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "proof": "random walk of the core",
        "seeds": [seeds[0], seeds[-1]],
        "commands": len(seeds) * options.a_seed,
        "compared with the model": options.model,
        "counts": dict(sorted(total.items())),
        "seconds": round(time.monotonic() - began, 1),
        "python": sys.version.split()[0],
        "revision": revision,
    }
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        (options.record / "core-walk.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
