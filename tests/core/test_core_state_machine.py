"""Random commands against the page table, the plain model and a device, compared after each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from core_model import Device, Model, Token, keys_of, plain, snapshot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from block_manager_svc.core import Extended, PageTable, Pinned, Retention
from block_manager_svc.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfBlocks,
    ResourceExhausted,
    SequenceNotFound,
)
from block_manager_svc.core.eviction import POLICIES
from block_manager_svc.core.step import OpKind

NUM_BLOCKS = 12
# Two tokens and few blocks, so that prefixes meet, blocks run out and children write where their parents did.
PLAIN = st.integers(0, 1)
TOKENS = st.sampled_from([0, 1, 0, 1, 0, 1, (1, b"k")])
# Of a window, and of sinks.
WINDOWS = st.sampled_from([(0, 0), (0, 3), (1, 0), (3, 0), (5, 2), (8, 5)])
RETENTIONS = st.sampled_from(
    [None, Retention(1), Retention(35, 5), Retention(90, 4), Retention(80, 9), Retention(0, 1)]
)


class PageTableMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        eviction=st.sampled_from(sorted(POLICIES)),
        num_host=st.sampled_from([8, 4, 0]),
        folding=st.booleans(),
    )
    def start(self, block_size: int, eviction: str, num_host: int, folding: bool) -> None:
        self.table = PageTable(NUM_BLOCKS, block_size, eviction=eviction, num_host=num_host, folding=folding)
        self.model = Model(NUM_BLOCKS, block_size, eviction, num_host, folding=folding)
        self.device = Device(NUM_BLOCKS, block_size, num_host)
        self.ended: list[int] = []
        self.pins = self.reservations = 0  # ids that were given

    def some(self, data: st.DataObject) -> list[int]:
        """Distinct sequences in any order."""
        return data.draw(st.lists(st.sampled_from(sorted(self.model.sequences)), min_size=1, max_size=4, unique=True))

    def some_on_device(self, data: st.DataObject) -> list[int]:
        """Of `some`, those that are not swapped out; with one that is, commands that need blocks are refused."""
        sequences = self.some(data)
        away = [sequence for sequence in sequences if self.model.sequences[sequence].away]
        if away:
            computed = [self.model.sequences[sequence].computed for sequence in sequences]
            zeros = [0] * len(sequences)
            before = snapshot(self.table)
            for command, arguments in (
                (self.table.extend, (computed,)),
                (self.table.commit, (computed,)),
                (self.table.blocks_needed, (computed,)),
                (self.table.grow, (zeros, [], zeros)),
            ):
                with pytest.raises(FailedPrecondition, match="on the host"):
                    command(sequences, *arguments)
            assert snapshot(self.table) == before
        return [sequence for sequence in sequences if sequence not in away]

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.sequences)))

    @precondition(lambda self: len(self.model.sequences) < 6)
    @rule(
        tokens=st.lists(TOKENS, min_size=1, max_size=14),
        window=WINDOWS,
        namespace=st.sampled_from([b"", b"", b"", b"other"]),
        retention=RETENTIONS,
    )
    def create(
        self, tokens: list[Token], namespace: bytes, retention: Retention | None, window: tuple[int, int]
    ) -> None:
        sequence = self.table.create(
            plain(tokens), namespace, retention=retention, extra=keys_of(tokens), window=window[0], sinks=window[1]
        )
        assert sequence not in self.model.sequences
        assert sequence not in self.ended
        self.model.create(sequence, tokens, namespace, retention, window=window)

    @precondition(lambda self: len(self.model.sequences) < 6)
    @rule(
        tokens=st.lists(TOKENS, min_size=5, max_size=14),
        ended=st.integers(0, 2),
        samples=st.integers(0, 2),
        retention=RETENTIONS,
    )
    def serve(self, tokens: list[Token], ended: int, samples: int, retention: Retention | None) -> None:
        """A whole request, so that what lies behind many steps is met: found prefixes, cached blocks, evictions."""
        sequence = self.table.create(plain(tokens), retention=retention, extra=keys_of(tokens))
        self.model.create(sequence, tokens, b"", retention)
        assert self.table.reuse(sequence) == self.model.reuse(sequence)
        if (expected := self.model.extend([sequence], [len(tokens)])) is not None:
            extended = self.table.extend([sequence], [len(tokens)])
            self.same_extension([sequence], extended, *expected)
            self.device.run(self.model, [sequence], [len(tokens)], extended)
            self.table.commit([sequence], [len(tokens)])
            self.model.commit(sequence, len(tokens))
            self.model.give_up([sequence])
        if samples:
            for child in self.table.fork(sequence, samples).tolist():
                self.model.fork(sequence, child)
        self.same()
        if ended:  # two times of three: what lives on leaves little to evict
            self.table.free([sequence])
            self.model.free(sequence)
            self.ended.append(sequence)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def reuse(self, data: st.DataObject) -> None:
        sequence = self.one(data)
        if self.model.sequences[sequence].table or self.model.sequences[sequence].away:
            before = snapshot(self.table)
            with pytest.raises(FailedPrecondition):
                self.table.reuse(sequence)
            assert snapshot(self.table) == before
        else:
            assert self.table.reuse(sequence) == self.model.reuse(sequence)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), whole=st.booleans(), committed=st.booleans())
    def extend(self, data: st.DataObject, whole: bool, committed: bool) -> None:
        sequences = self.some_on_device(data)
        upto = []
        for sequence in sequences:
            s = self.model.sequences[sequence]
            upto.append(len(s.tokens) if whole else data.draw(st.integers(s.computed, len(s.tokens))))
        needed = [len(mine) for mine in self.model.changes(sequences, upto)]
        assert self.table.blocks_needed(sequences, upto).tolist() == needed
        expected = self.model.extend(sequences, upto)
        if expected is None:
            before = snapshot(self.table)
            with pytest.raises(OutOfBlocks) as refusal:
                self.table.extend(sequences, upto)
            assert refusal.value.numbers == {"needed": sum(needed), "available": self.table.available()}
            assert snapshot(self.table) == before
            return
        extended = self.table.extend(sequences, upto)
        self.same_extension(sequences, extended, *expected)
        self.device.run(self.model, sequences, upto, extended)
        if committed:
            self.same()  # the peak is here: a commit may give blocks up
            self.table.commit(sequences, upto)
            for sequence, to in zip(sequences, upto, strict=True):
                self.model.commit(sequence, to)
            self.model.give_up(sequences)

    def same_extension(
        self,
        sequences: list[int],
        extended: Extended,
        copies: list[tuple[int, int]],
        deltas: dict[int, dict[int, int]],
    ) -> None:
        assert list(zip(extended.copy_src.tolist(), extended.copy_dst.tolist(), strict=True)) == copies
        assert extended.zeroed.tolist() == self.model.zeroed
        assert extended.delta_sequence.tolist() == list(deltas)
        start = 0
        for i, first, count in zip(
            extended.delta_sequence.tolist(), extended.delta_first.tolist(), extended.delta_count.tolist(), strict=True
        ):
            assert (first, first + count - 1) == (min(deltas[i]), max(deltas[i]))
            entries = self.model.sequences[sequences[i]].table[first : first + count]
            assert extended.delta_blocks[start : start + count].tolist() == entries
            start += count
        assert start == extended.delta_blocks.size

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), committed=st.booleans())
    def grow(self, data: st.DataObject, committed: bool) -> None:
        sequences = self.some_on_device(data)
        tokens = [data.draw(st.lists(TOKENS, max_size=4)) for _ in sequences]
        lookahead = [data.draw(st.integers(0, 5)) for _ in sequences]
        flat = plain(token for new in tokens for token in new)
        arguments = sequences, [len(new) for new in tokens], flat, lookahead
        extra = keys_of(*tokens, first=[len(self.model.sequences[i].tokens) for i in sequences])
        reservation = data.draw(st.sampled_from([0, *self.model.reservations]))
        before = snapshot(self.table)
        expected = self.model.grow(sequences, tokens, lookahead, reservation)
        if expected is None:
            with pytest.raises(OutOfBlocks):
                self.table.grow(*arguments, reservation=reservation, extra=extra)
            assert snapshot(self.table) == before
            return
        copies, deltas, slots = expected
        grown = self.table.grow(*arguments, reservation=reservation, extra=extra)
        self.same_extension(sequences, grown.extended, copies, deltas)
        ends = grown.slot_indptr.tolist()
        assert [grown.slots[a:b].tolist() for a, b in pairwise(ends)] == slots
        upto = [len(self.model.sequences[sequence].tokens) for sequence in sequences]
        self.device.run(self.model, sequences, upto, grown.extended)
        if committed:
            self.same()  # the peak is here: a commit may give blocks up
            self.table.commit(sequences, upto)
            for sequence, to in zip(sequences, upto, strict=True):
                self.model.commit(sequence, to)
            self.model.give_up(sequences)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequences = self.some(data)
        lengths = [data.draw(st.integers(1, len(self.model.sequences[sequence].tokens))) for sequence in sequences]
        if any(self.model.passed(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)):
            before = snapshot(self.table)
            with pytest.raises(FailedPrecondition, match="gave up"):
                self.table.truncate(sequences, lengths)
            assert snapshot(self.table) == before
            return
        self.table.truncate(sequences, lengths)
        self.model.truncate(sequences, lengths)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        sequences = self.some_on_device(data)
        chosen = [self.model.sequences[sequence] for sequence in sequences]
        upto = [data.draw(st.integers(s.computed, min(s.writable, len(s.tokens)))) for s in chosen]
        self.device.write(self.model, sequences, upto)
        self.table.commit(sequences, upto)
        for sequence, to in zip(sequences, upto, strict=True):
            self.model.commit(sequence, to)
        self.model.give_up(sequences)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        sequences = self.some(data)
        tokens = [data.draw(PLAIN) for _ in sequences]
        self.table.append(sequences, tokens)
        for sequence, token in zip(sequences, tokens, strict=True):
            self.model.sequences[sequence].tokens.append(token)

    @precondition(lambda self: 0 < len(self.model.sequences) < 6)
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        parent = self.one(data)
        children = self.table.fork(parent, count).tolist()
        assert len(children) == count
        for child in children:
            assert child not in self.model.sequences
            self.model.fork(parent, child)

    @precondition(lambda self: any(s.away or s.computed for s in self.model.sequences.values()))
    @rule(data=st.data(), usual=st.sampled_from([True, True, True, False]))
    def swap(self, data: st.DataObject, usual: bool) -> None:
        chosen = self.model.sequences
        worth = st.sampled_from(sorted(i for i, s in chosen.items() if s.away or s.computed))
        sequences = data.draw(st.lists(worth, min_size=1, max_size=4, unique=True))
        # Mostly what changes something: who is here goes, who is away comes.
        out = [i for i in sequences if chosen[i].away != (usual or data.draw(st.booleans()))]
        in_ = [i for i in sequences if i not in out]
        before = snapshot(self.table)
        tables = {i: list(s.table) for i, s in self.model.sequences.items()}
        moves = self.model.swap(out, in_)
        if isinstance(moves, str):
            refusal = OutOfBlocks if moves == "device" else ResourceExhausted
            with pytest.raises(refusal, match="host" if moves == "host" else "evictable"):
                self.table.swap(out, in_)
            assert snapshot(self.table) == before
            return
        swapped = self.table.swap(out, in_)
        ops = swapped.ops
        kinds = ["out" if kind == OpKind.SWAP_OUT else "in" for kind in ops.kind.tolist()]
        assert list(zip(kinds, ops.src.tolist(), ops.dst.tolist(), strict=True)) == moves
        assert swapped.changed.tolist() == [i for i, s in self.model.sequences.items() if s.table != tables[i]]
        self.device.move(ops)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        sequences = self.some(data)
        self.table.drop(sequences)
        for sequence in sequences:
            self.model.drop(sequence)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequences = self.some(data)
        self.table.free(sequences)
        for sequence in sequences:
            self.model.free(sequence)
        self.ended += sequences

    @precondition(lambda self: self.model.sequences and len(self.model.pins) < 3)
    @rule(data=st.data(), term=st.integers(1, 9), more=st.lists(TOKENS, max_size=2))
    def pin(self, data: st.DataObject, term: int, more: list[Token]) -> None:
        s = self.model.sequences[self.one(data)]
        tokens, until, number = [*s.tokens, *more], self.table.now + term, self.pins + 1
        if not (blocks := self.model.pin(number, tokens, s.namespace, until)):
            before = snapshot(self.table)
            with pytest.raises(NotFound, match="no block"):
                self.table.pin(plain(tokens), until, s.namespace, extra=keys_of(tokens))
            assert snapshot(self.table) == before
            return
        self.pins = number
        assert self.table.pin(plain(tokens), until, s.namespace, extra=keys_of(tokens)) == Pinned(
            number, blocks * self.model.block_size
        )

    @precondition(lambda self: self.model.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.model.pins)))
        self.table.unpin([pin])
        self.model.unpin(pin)
        with pytest.raises(NotFound, match="not held"):
            self.table.unpin([pin])

    @rule(blocks=st.integers(1, 4), term=st.integers(1, 9))
    def reserve(self, blocks: int, term: int) -> None:
        until, number = self.table.now + term, self.reservations + 1
        before = snapshot(self.table)
        if not self.model.reserve(number, blocks, until):
            with pytest.raises(OutOfBlocks):
                self.table.reserve(blocks, until)
            assert snapshot(self.table) == before
            return
        self.reservations = number
        assert self.table.reserve(blocks, until) == number

    @precondition(lambda self: self.model.reservations)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(sorted(self.model.reservations)))
        self.table.release([reservation])
        del self.model.reservations[reservation]
        with pytest.raises(NotFound, match="not held"):
            self.table.release([reservation])

    @rule(limit=st.integers(1, NUM_BLOCKS - 1), whole=st.booleans())
    def resize(self, limit: int, whole: bool) -> None:
        limit = NUM_BLOCKS - 1 if whole else limit
        before = snapshot(self.table)
        evicted = self.model.resize(limit)
        if evicted is None:
            with pytest.raises(FailedPrecondition, match="free"):
                self.table.resize(limit)
            assert snapshot(self.table) == before
            return
        assert self.table.resize(limit) == evicted

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), most=st.integers(0, 6))
    def compact(self, data: st.DataObject, most: int) -> None:
        sequences = self.some(data)
        tables = {i: list(s.table) for i, s in self.model.sequences.items()}
        moves = self.model.compact(sequences, most)
        moved = self.table.compact(sequences, most)
        assert list(zip(moved.ops.src.tolist(), moved.ops.dst.tolist(), strict=True)) == moves
        assert moved.changed.tolist() == [i for i, s in self.model.sequences.items() if s.table != tables[i]]
        self.device.move(moved.ops)

    @rule(really=st.sampled_from([False, False, True]))  # not too often: much follows from what is cached
    def reset_cache(self, really: bool) -> None:
        if really:
            assert self.table.reset_cache() == self.model.reset_cache()

    @rule(ms=st.integers(0, 4))
    def advance(self, ms: int) -> None:
        now = self.table.now + ms
        self.table.advance(now)
        self.model.advance(now)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        """A batch in which something is wrong, whatever its place, changes nothing."""
        sequences = self.some_on_device(data)
        if not sequences:
            return
        chosen = [self.model.sequences[sequence] for sequence in sequences]
        upto = [s.computed for s in chosen]
        wrong = data.draw(st.integers(0, len(sequences) - 1))
        before = snapshot(self.table)

        for values in (
            [*upto[:wrong], upto[wrong] - 1, *upto[wrong + 1 :]],
            [*upto[:wrong], len(chosen[wrong].tokens) + 1, *upto[wrong + 1 :]],
        ):
            for command in (self.table.blocks_needed, self.table.extend, self.table.commit):
                with pytest.raises(InvalidArgument):
                    command(sequences, values)
        gone = self.ended[-1] if self.ended else self.table.next_sequence
        for command in (self.table.extend, self.table.commit, self.table.append, self.table.blocks_needed):
            with pytest.raises(SequenceNotFound):
                command([*sequences, gone], [*upto, 0])
            with pytest.raises(InvalidArgument, match="twice"):
                command([*sequences, sequences[wrong]], [*upto, upto[wrong]])
        for command in (self.table.free, self.table.drop, self.table.length, self.table.tables):
            with pytest.raises(SequenceNotFound):
                command([*sequences, gone])
            with pytest.raises(InvalidArgument, match="twice"):
                command([*sequences, sequences[wrong]])
        with pytest.raises(InvalidArgument):
            self.table.append(sequences, [0] * wrong + [-1] + [0] * (len(sequences) - wrong - 1))

        assert snapshot(self.table) == before

    @invariant()
    def same(self) -> None:
        if hasattr(self, "model"):
            self.model.compare(self.table)
            self.device.verify(self.model)


TestPageTableAgainstModel = PageTableMachine.TestCase
TestPageTableAgainstModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
