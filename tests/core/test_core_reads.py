"""What can be asked of sequences: facts, slots of ranges, revisions. A block holds 4 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from core_model import prompt, run, snapshot

from block_manager_svc.core import PageTable, Retention
from block_manager_svc.core.batch import execute
from block_manager_svc.core.commands import Create, Expecting, Free, Swap, Truncate
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, SequenceNotFound
from block_manager_svc.core.results import Facts, Layout


@pytest.fixture
def table() -> PageTable:
    """Sequence 1 has 10 tokens in 3 blocks, all computed; 2 is its child."""
    table = PageTable(16, 4, num_host=10)
    run(table, table.create(prompt(*range(10)), retention=Retention(70)))
    table.fork(1)
    return table


def test_facts_of_one_sequence(table: PageTable) -> None:
    assert table.facts(2) == Facts(
        tokens=10,
        computed=10,
        writable=10,
        blocks=3,
        shared_blocks=3,
        host_blocks=0,
        swapped_out=False,
        table_revision=int(table.changed([2])[0]),
        priority=70,
    )
    table.grow([1], [1], [7], [4])
    grown = table.facts(1)
    assert (grown.tokens, grown.computed, grown.writable, grown.blocks, grown.shared_blocks) == (11, 10, 15, 4, 2)
    other = table.create(prompt(1))
    assert table.facts(other).priority is None
    table.swap([1, 2], [])
    assert (table.facts(2).host_blocks, table.facts(2).swapped_out) == (3, True)
    with pytest.raises(SequenceNotFound):
        table.facts(9)


def test_slots_of_ranges_are_those_of_the_tables(table: PageTable) -> None:
    table.grow([1], [1], [7], [4])
    for sequence, writable in ((1, 15), (2, 10)):
        blocks = table.tables([sequence]).indices.tolist()
        expected = [blocks[position // 4] * 4 + position % 4 for position in range(writable)]
        for first in range(writable):
            indptr, slots = table.slots([sequence], [first], [writable])
            assert (indptr.tolist(), slots.tolist()) == ([0, writable - first], expected[first:])
    indptr, slots = table.slots([2, 1], [0, 3], [0, 5])
    assert (indptr.tolist(), slots.size) == ([0, 0, 2], 2)


@pytest.mark.parametrize(("first", "upto"), [(-1, 3), (3, 2), (0, 11)])
def test_slots_that_are_not_there_are_refused(table: PageTable, first: int, upto: int) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        table.slots([1], [first], [upto])
    assert (refusal.value.reason, refusal.value.numbers["limit"]) == ("POSITION_NOT_WRITABLE", 10)


def test_a_swapped_out_sequence_has_no_slots(table: PageTable) -> None:
    table.swap([1, 2], [])
    with pytest.raises(FailedPrecondition, match="on the host"):
        table.slots([1], [0], [1])


def test_a_command_that_expects_another_revision_changes_nothing(table: PageTable) -> None:
    one, two = (int(revision) for revision in table.changed([1, 2]))
    before = snapshot(table)
    ids = np.array([2, 1])
    stale, made = execute(
        table,
        [
            Expecting(ids, np.array([two, one + 1]), Truncate(ids, np.array([1, 1]))),
            Expecting(ids[:0], np.array([3]), Create(np.array([1]), prompt(1), np.array([0]), b"")),
        ],
    ).results
    assert isinstance(stale, FailedPrecondition)
    assert (stale.reason, stale.numbers) == (
        "TABLE_REVISION_STALE",
        {"sequence": 1, "expected": one + 1, "revision": one},
    )
    assert isinstance(made, InvalidArgument)
    assert snapshot(table) == before
    swap = Expecting(ids, np.array([two, one]), Swap(ids, ids[:0]))
    (swapped,) = execute(table, [swap]).results
    assert not isinstance(swapped, Exception)
    (gone,) = execute(table, [Expecting(np.array([9]), np.array([1]), Free(np.array([9])))]).results
    assert isinstance(gone, SequenceNotFound)


def test_a_prompt_of_no_token_has_no_admission(table: PageTable) -> None:
    with pytest.raises(InvalidArgument, match="at least one token"):
        table.admission([])


def test_the_layout_tells_runs_of_free_blocks(table: PageTable) -> None:
    assert table.layout() == Layout(1, 12, 3)
    other = table.create(prompt(*range(50, 62)))
    run(table, other)
    table.free([1, 2])
    table.reset_cache()
    assert table.layout() == Layout(2, 9, 6)
    table.free([other])
    table.reset_cache()
    assert table.layout() == Layout(1, 15, 0)
    run(table, table.create(prompt(*range(60))))
    assert table.layout() == Layout(0, 0, 15)
