"""Compaction on small cases: 15 blocks of 4 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from core_model import prompt, run

from block_manager_svc.core import PageTable
from block_manager_svc.core.results import Moved
from block_manager_svc.core.step import OpKind


@pytest.fixture
def table() -> PageTable:
    """Sequence 2 in blocks 3, 4 and 5, sequence 4 in 8; 1, 2, 6 and 7 are free again."""
    table = PageTable(16, 4)
    for tokens in (range(2), range(10, 12)):
        run(table, table.create(prompt(*tokens)))
    run(table, table.create(prompt(*range(20, 30))))
    for tokens in (range(30, 32), range(40, 42), range(50, 52)):
        run(table, table.create(prompt(*tokens)))
    table.free([1, 2, 4, 5])
    assert [entries(table, i) for i in (3, 6)] == [[3, 4, 5], [8]]
    return table


def entries(table: PageTable, sequence: int) -> list[int]:
    return table.tables([sequence]).indices.tolist()


def copies(moved: Moved) -> list[tuple[int, int]]:
    assert (moved.ops.kind == OpKind.COPY).all()
    return list(zip(moved.ops.src.tolist(), moved.ops.dst.tolist(), strict=True))


def test_the_highest_blocks_move_into_the_lowest_free_ones(table: PageTable) -> None:
    moved = table.compact([3, 6], 100)
    assert copies(moved) == [(8, 1), (5, 2)]
    assert moved.changed.tolist() == [3, 6]
    assert (entries(table, 3), entries(table, 6)) == ([3, 4, 2], [1])
    assert copies(table.compact([3, 6], 100)) == []
    assert table.check() == []


def test_a_step_moves_no_more_than_it_may(table: PageTable) -> None:
    assert copies(table.compact([3, 6], 1)) == [(8, 1)]
    assert copies(table.compact([3, 6], 1)) == [(5, 2)]
    assert copies(table.compact([3, 6], 0)) == []


def test_blocks_that_others_hold_stay_where_they_are(table: PageTable) -> None:
    (child,) = table.fork(3).tolist()
    assert copies(table.compact([3, 6], 100)) == [(8, 1)]
    assert copies(table.compact([3, child], 100)) == [(5, 2)]
    assert entries(table, 3) == entries(table, child) == [3, 4, 2]
    assert table.check() == []


def test_what_moved_is_found_pinned_and_chained_as_before(table: PageTable) -> None:
    table.pin(prompt(*range(20, 28)), until=9)
    table.grow([6], [2], [52, 53], [0])
    table.commit([6], [4])  # block 8 is sealed
    pin = table.pin(prompt(50, 51, 52, 53), until=9).pin
    table.compact([3, 6], 100)
    assert table.match(table.create(prompt(50, 51, 52, 53, 54))).blocks == 1
    table.grow([6], [4], [54, 55, 56, 57], [0])
    table.commit([6], [8])
    assert table.match(table.create(prompt(*range(50, 59)))).blocks == 2
    table.free([6])
    table.unpin([pin])
    table.free([3])
    table.advance(9)
    assert table.check() == []


def test_a_swapped_out_sequence_does_not_move() -> None:
    table = PageTable(16, 4, num_host=8)
    for tokens in (range(4), range(10, 14)):
        run(table, table.create(prompt(*tokens)))
    table.reset_cache()
    table.free([1])
    table.swap([2], [])
    assert copies(table.compact([2], 100)) == []
    assert table.check() == []


def test_repeated_it_leaves_what_it_may_move_as_low_as_it_can_lie() -> None:
    table, draw = PageTable(400, 4), np.random.default_rng(1)
    sequences = [table.create(prompt(*draw.integers(0, 9, 20))) for _ in range(60)]
    for sequence in sequences:
        run(table, sequence)
    gone = draw.permutation(sequences)[:40].tolist()
    table.free(gone)
    table.reset_cache()
    left = [sequence for sequence in sequences if sequence not in gone]
    steps = 0
    while copies(table.compact(left, 7)):
        steps += 1
    used = np.unique(table.tables(left).indices)
    assert steps > 5
    assert used.tolist() == list(range(1, used.size + 1))
    assert table.check() == []
