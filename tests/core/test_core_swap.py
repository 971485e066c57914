"""Swap between device and host on small cases: 8 blocks of 4 tokens, 6 host slots of which 4 can be used at rest.

On the host, slot h is place 8 + h.
"""

from __future__ import annotations

import numpy as np
import pytest
from core_model import prompt, run, snapshot

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, OutOfBlocks, ResourceExhausted
from block_manager_svc.core.results import Moved
from block_manager_svc.core.step import OpKind

OUT, IN = int(OpKind.SWAP_OUT), int(OpKind.SWAP_IN)


@pytest.fixture
def table() -> PageTable:
    return PageTable(8, 4, num_host=6)


def computed(table: PageTable, *tokens: int) -> int:
    sequence = table.create(prompt(*tokens))
    run(table, sequence)
    return sequence


def moves(swapped: Moved) -> list[tuple[int, int, int]]:
    ops = swapped.ops
    return list(zip(ops.kind.tolist(), ops.src.tolist(), ops.dst.tolist(), strict=True))


def entries(table: PageTable, sequence: int) -> list[int]:
    return table.tables([sequence]).indices.tolist()


def free(table: PageTable) -> tuple[int, int]:
    """Free blocks of the device, and of the host."""
    return table.states().free, table.host_states().free


def test_what_is_swapped_out_lies_on_the_host_and_comes_back_in_order(table: PageTable) -> None:
    a = computed(table, *range(10))
    assert free(table) == (4, 5)
    gone = table.swap([a], [])
    assert moves(gone) == [(OUT, 1, 1), (OUT, 2, 2), (OUT, 3, 3)]
    assert gone.changed.tolist() == [a]
    assert entries(table, a) == [9, 10, 11]
    assert free(table) == (7, 2)
    computed(table, 50, 51)
    back = table.swap([], [a])
    assert moves(back) == [(IN, 1, 2), (IN, 2, 3), (IN, 3, 4)]
    assert entries(table, a) == [2, 3, 4]
    assert (table.computed([a]).tolist(), table.counters.swapped_out_blocks) == ([10], 3)
    assert table.check() == []


def test_a_swapped_out_sequence_is_not_written_before_it_is_back(table: PageTable) -> None:
    a = computed(table, *range(10))
    table.swap([a], [])
    before = snapshot(table)
    for command in (
        lambda: table.extend([a], [10]),
        lambda: table.blocks_needed([a], [10]),
        lambda: table.commit([a], [10]),
        lambda: table.grow([a], [0], [], [1]),
    ):
        with pytest.raises(FailedPrecondition) as refusal:
            command()
        assert (refusal.value.reason, refusal.value.numbers) == ("SEQUENCE_SWAPPED_OUT", {"sequence": a})
    assert snapshot(table) == before


def test_only_what_is_computed_is_kept_on_the_host(table: PageTable) -> None:
    a = computed(table, *range(5))
    table.grow([a], [2], [5, 6], [8])
    assert entries(table, a) == [1, 2, 3, 4]
    assert moves(table.swap([a], [])) == [(OUT, 1, 1), (OUT, 2, 2)]
    assert entries(table, a) == [9, 10]
    table.swap([], [a])
    assert table.tables([a]).last_page_len.tolist() == [1]
    assert table.length([a]).tolist() == [7]
    assert table.check() == []


def test_a_shared_block_moves_once_when_its_last_holder_leaves(table: PageTable) -> None:
    a = computed(table, *range(8))
    (b,) = table.fork(a).tolist()
    table.append([b], [8])
    run(table, b)
    assert moves(table.swap([a], [])) == []  # b needs both blocks
    assert entries(table, a) == [1, 2]
    assert moves(table.swap([b], [])) == [(OUT, 1, 1), (OUT, 2, 2), (OUT, 3, 3)]
    assert (entries(table, a), entries(table, b)) == ([9, 10], [9, 10, 11])
    assert table.check() == []
    back = table.swap([], [a])
    assert moves(back) == [(IN, 1, 1), (IN, 2, 2)]
    assert back.changed.tolist() == [a, b]
    assert (entries(table, a), entries(table, b)) == ([1, 2], [1, 2, 11])
    assert moves(table.swap([], [b])) == [(IN, 3, 3)]
    assert table.check() == []


def test_what_had_to_stay_is_moved_by_another_swap_when_nothing_needs_it_any_more(table: PageTable) -> None:
    a = computed(table, *range(8))
    (b,) = table.fork(a).tolist()
    table.swap([a], [])
    table.free([b])
    assert entries(table, a) == [1, 2]
    assert moves(table.swap([a], [])) == [(OUT, 1, 1), (OUT, 2, 2)]
    assert moves(table.swap([a], [])) == []
    assert table.check() == []


def test_a_pinned_block_stays_on_the_device_and_is_found(table: PageTable) -> None:
    a = computed(table, *range(8))
    pin = table.pin(prompt(*range(4)), until=9).pin
    assert moves(table.swap([a], [])) == [(OUT, 2, 1)]
    assert table.match(table.create(prompt(*range(9)))).blocks == 1
    table.unpin([pin])
    assert moves(table.swap([a], [])) == [(OUT, 1, 2)]
    assert table.check() == []


def test_what_is_on_the_host_is_a_miss_until_it_is_back_and_then_found_with_all_behind_it(table: PageTable) -> None:
    a = computed(table, *range(12))
    reader = table.create(prompt(*range(13)))
    table.swap([a], [])
    assert table.match(reader).blocks == 0
    table.swap([], [a])
    assert table.match(reader).blocks == 3
    table.append([a], [12])
    table.append([a], [13])
    table.append([a], [14])
    table.append([a], [15])
    run(table, a)
    assert table.match(table.create(prompt(*range(17)))).blocks == 4
    assert table.check() == []


def test_a_swapped_out_sequence_can_be_forked_truncated_dropped_and_freed(table: PageTable) -> None:
    a = computed(table, *range(10))
    table.swap([a], [])
    b, c = table.fork(a, 2).tolist()
    assert entries(table, c) == [9, 10, 11]
    table.truncate([a], [4])
    assert (entries(table, a), table.computed([a]).tolist()) == ([9], [4])
    table.drop([b])
    assert free(table) == (7, 2)
    table.free([c])
    assert free(table) == (7, 4)
    assert moves(table.swap([], [a])) == [(IN, 1, 1)]
    run(table, b)  # dropped, it computes again as any other
    assert entries(table, b)[1:] == [3, 4]
    table.free([a, b])
    assert free(table)[1] == 5
    assert table.check() == []


def test_children_of_a_swapped_out_sequence_copy_on_write_when_they_are_back(table: PageTable) -> None:
    a = computed(table, *range(6))
    table.swap([a], [])
    (b,) = table.fork(a).tolist()
    assert moves(table.swap([], [a, b])) == [(IN, 1, 1), (IN, 2, 2)]
    table.append([a], [6])
    table.append([b], [7])
    extended = table.extend([a, b], [7, 7])
    assert (extended.copy_src.tolist(), extended.copy_dst.tolist()) == ([2], [3])
    assert table.check() == []


def test_a_full_host_refuses_and_nothing_changes(table: PageTable) -> None:
    a, b = computed(table, *range(12)), computed(table, *range(50, 58))
    table.swap([a], [])
    before = snapshot(table)
    with pytest.raises(ResourceExhausted) as refusal:
        table.swap([b], [])
    assert (refusal.value.reason, refusal.value.numbers) == ("OUT_OF_HOST_SLOTS", {"needed": 2, "available": 1})
    assert snapshot(table) == before


@pytest.mark.parametrize("num_host", [0, 1, 2])
def test_without_host_slots_nothing_is_swapped(num_host: int) -> None:
    table = PageTable(8, 4, num_host=num_host)
    a = computed(table, *range(4))
    with pytest.raises(ResourceExhausted, match="0 of its slots"):
        table.swap([a], [])
    assert table.check() == []


def test_a_full_device_refuses_and_nothing_changes(table: PageTable) -> None:
    a = computed(table, *range(8))
    table.swap([a], [])
    computed(table, *range(50, 74))
    before = snapshot(table)
    with pytest.raises(OutOfBlocks) as refusal:
        table.swap([], [a])
    assert refusal.value.numbers == {"needed": 2, "available": 1}
    assert snapshot(table) == before


def test_cached_blocks_make_room_for_what_comes_in(table: PageTable) -> None:
    a = computed(table, *range(8))
    table.swap([a], [])
    table.free([computed(table, *range(50, 78))])
    assert table.states().cached == 7
    assert moves(table.swap([], [a])) == [(IN, 1, 6), (IN, 2, 7)]
    assert table.counters.evicted_blocks == 2
    assert table.check() == []


def test_a_full_device_and_a_full_host_exchange_in_an_order_that_works_move_by_move() -> None:
    table = PageTable(5, 2, num_host=6)
    a, b = computed(table, *range(8)), table.create(prompt(*range(50, 58)))
    table.swap([a], [])
    run(table, b)
    assert free(table) == (0, 1)  # the spare slot
    content = {("device", i): f"b{i}" for i in range(1, 5)} | {("host", i): f"a{i}" for i in range(1, 5)}
    held = set(content)
    swapped = table.swap([b], [a])
    assert len(moves(swapped)) == 8
    for kind, src, dst in moves(swapped):
        source, target = (("device", src), ("host", dst)) if kind == OUT else (("host", src), ("device", dst))
        assert target not in held  # nothing is overwritten that is still needed
        held.remove(source)
        held.add(target)
        content[target] = content.pop(source)
    assert [content["device", block] for block in entries(table, a)] == ["a1", "a2", "a3", "a4"]
    assert [content["host", place - 5] for place in entries(table, b)] == ["b1", "b2", "b3", "b4"]
    assert table.check() == []


def test_a_block_that_one_brings_and_another_leaves_behind_stays(table: PageTable) -> None:
    a = computed(table, *range(8))
    (b,) = table.fork(a).tolist()
    table.swap([a], [])
    assert moves(table.swap([b], [a])) == []
    assert (entries(table, a), entries(table, b)) == ([1, 2], [1, 2])
    assert table.check() == []


def test_one_sequence_cannot_go_and_come_at_once(table: PageTable) -> None:
    a = computed(table, *range(4))
    with pytest.raises(InvalidArgument, match="twice"):
        table.swap([a], [a])


def test_a_sequence_on_the_device_is_in_already(table: PageTable) -> None:
    a = computed(table, *range(4))
    assert moves(table.swap([], [a])) == []
    assert moves(table.swap([], [])) == []


def test_what_a_swap_costs_does_not_follow_from_the_sequences_that_it_is_not_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tables of others are neither read nor written: their rows are not named."""
    table = PageTable(4096, 4, num_host=2048)
    others = [computed(table, *range(i * 100, i * 100 + 8)) for i in range(200)]
    table.swap(others, [])
    a = computed(table, *range(90_000, 90_016))
    read: set[int] = set()
    arena = table._sequences.tables
    values, gather = arena.values, arena.gather
    monkeypatch.setattr(type(arena), "values", lambda self, row, n: read.add(row) or values(row, n))
    monkeypatch.setattr(type(arena), "gather", lambda self, rows, *more: read.update(rows) or gather(rows, *more))
    table.swap([a], [])
    table.swap([], [a])
    assert {int(row) for row in read} == {table._sequences.row(a)}


def test_host_slots_are_numbered_from_the_end_of_the_device(table: PageTable) -> None:
    a = computed(table, *range(4))
    table.swap([a], [])
    assert entries(table, a) == [table.num_blocks + 1]
    assert np.asarray(table.tables([a]).refcount).tolist() == [1]


def test_what_is_shared_on_the_host_is_counted_as_children_come_and_go() -> None:
    table = PageTable(12, 4, num_host=12)
    for first in (100, 200):
        run(table, table.create(prompt(*range(first, first + 9))))
    table.swap([1, 2], [])
    forks = [(1, 1), (2, 1), (2, 2), (1, 1)]
    children = [child for parent, count in forks for child in table.fork(parent, count).tolist() if not table.check()]
    assert len(children) == 5
    for child in children:
        table.free([child])
        assert table.check() == []
