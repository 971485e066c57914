"""Events: who replays them knows what can be found where, which sequences there are, and when their tables changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from core_model import prompt, run
from core_walk import Walk

from block_manager_svc.core import PageTable
from block_manager_svc.core.batch import execute
from block_manager_svc.core.commands import Commit, Create, Free
from block_manager_svc.core.errors import Refused
from block_manager_svc.core.events import (
    NO_PARENT,
    BlockMoved,
    BlockRemoved,
    BlockStored,
    CacheReset,
    Event,
    EventLog,
    SequenceCreated,
    SequencesEnded,
    TablesChanged,
    chained_sha256,
)

SIZE = 4


@dataclass
class Replay:
    """What a watcher knows."""

    blocks: dict[bytes, BlockStored] = field(default_factory=dict)
    tables: dict[int, int] = field(default_factory=dict)  # revision at which each sequence's last changed

    @classmethod
    def of(cls, table: PageTable, log: EventLog) -> Replay:
        alive = table.sequences()
        return cls(
            {block.hash: block for block in log.stored_blocks()},
            dict(zip(alive.tolist(), table.changed(alive).tolist(), strict=True)),
        )

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    assert event.hash not in self.blocks
                    self.blocks[event.hash] = event
                case BlockMoved(name, place):
                    self.blocks[name] = self.blocks[name]._replace(place=place)
                case BlockRemoved(name, place):
                    assert self.blocks.pop(name).place == place
                case CacheReset():
                    self.blocks.clear()
                case SequenceCreated(sequence):
                    assert sequence not in self.tables
                    self.tables[sequence] = 0
                case SequencesEnded(sequences):
                    for sequence in sequences.tolist():
                        del self.tables[sequence]
                case TablesChanged(sequences, revision):
                    for sequence in sequences.tolist():
                        self.tables[sequence] = revision

    def check(self, table: PageTable) -> None:
        """What can be found from the beginning of a prefix is known, by the chained hash, where it lies."""
        alive = table.sequences()
        assert self.tables == dict(zip(alive.tolist(), table.changed(alive).tolist(), strict=True))
        found = findable(table)
        assert found.items() <= {name: block.place for name, block in self.blocks.items()}.items()
        places = [block.place for block in self.blocks.values()]
        assert len(set(places)) == len(places)
        # What else is known can't be found, because what comes before it was removed, but is there.
        assert set(places) <= set(table._pool.index.blocks().tolist())


def findable(table: PageTable) -> dict[bytes, int]:
    """By chained hash, the place of each block that a walk from the roots reaches."""
    index = table._pool.index
    names = {index.serial(root): (NO_PARENT, namespace) for namespace, root in index._roots.items()}
    found: dict[bytes, int] = {}
    waiting = index.blocks().tolist()
    while waiting:
        later = []
        for block in waiting:
            parent, held = index.content(block)
            tokens, extra = held[: 4 * index.block_size], held[4 * index.block_size :]
            if parent not in names:
                later.append(block)
                continue
            before, namespace = names[parent]
            name = chained_sha256(before, namespace, tokens, extra)
            names[index.serial(index.node(block))] = name, namespace
            found[name] = block
        if len(later) == len(waiting):
            break
        waiting = later
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_replay_knows_what_the_table_knows_under_random_traffic(seed: int) -> None:
    walk = Walk(seed, num_blocks=40, num_host=(0, 16)[seed % 2], block_size=SIZE, sequences=12)
    for _ in range(200):  # nobody watches yet
        walk.step()
    table = walk.table
    log = table.watch(lambda: None)
    replay = Replay.of(table, log)
    replay.check(table)
    later: Replay | None = None
    for i in range(600):
        walk.step()
        if i == 300:
            table.reset_cache()
        events = log.drain()
        replay.take(events)
        if later:
            later.take(events)
        if i % 20 == 0:
            replay.check(table)
        if i == 400:
            later = Replay.of(table, log)
    assert later == replay
    table.unwatch()
    walk.step()
    assert log.drain() == []


def test_a_hash_stands_for_namespace_tokens_and_all_that_comes_before() -> None:
    table = PageTable(16, SIZE)
    log = table.watch(lambda: None)
    run(table, table.create(prompt(*range(8)), b"model"))
    first, second = (event for event in log.drain() if isinstance(event, BlockStored))
    tokens = np.arange(8, dtype="<i4").tobytes()

    def name(parent: bytes, namespace: bytes, piece: bytes) -> bytes:
        lengths = [len(part).to_bytes(4, "little") for part in (namespace, piece)]
        return hashlib.sha256(parent + lengths[0] + namespace + lengths[1] + piece).digest()

    assert first == BlockStored(name(bytes(32), b"model", tokens[:16]), bytes(32), b"model", tokens[:16], 1)
    assert second == BlockStored(name(first.hash, b"model", tokens[16:]), first.hash, b"model", tokens[16:], 2)
    table.create(prompt(*range(8)), b"other")
    run(table, 2)
    other = {event.hash for event in log.drain() if isinstance(event, BlockStored)}
    assert len(other) == 2
    assert not other & {first.hash, second.hash}


def test_a_weak_hash_confuses_nobody_inside_and_is_told_once_outside() -> None:
    table = PageTable(16, SIZE)
    log = table.watch(lambda: None, hash_block=lambda *parts: b"same")
    for i, tokens in enumerate((prompt(*range(4)), prompt(*range(10, 14)))):
        run(table, table.create(tokens))
        table.free([i + 1])
    replay = Replay()
    replay.take(log.drain())
    assert [block.tokens for block in replay.blocks.values()] == [np.arange(10, 14, dtype="<i4").tobytes()]
    assert table.match(table.create(prompt(0, 1, 2, 3, 4))).blocks == 1
    assert table.match(table.create(prompt(10, 11, 12, 13, 4))).blocks == 1


def test_what_comes_again_after_its_beginning_was_removed_is_known_where_it_is_found() -> None:
    """Two blocks of one hash are in the index then; only that behind the new beginning can be found."""
    table = PageTable(16, SIZE)
    run(table, table.create(prompt(*range(8))))
    log = table.watch(lambda: None)
    replay = Replay.of(table, log)
    table._pool.index.remove([1])  # as an eviction that takes a parent before its child
    run(table, table.create(prompt(*range(8))))
    replay.take(log.drain())
    assert {block.place for block in replay.blocks.values()} == set(findable(table).values()) == {3, 4}


def test_a_batch_that_is_taken_back_tells_nothing() -> None:
    table = PageTable(8, SIZE)
    wakes: list[int] = []
    log = table.watch(lambda: wakes.append(1))
    make = Create(np.array([8]), np.arange(8, dtype=np.int32), np.array([0]), b"")
    with pytest.raises(Refused):
        execute(table, [make, Commit(np.array([1]), np.array([8])), Free(np.array([99]))], atomic=True)
    assert log.drain() == []
    assert log.stored_blocks() == []
    execute(table, [make], atomic=True)
    assert [type(event) for event in log.drain()] == [SequenceCreated, TablesChanged]
    assert len(wakes) == 2  # the first of them in vain
