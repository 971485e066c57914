"""Atomic batches: either all items, or the state is what it was, to the last bit of it that anything could see."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.core import PageTable
from block_manager_svc.core.batch import Done, Executed, execute
from block_manager_svc.core.commands import (
    Append,
    Command,
    Commit,
    Create,
    Fork,
    Free,
    Pin,
    Release,
    Reserve,
    Swap,
    Truncate,
    Unpin,
    reference,
)
from block_manager_svc.core.errors import NotFound, Refused
from block_manager_svc.core.eviction import POLICIES
from block_manager_svc.core.step import OpKind
from block_manager_svc.core.terms import Terms
from block_manager_svc.core.undo import Agenda

BLOCK_SIZE = 2
VOCABULARY = 2
NAMESPACES = (b"", b"", b"", b"a")


def i64(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def i32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


# --- the state, written down ------------------------------------------------------------------------------------------


def dump(part: object, path: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Everything that a part of the core keeps, whatever it is; but for what nothing later can see."""
    kind = type(part)
    if isinstance(part, np.ndarray):
        assert kind is np.ndarray, f"{path} still records"
        # Rows and regions that nobody has hold anything.
        yield path, (part.dtype.str, part.tolist())
    elif isinstance(part, Agenda):
        return
    elif isinstance(part, (int, float, str, bytes, bytearray, type(None), frozenset)):
        yield path, part
    elif path.endswith("._ends"):  # of what is held until a moment, only the order
        yield path, sorted(part, key=part.__getitem__)
    elif kind is Terms:
        yield path, sorted(map(repr, part.values()))
    elif kind is dict:
        plain = ((key, sorted(value.items()) if type(value) is dict else value) for key, value in part.items())
        yield path, sorted((repr(key), repr(value)) for key, value in plain)
    elif kind is list and part and type(part[0]).__module__.startswith("block_manager_svc.core.eviction"):
        for i, each in enumerate(part):
            yield from dump(each, f"{path}[{i}]", seen)
    elif kind is list:
        yield path, repr(part)
    elif kind is set:
        yield path, sorted(part)
    elif kind is memoryview:
        yield path, part.tolist()
    elif kind.__module__.startswith("block_manager_svc.core") and not isinstance(part, tuple):
        if id(part) in seen:
            return
        seen.add(id(part))
        for base in kind.__mro__:
            for name in getattr(base, "__slots__", ()):
                yield from dump(getattr(part, name), f"{path}.{name}", seen)
    else:
        assert kind is itertools.count or callable(part) or isinstance(part, tuple), f"{path} is a {kind}"


def state(table: PageTable) -> dict[str, object]:
    return dict(dump(table, "table", set()))


# --- random batches ---------------------------------------------------------------------------------------------------


class Engine:
    """Makes random commands about what is there, and what will be by then; some of them are refused."""

    def __init__(self, seed: int, table: PageTable) -> None:
        self.random = random.Random(seed)
        self.table = table
        self.pins: list[int] = []
        self.reservations: list[int] = []

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(VOCABULARY), k=count)

    def some(self, known: list[int]) -> list[int]:
        return self.random.sample(known, k=min(len(known), self.random.choice((1, 1, 1, 2, 3))))

    def counts(self, names: list[int], low: int, high: int) -> np.ndarray:
        return i64([self.random.randint(low, high) for _ in names])

    def within(self, names: list[int], low: int) -> np.ndarray:
        """For each a position from `low` (-1: from what is computed) to its length."""
        known = [(self.computed(name) if low < 0 else low, self.length(name)) for name in names]
        return i64([self.random.choice((last, self.random.randint(min(first, last), last))) for first, last in known])

    def length(self, name: int) -> int:
        return int(self.table.length([name])[0]) if name > 0 else 4

    def computed(self, name: int) -> int:
        return int(self.table.computed([name])[0]) if name > 0 else 0

    def command(self, known: list[int], now: int) -> Command:
        kind = self.random.choice(
            (Create, Create, Append, Append, Append, Commit, Commit, Commit, Fork, Fork, Truncate, Free, Swap)
            if self.random.random() < 0.8
            else (Pin, Unpin, Reserve, Release)
        )
        names = self.some(known)
        namespace = self.random.choice(NAMESPACES)
        reservation = self.random.choice([0, 0, 0, *self.reservations[-1:]])
        if kind is Create:
            counts = [self.random.randint(1, 7) for _ in range(self.random.choice((1, 1, 2)))]
            ahead = i64([self.random.choice((0, 0, 3)) for _ in counts])
            return Create(i64(counts), i32(self.tokens(sum(counts))), ahead, namespace, reservation)
        if kind is Append:
            counts = self.counts(names, 0, 3)
            return Append(
                i64(names), counts, i32(self.tokens(int(counts.sum()))), self.counts(names, 0, 2), reservation
            )
        if kind is Commit:
            return Commit(i64(names), self.within(names, -1))
        if kind is Fork:
            return Fork(i64(names), self.counts(names, 1, 2))
        if kind is Truncate:
            return Truncate(i64(names), self.within(names, 1))
        if kind is Free:
            return Free(i64(names))
        if kind is Swap:
            return Swap(i64(names[:1]), i64(names[1:]))
        if kind is Pin:
            own = [name for name in names if name > 0]
            prefix = self.table.tokens(own[0]).tolist() if own else self.tokens(4)
            return Pin(i32(prefix), now + self.random.randint(1, 20), namespace)
        if kind is Unpin:
            return Unpin(i64(self.some(self.pins)))
        if kind is Reserve:
            return Reserve(self.random.randint(1, 3), now + self.random.randint(1, 20))
        return Release(i64(self.some(self.reservations)))

    def batch(self, now: int) -> list[Command]:
        commands: list[Command] = []
        known = self.table.sequences().tolist()
        for item in range(self.random.randint(1, 6)):
            command = self.command(known, now)
            if isinstance(command, Create):
                known += [reference(item, position) for position in range(command.counts.size)]
            commands.append(command)
        return commands

    def note(self, results: list[Done | Refused]) -> None:
        done = [result for result in results if isinstance(result, Done)]
        self.pins += [result.pin for result in done if result.pin]
        self.reservations += [result.reservation for result in done if result.reservation]


# Memory that was never written, and which batch was asked about last.
UNKNOWN = (".data", "._last", "._last_key")
REFUSED = NotFound("REFUSED", "so says the test")


class Twin:
    """A table that sees only what stays. Ids of pins and reservations differ, since the other has skipped some."""

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.pins: dict[int, int] = {}
        self.reservations: dict[int, int] = {}

    def execute(self, batch: list[Command], expected: Executed, tenant: int) -> None:
        executed = execute(self.table, [self.own(command) for command in batch], tenant=tenant)
        for mine, theirs in zip(executed.results, expected.results, strict=True):
            assert isinstance(mine, Done)
            assert isinstance(theirs, Done)
            self.pins[theirs.pin], self.reservations[theirs.reservation] = mine.pin, mine.reservation
            mine.pin, mine.reservation = theirs.pin, theirs.reservation
            assert repr(mine) == repr(theirs)
        assert repr(executed.ops) == repr(expected.ops)
        assert executed.touched.tolist() == expected.touched.tolist()

    def own(self, command: Command) -> Command:
        if isinstance(command, Unpin):
            return Unpin(i64([self.pins.get(pin, pin) for pin in command.pins.tolist()]))
        if isinstance(command, Release):
            return Release(i64([self.reservations.get(each, each) for each in command.reservations.tolist()]))
        if isinstance(command, Create | Append) and command.reservation > 0:
            return replace(command, reservation=self.reservations[command.reservation])
        return command


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(list(POLICIES)),
    num_host=st.sampled_from([0, 6]),
    tenants=st.sampled_from([1, 3]),
)
def test_what_is_taken_back_leaves_no_trace(seed: int, policy: str, num_host: int, tenants: int) -> None:
    """Beside a twin that never saw the batches that failed: equal in all that is kept, and in all that comes."""
    table = PageTable(12, BLOCK_SIZE, num_host=num_host, eviction=policy)
    twin = Twin(PageTable(12, BLOCK_SIZE, num_host=num_host, eviction=policy))
    for each in (table, twin.table) if tenants > 1 else ():
        each.set_quota(1, floor=2, quota=6)
    engine = Engine(seed, table)
    now = 0
    for _ in range(30):
        now += engine.random.randint(0, 4)
        for each in (table, twin.table):
            each.advance(now)
        batch, tenant = engine.batch(now), engine.random.randrange(tenants)

        before = state(table)
        with pytest.raises(Refused) as caught:
            execute(table, [*batch, REFUSED], tenant=tenant, atomic=True)
        assert caught.value.numbers["failed_item"] <= len(batch)
        after = state(table)
        assert [path for path in before if before[path] != after[path]] == []
        assert table.check() == []

        try:
            executed = execute(table, batch, tenant=tenant, atomic=True)
        except Refused:
            continue
        twin.execute(batch, executed, tenant)
        kept, expected = state(table), state(twin.table)
        assert [path for path in expected if kept[path] != expected[path] and not path.endswith(UNKNOWN)] == []
        for sequence in table.sequences().tolist():
            assert table.tokens(sequence).tolist() == twin.table.tokens(sequence).tolist()
            assert table.tables([sequence]).indices.tolist() == twin.table.tables([sequence]).indices.tolist()
        engine.note(executed.results)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_kind_of_change_is_taken_back(policy: str) -> None:
    """One batch that copies, evicts, seals, moves to the host and back, pins and reserves, and then fails."""
    table = PageTable(14, BLOCK_SIZE, num_host=8, eviction=policy)
    for start in (0, 10):  # six blocks are cached, and were found once
        for _ in range(2):
            prompt = Create(i64([7]), i32(list(range(start, start + 7))), i64([0]), b"")
            execute(table, [prompt, Commit(i64([reference(0, 0)]), i64([7])), Free(i64([reference(0, 0)]))])
    batch = [
        Create(i64([7, 5]), i32([*range(7), 1, 2, 3, 4, 5]), i64([0, 1]), b""),
        Commit(i64([reference(0, 0), reference(0, 1)]), i64([7, 5])),
        Fork(i64([reference(0, 0)]), i64([2])),
        Append(i64([reference(2, 0), reference(2, 1)]), None, i32([1, 2]), None),
        Pin(i32(list(range(10, 14))), 100, b""),
        Reserve(1, 100),
        Swap(i64([reference(0, 1)]), i64([])),
        Create(i64([3]), i32([9, 9, 9]), i64([2]), b"", reference(5, 0)),
        Truncate(i64([reference(2, 0)]), i64([3])),
        Swap(i64([]), i64([reference(0, 1)])),
        Unpin(i64([reference(4, 0)])),
        Free(i64([reference(0, 0)])),
    ]
    before = state(table)
    with pytest.raises(NotFound) as caught:
        execute(table, [*batch, REFUSED], atomic=True)
    assert (caught.value.reason, caught.value.numbers) == ("REFUSED", {"failed_item": len(batch)})
    assert state(table) == before

    executed = execute(table, batch, atomic=True)
    assert not any(isinstance(result, Refused) for result in executed.results)
    assert set(executed.ops.kind.tolist()) == {OpKind.COPY, OpKind.SWAP_OUT, OpKind.SWAP_IN}
    assert table.counters.evicted_blocks > 0
    assert table.check() == []
    state(table)  # nothing records any more


def test_what_was_refused_before_it_became_a_command_fails_the_batch_at_its_place() -> None:
    table = PageTable(12, BLOCK_SIZE)
    create = Create(i64([1]), i32([1]), i64([0]), b"")
    with pytest.raises(NotFound):
        execute(table, [create, REFUSED, create], atomic=True)
    assert table.sequences().size == 0
    assert execute(table, [], atomic=True).results == []


def test_a_fault_leaves_no_recording_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PageTable(12, BLOCK_SIZE)
    create = Create(i64([1]), i32([1]), i64([0]), b"")

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(PageTable, "truncate", fail)
    with pytest.raises(RuntimeError):
        execute(table, [create, Truncate(i64([reference(0, 0)]), i64([1]))], atomic=True)
    state(table)
