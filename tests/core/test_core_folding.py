"""Folding: what doubles a canonical block gives way to it. A block holds 4 tokens."""

from __future__ import annotations

import pytest
from core_model import prompt, run

from block_manager_svc.core import PageTable


@pytest.fixture
def table() -> PageTable:
    return PageTable(16, 4, num_host=10, folding=True)


def entries(table: PageTable, sequence: int) -> list[int]:
    return table.tables([sequence]).indices.tolist()


def test_equal_prompts_that_were_computed_at_once_share_their_blocks_in_the_end(table: PageTable) -> None:
    a, b = table.begin([9, 9], [*range(9), *range(9)], [0, 0]).sequences.tolist()
    assert (entries(table, a), entries(table, b)) == ([1, 2, 3], [4, 5, 6])
    assert table.commit([a, b], [9, 9]).tolist() == [b]
    assert (entries(table, a), entries(table, b)) == ([1, 2, 3], [1, 2, 6])
    assert table.changed([b])[0] == table.revision
    assert table.states().free == 11
    table.grow([a, b], [1, 1], [7, 8], [0, 0])  # the open blocks are each one's own
    assert table.check() == []


def test_who_comes_after_the_first_has_gone_takes_it_out_of_the_cache(table: PageTable) -> None:
    a, b = table.begin([5, 5], [*range(5), *range(5)], [0, 0]).sequences.tolist()
    table.commit([a], [5])
    table.free([a])
    assert table.states().cached == 1
    assert table.commit([b], [5]).tolist() == [b]
    assert (entries(table, b)[0], table.states().cached, table.states().sealed) == (1, 0, 1)
    assert table.check() == []


def test_a_double_that_others_hold_stays_theirs(table: PageTable) -> None:
    a, b = table.begin([4, 4], [*range(4), *range(4)], [0, 0]).sequences.tolist()
    table.commit([a, b], [4, 3])
    (child,) = table.fork(b).tolist()
    assert table.commit([b], [4]).tolist() == [b]
    assert (entries(table, b), entries(table, child)) == ([1], [2])
    assert table.commit([child], [3]).tolist() == []
    assert table.check() == []


def test_there_is_nothing_to_fold_onto_on_the_host_or_behind_a_reset(table: PageTable) -> None:
    a, b, c = table.begin([4] * 3, [*range(4)] * 3, [0] * 3).sequences.tolist()
    table.commit([a], [4])
    table.swap([a], [])
    assert table.commit([b], [4]).tolist() == []
    table.reset_cache()
    table.grow([c], [4], range(4), [0])
    assert table.commit([c], [8]).tolist() == []
    assert table.check() == []


def test_nothing_is_folded_unless_it_is_asked_for() -> None:
    table = PageTable(16, 4)
    a, b = table.begin([9, 9], [*range(9), *range(9)], [0, 0]).sequences.tolist()
    assert table.commit([a, b], [9, 9]).tolist() == []
    assert entries(table, b) == [4, 5, 6]


def test_who_pays_for_a_block_that_two_tenants_have_computed(table: PageTable) -> None:
    a = table.create(prompt(*range(5)), b"group", tenant=1)
    b = table.create(prompt(*range(5)), b"group", tenant=2)
    table.extend([a, b], [5, 5])
    table.commit([a], [5])
    assert table.commit([b], [5]).tolist() == [b]
    assert (table.usage(1).charged, table.usage(2).charged) == (2, 2)
    table.free([a])
    run(table, table.create(prompt(9), tenant=1))
    assert table.check() == []
