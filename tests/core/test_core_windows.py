"""Windows and sinks: what no later position sees is given up. A block holds 4 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from core_model import prompt, run, snapshot

from block_manager_svc.core import PageTable
from block_manager_svc.core.admission import Verdict
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, SequenceNotFound


@pytest.fixture
def table() -> PageTable:
    return PageTable(32, 4, num_host=16)


def entries(table: PageTable, sequence: int) -> list[int]:
    return table.tables([sequence]).indices.tolist()


def given_up(table: PageTable, sequence: int) -> list[int]:
    return [entry for entry, block in enumerate(entries(table, sequence)) if not block]


def computed(table: PageTable, length: int, window: int, sinks: int = 0, first: int = 0) -> int:
    sequence = table.create(prompt(*range(first, first + length)), window=window, sinks=sinks)
    table.reuse(sequence)
    run(table, sequence)
    return sequence


@pytest.mark.parametrize(
    ("length", "window", "sinks", "gone"),
    [
        (16, 0, 0, []),
        (16, 17, 0, []),
        (16, 14, 0, []),  # position 16 sees 3 to 16
        (16, 13, 0, [0]),  # ... 4 to 16
        (16, 1, 0, [0, 1, 2, 3]),  # itself alone
        (17, 6, 0, [0, 1, 2]),
        (17, 6, 1, [1, 2]),
        (17, 6, 4, [1, 2]),
        (17, 6, 5, [2]),
        (17, 6, 99, []),
    ],
)
def test_what_the_next_position_does_not_see_is_given_up(
    table: PageTable, length: int, window: int, sinks: int, gone: list[int]
) -> None:
    sequence = computed(table, length, window, sinks)
    assert given_up(table, sequence) == gone
    assert table.states().cached == len(gone)
    assert table.facts(sequence).blocks == -(-length // 4) - len(gone)
    assert table.check() == []


def test_a_long_sequence_holds_no_more_than_its_window_and_sinks(table: PageTable) -> None:
    sequence = computed(table, 4, window=8, sinks=2)
    for token in range(200):
        table.grow([sequence], [1], [token], [0])
        table.commit([sequence], [5 + token])
        assert table.facts(sequence).blocks <= 1 + 3
    assert table.check() == []
    table.free([sequence])
    assert table.states().active == table.states().sealed == 0


def test_two_that_share_blocks_and_whose_windows_have_wrapped_give_each_back_once(table: PageTable) -> None:
    a = computed(table, 14, window=20)
    (b,) = table.fork(a).tolist()
    for sequence in (a, b):
        table.grow([sequence], [20], range(20), [0])
        table.commit([sequence], [34])
    assert given_up(table, a) == given_up(table, b) == [0, 1, 2]
    assert table.check() == []
    table.free([a, b])
    before = snapshot(table)
    with pytest.raises(SequenceNotFound):
        table.free([a])
    assert snapshot(table) == before
    assert (table.states().active, table.states().sealed) == (0, 0)
    assert table.check() == []


def test_one_of_two_holders_gives_up_and_the_other_keeps(table: PageTable) -> None:
    a = computed(table, 16, window=0)
    held = entries(table, a)
    b = table.create(prompt(*range(17)), window=5)
    assert table.reuse(b) == 16
    assert entries(table, b) == [0, 0, 0, held[3]]
    assert table.tables([a]).refcount.tolist() == [1, 1, 1, 2]
    run(table, b)
    assert entries(table, a) == held
    assert table.check() == []


def test_who_begins_with_a_cached_prefix_takes_what_it_sees(table: PageTable) -> None:
    table.free([computed(table, 16, window=0)])
    full = table.admission(prompt(*range(17)))
    told = table.admission(prompt(*range(17)), window=5, sinks=1)
    assert (full.verdict, full.cached, full.needed) == (Verdict.OK, 16, 5)
    assert (told.verdict, told.cached, told.needed) == (Verdict.OK, 16, 3)
    begun = table.begin([17, 17], [*range(17), *range(17)], [0, 0], window=5, sinks=1)
    assert begun.cached.tolist() == [16, 16]
    for sequence in begun.sequences.tolist():
        assert given_up(table, sequence) == [1, 2]
    assert table.states().cached == 2
    table.commit(begun.sequences, [17, 17])
    assert table.check() == []


def test_what_was_given_up_stays_findable_and_is_chained_on(table: PageTable) -> None:
    sequence = computed(table, 16, window=4)
    table.grow([sequence], [8], range(16, 24), [0])
    table.commit([sequence], [24])
    reader = table.create(prompt(*range(25)))
    assert table.match(reader).tokens == 24


def test_behind_what_was_evicted_nothing_is_indexed(table: PageTable) -> None:
    sequence = computed(table, 16, window=4)
    other = table.create(prompt(*range(100, 228)))
    table.free([table.begin([112], range(100, 212), [0]).sequences[0]])
    table.free([other])
    table.reset_cache()
    table.grow([sequence], [8], range(16, 24), [0])
    table.commit([sequence], [24])
    reader = table.create(prompt(*range(25)))
    assert table.match(reader).tokens == 0
    assert table.check() == []


def test_a_cut_that_would_see_what_was_given_up_is_refused_and_others_are_not(table: PageTable) -> None:
    sequence = computed(table, 20, window=6)
    assert given_up(table, sequence) == [0, 1, 2]
    before = snapshot(table)
    with pytest.raises(FailedPrecondition) as refusal:
        table.truncate([sequence], [16])
    assert (refusal.value.reason, refusal.value.numbers) == (
        "WINDOW_PASSED",
        {"sequence": sequence, "length": 16, "least": 17},
    )
    assert snapshot(table) == before
    table.truncate([sequence], [17])
    assert table.check() == []


def test_a_cut_back_into_the_sinks_sees_nothing_that_was_given_up(table: PageTable) -> None:
    sequence = computed(table, 20, window=6, sinks=6)
    assert given_up(table, sequence) == [2]
    table.truncate([sequence], [7])
    assert (given_up(table, sequence), table.facts(sequence).blocks) == ([], 2)
    table.grow([sequence], [10], range(10), [0])
    table.commit([sequence], [17])
    assert given_up(table, sequence) == [2]
    assert table.check() == []


def test_children_have_the_window_of_their_parent(table: PageTable) -> None:
    parent = computed(table, 17, window=6, sinks=1)
    a, b = table.fork(parent, 2).tolist()
    assert given_up(table, a) == [1, 2]
    table.free([parent])
    table.grow([a, b], [4, 4], range(8), [0, 0])
    table.commit([a, b], [21, 21])
    assert given_up(table, b) == [1, 2, 3]
    table.free([a, b])
    assert table.check() == []


def test_who_is_dropped_begins_anew_and_gives_up_again(table: PageTable) -> None:
    sequence = computed(table, 17, window=6)
    table.drop([sequence])
    assert table.reuse(sequence) == 16
    assert given_up(table, sequence) == [0, 1, 2][: (16 + 1 - 6) // 4]
    run(table, sequence)
    assert given_up(table, sequence) == [0, 1, 2]
    assert table.check() == []


def test_what_is_left_moves_to_the_host_and_back_and_down(table: PageTable) -> None:
    sequence = computed(table, 17, window=6, sinks=1)
    (child,) = table.fork(sequence).tolist()
    out = table.swap([sequence, child], [])
    assert out.ops.src.size == 3
    assert table.facts(child).host_blocks == 3
    assert table.check() == []
    (late,) = table.fork(child).tolist()
    table.swap([], [sequence, child, late])
    table.compact([sequence, child, late], 10)
    assert given_up(table, late) == [1, 2]
    assert table.check() == []
    table.free([sequence, child, late])
    assert table.check() == []


def test_slots_of_what_was_given_up_are_refused(table: PageTable) -> None:
    other = computed(table, 4, window=0, first=50)
    sequence = computed(table, 17, window=6, sinks=1)
    assert table.slots([sequence], [12], [17])[1].size == 5
    assert table.slots([sequence], [0], [4])[1].size == 4
    with pytest.raises(FailedPrecondition) as refusal:
        table.slots([other, sequence], [0, 3], [4, 17])
    assert (refusal.value.reason, refusal.value.numbers) == (
        "WINDOW_PASSED",
        {"sequence": sequence, "length": 4, "least": 12},
    )


@pytest.mark.parametrize(("window", "sinks"), [(-1, 0), (1, -1), (1 << 31, 0), (1, 1 << 31)])
def test_windows_that_cannot_be_are_refused(table: PageTable, window: int, sinks: int) -> None:
    before = snapshot(table)
    for command in (
        lambda: table.create(prompt(1), window=window, sinks=sinks),
        lambda: table.begin([1], [1], [0], window=window, sinks=sinks),
        lambda: table.admission([1], window=window, sinks=sinks),
    ):
        with pytest.raises(InvalidArgument) as refusal:
            command()
        assert refusal.value.reason == "WINDOW_OUT_OF_RANGE"
    assert snapshot(table) == before


def test_the_audit_sees_entries_that_are_null_or_not_where_they_should(table: PageTable) -> None:
    sequence = computed(table, 17, window=6, sinks=1)
    s = table._sequences
    s.gone[s.row(sequence)] = 2
    assert any("entry 2 of sequence 1 is null, entries 1 to 2 are given up" in line for line in table.check())
    s.gone[s.row(sequence)] = 4
    assert any("entry 3 of sequence 1 is block" in line for line in table.check())
    s.gone[s.row(sequence)] = 3
    s.tables.values(s.row(sequence), 5)[0] = 0
    assert any("entry 0 of sequence 1 is null" in line for line in table.check())


def test_a_batch_gives_up_for_each_of_its_rows(table: PageTable) -> None:
    rows = [computed(table, 8, window=window, first=first) for window, first in ((5, 0), (0, 20), (1, 40))]
    table.grow(rows, [4] * 3, range(12), [0] * 3)
    changed = table.changed(rows)
    table.commit(rows, [12] * 3)
    assert [given_up(table, row) for row in rows] == [[0, 1], [], [0, 1, 2]]
    assert (table.changed(rows) > changed).tolist() == [True, False, True]
    assert np.count_nonzero(table.tables(rows).indices == 0) == 5
    assert table.check() == []
