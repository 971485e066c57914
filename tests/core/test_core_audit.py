"""Each invariant is broken by hand, and check() says so with the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from core_model import prompt, run

from block_manager_svc.core import PageTable


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.fixture
def table() -> PageTable:
    """Sequences 1 and 2 share blocks 1 and 2 (sealed) and 3 (partial); 4 and 5 are cached; 6 to 11 are free."""
    table = PageTable(12, 4)
    run(table, table.create(prompt(*range(10))))
    table.fork(1)
    run(table, table.create(prompt(*range(50, 58))))
    table.free([3])
    assert table.check() == []
    return table


def row(table: PageTable, sequence: int) -> int:
    return table._sequences.row(sequence)


def set_column(name: str, sequence: int, value: int) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        getattr(table._sequences, name)[row(table, sequence)] = value

    return damage


def set_entry(sequence: int, place: int, block: int) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        table._sequences.tables.values(row(table, sequence), 3)[place] = block

    return damage


def set_token(sequence: int, position: int, token: int) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        table._sequences.tokens.values(row(table, sequence), 10)[position] = token

    return damage


def set_block(name: str, block: int, value: int) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        getattr(table._pool, name)[block] = value

    return damage


def lose_key(table: PageTable) -> None:
    table._pool.index.remove([2])


def lose_node(table: PageTable) -> None:
    index = table._pool.index
    del index._nodes[index._keys[2] or b""]


def forge_key(table: PageTable) -> None:
    table._pool.index._keys[2] = table._pool.index._keys[1]


def reroot(table: PageTable) -> None:
    """Block 2 is found behind the root now."""
    index = table._pool.index
    index.remove([2])
    index.insert([index.root(b"")], [1], np.arange(4, 8, dtype=np.int32).tobytes(), [2])


def set_extra(sequence: int, position: int) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        table._sequences.extra[sequence] = ((position, b"key"),)

    return damage


def cut_list(table: PageTable) -> None:
    table._pool.cached._list._next[5] = 5  # type: ignore[attr-defined]


def overlap_tokens(table: PageTable) -> None:
    s = table._sequences.tokens
    s.start[row(table, 2)] = s.start[row(table, 1)] + 4


def shrink(name: str) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        arena = getattr(table._sequences, name)
        arena.capacity[row(table, 1)] = 2

    return damage


def set_slot(part: str, name: str, value: int) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        setattr(getattr(table, part) if part != "_allocator" else table._pool.allocator, name, value)

    return damage


def set_use(side: str, name: str, value: int) -> Callable[[PageTable], None]:
    def damage(table: PageTable) -> None:
        setattr(getattr(table._pool, side), name, value)

    return damage


def free_a_held_block(table: PageTable) -> None:
    table._pool.allocator.free(array(3))


def lose_a_free_block(table: PageTable) -> None:
    table._pool.allocator.allocate(1)


def free_the_null_block(table: PageTable) -> None:
    table._pool.allocator.free(array(0))


def cache_a_held_block(table: PageTable) -> None:
    table._pool.cached.add(array(3))


def uncache(table: PageTable) -> None:
    table._pool.cached.remove(array(4))


def hide_leaf(table: PageTable) -> None:
    table._pool.allocator._any_free[0] = 0


def reverse_blocks_of_2(table: PageTable) -> None:
    table._sequences.tables.values(row(table, 2), 3)[:] = [2, 1, 3]


def end_outside(table: PageTable) -> None:
    table._sequences.tokens._end = 20


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        # the books of blocks
        (set_block("refcount", 1, 3), r"block 1 has refcount 3, 2 table entries name it"),
        (set_block("refcount", 7, 1), r"block 7 has refcount 1, 0 table entries name it"),
        (set_block("refcount", 7, 1), r"block 7 has refcount 1 and is in 1 of free and cached"),
        (free_a_held_block, r"block 3 has refcount 2 and is in 1 of free and cached"),
        (lose_a_free_block, r"block 6 has refcount 0 and is in 0 of free and cached"),
        (lose_a_free_block, r"states of blocks add up to 11, the pool has 12"),
        (free_the_null_block, r"blocks 0 to 11 are free, the pool hands out 1 to 11"),
        (cache_a_held_block, r"block 3 has refcount 2 and is in 1 of free and cached"),
        (uncache, r"block 4 has refcount 0 and is in 0 of free and cached"),
        (uncache, r"block 4 is unreferenced: sealed, in the index, not cached"),
        (cut_list, r"block 5 is cached 2 times"),
        (set_slot("_allocator", "_free", 7), r"the bitmap has 6 free blocks, 7 are counted"),
        (set_slot("_allocator", "_lowest", 8), r"block 6 is free below 8, the lowest that may be"),
        (hide_leaf, r"leaf 0 of the bitmap has free blocks, its summary says it has none"),
        (set_use("device", "entries", 5), r"6 table entries, 5 are counted"),
        (set_use("device", "referenced", 4), r"3 referenced blocks, 4 are counted"),
        (set_use("device", "shared", 0), r"3 shared blocks, 0 are counted"),
        (set_use("device", "sealed", 1), r"2 sealed blocks, 1 are counted"),
        (set_slot("_pool", "reserved", 3), r"reservations promise 0 blocks, 3 are counted"),
        (set_slot("_pool", "withheld", 7), r"6 blocks are free, 0 are reserved and 7 above the limit"),
        # the index
        (set_block("sealed", 2, 0), r"block 2 is in the index and not sealed"),
        (set_block("sealed", 2, 0), r"block 2 of sequence 1 is full and computed, and not sealed"),
        (set_block("sealed", 4, 0), r"block 4 is unreferenced: not sealed, in the index, cached"),
        (set_block("sealed", 8, 1), r"block 8 is unreferenced: sealed, not in the index, not cached"),
        (set_block("indexed", 2, 0), r"block 2 is in the index, its mark says otherwise"),
        (lose_key, r"block 2 is not in the index, its mark says otherwise"),
        (lose_node, r"4 blocks have a key in the index, 3 can be found"),
        (forge_key, r"the index leads to block 2, which is known there by another key"),
        (reroot, r"block 2 of sequence 1 is indexed behind node \d+, the block before is \d+"),
        (set_token(1, 5, 99), r"block 2 is indexed with other content than sequence 1 has at 4"),
        # sequences
        (set_column("computed", 1, 11), r"sequence 1 has 11 computed of 10 known and 10 writable positions"),
        (set_column("writable", 1, 9), r"sequence 1 has 10 computed of 10 known and 9 writable"),
        (set_column("computed", 1, 8), r"block 3 of sequence 1 holds nothing computed: refcount 2, not sealed"),
        (set_column("computed", 1, 4), r"block 2 of sequence 1 holds nothing computed: refcount 2, sealed"),
        (set_column("blocks", 1, 2), r"sequence 1 has 10 writable positions in 2 blocks of 4"),
        (shrink("tokens"), r"sequence 1 has 10 tokens in room for 2"),
        (shrink("tables"), r"sequence 1 has 3 blocks in room for 2"),
        (shrink("tables"), r"the tables have capacities of 6 in all, 8 are counted"),
        (overlap_tokens, r"the tokens of rows 1 and 2 overlap at 4"),
        (end_outside, r"the tokens end at 32, of 20"),
        (set_column("node", 1, 12345), r"sequence 1 goes on from node 12345, its 2 computed blocks end in \d+"),
        (set_column("id", 2, 66 + 1), r"sequence 67 is in row 2 of 64"),
        (set_column("id", 2, 0), r"row 2 holds sequence 0, and is marked taken"),
        (set_column("id", 2, 0), r"1 sequences are alive, 2 are counted"),
        (set_slot("_sequences", "_next", 2), r"sequence 2 is alive, the next is to be 2"),
        # what tables share
        (set_entry(1, 2, 1), r"the table of sequence 1 names block 1 twice"),
        (set_entry(1, 2, 99), r"the table of sequence 1 names block 99, outside 1 to 11"),
        (set_entry(1, 2, 0), r"entry 2 of sequence 1 is null, entries 0 to 0 are given up"),
        (set_extra(1, 5), r"block 2 is indexed with other content than sequence 1 has at 4"),
        (set_extra(2, 9), r"sequence 2 and sequence 1 share block 3, they differ before 10"),
        (set_extra(1, 99), r"sequence 1 has extra keys for positions 99 to 99, \d+ tokens"),
        (set_token(2, 9, 99), r"sequence 2 and sequence 1 share block 3, they differ before 10"),
        (reverse_blocks_of_2, r"block 2 is entry 0 of sequence 2 and 1 of sequence 1"),
    ],
)
def test_a_broken_invariant_is_told(table: PageTable, damage: Callable[[PageTable], None], sentence: str) -> None:
    damage(table)
    told = table.check()
    assert any(re.search(sentence, line) for line in told), told


@pytest.fixture
def swapped() -> PageTable:
    """Sequences 1 and 2 share host slots 1 and 2, and 2 has slot 3; 3, on the device, shares 4 and 5 with 4."""
    table = PageTable(12, 4, num_host=8)
    run(table, table.create(prompt(*range(8))))
    table.fork(1)
    table.append([2], [8])
    run(table, 2)
    run(table, table.create(prompt(*range(50, 58))))
    table.fork(3)
    table.swap([1, 2, 4], [])
    assert table.check() == []
    return table


def set_host(slot: int, name: str, value: int) -> Callable[[PageTable], None]:
    return lambda table: getattr(table._pool, name).__setitem__(table.num_blocks + slot, value)


def forget_holder(place: int) -> Callable[[PageTable], None]:
    return lambda table: table._residency._holders[place].pop()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (set_host(1, "refcount", 3), r"block 13 has refcount 3, 2 table entries name it"),
        (set_host(1, "refcount", 3), r"host slot 1 is also held by a sequence on the device"),
        (set_host(6, "refcount", 1), r"host slot 6 has refcount 1 and is free"),
        (lambda table: table._pool.host_allocator.allocate(1), r"host slot 4 has refcount 0 and is taken"),
        (lambda table: table._pool.host_allocator.allocate(4), r"the spare host slot is taken"),
        (set_host(6, "sealed", 1), r"host slot 6 is unreferenced, and sealed or in the index"),
        (set_host(1, "sealed", 0), r"block 13 is in the index and not sealed"),
        (set_use("host", "entries", 9), r"5 table entries on the host, 9 are counted"),
        (set_use("host", "referenced", 9), r"3 referenced host slots, 9 are counted"),
        (set_use("host", "shared", 9), r"2 shared host slots, 9 are counted"),
        (set_use("host", "sealed", 9), r"2 sealed host slots, 9 are counted"),
        (lambda table: table._pool.host_allocator.free(array(1)), r"states of host slots add up to 9, the pool has 8"),
        (set_column("away", 1, 0), r"sequence 1 is on the device, its table names host slot 1"),
        (set_column("away", 3, 1), r"4 sequences are swapped out, 3 are counted"),
        (set_column("writable", 2, 12), r"sequence 2 is swapped out, and writable from 9 to 12"),
        (set_entry(2, 2, 12), r"the table of sequence 2 names block 12, outside 1 to 11"),
        (forget_holder(13), r"place 13 is held by swapped-out sequences \[1, 2\], known are \[1\]"),
        (forget_holder(4), r"place 4 is held by swapped-out sequences \[4\], known are \[\]"),
        (
            lambda table: table._residency._holders.__setitem__(7, [1]),
            r"place 7 is held by nobody that is swapped out",
        ),
    ],
)
def test_a_broken_invariant_of_the_host_is_told(
    swapped: PageTable, damage: Callable[[PageTable], None], sentence: str
) -> None:
    damage(swapped)
    told = swapped.check()
    assert any(re.search(sentence, line) for line in told), told


@pytest.fixture
def tenants() -> PageTable:
    """Tenants 1 and 2 share blocks 1 and 2; 1 has 3 alone, and 4 and 5 in the cache; 2 has 6 and a floor of 4."""
    table = PageTable(12, 4)
    a = table.create(prompt(*range(10)), tenant=1)
    run(table, a)
    b = table.create(prompt(*range(50, 58)), tenant=1)
    run(table, b)
    table.free([b])
    c = table.create(prompt(*range(12)), tenant=2)
    table.reuse(c)
    run(table, c)
    table.set_quota(2, floor=4)
    assert table.check() == []
    return table


def set_account(name: str, tenant: int, value: int) -> Callable[[PageTable], None]:
    return lambda table: getattr(table._pool.accounts, name).__setitem__(tenant, value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (set_account("charged", 1, 9), r"tenant 1 has 5 blocks charged, 9 are counted"),
        (set_account("joint", 2, 0), r"tenant 2 has 2 blocks joint, 0 are counted"),
        (set_account("host", 1, 2), r"tenant 1 has 0 blocks host, 2 are counted"),
        (set_account("host_joint", 1, 2), r"tenant 1 has 0 blocks host_joint, 2 are counted"),
        (set_account("reserved", 1, 2), r"2 blocks are reserved for tenants, 0 in all"),
        (set_account("floor", 1, 11), r"tenants are guaranteed 6 blocks more than there are"),
        (set_account("tenant_of", 3, 2), r"block 3 is charged to tenant 2, tenant \{1\} alone holds it"),
        (set_account("tenant_of", 4, 2), r"block 4 of another tenant is in the cache of tenant 1"),
    ],
)
def test_a_broken_invariant_of_tenants_is_told(
    tenants: PageTable, damage: Callable[[PageTable], None], sentence: str
) -> None:
    damage(tenants)
    told = tenants.check()
    assert any(re.search(sentence, line) for line in told), told


def test_tokens_that_sharers_have_not_computed_may_differ(table: PageTable) -> None:
    table.append([1, 2], [70, 71])
    assert table.check() == []
