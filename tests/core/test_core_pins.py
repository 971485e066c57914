"""A pinned prefix stays findable until its time is over, and is no reference. A block holds 4 tokens."""

from __future__ import annotations

import pytest
from core_model import prompt, run, snapshot

from block_manager_svc.core import PageTable, Pinned
from block_manager_svc.core.errors import InvalidArgument, NotFound, OutOfBlocks, Refused

PREFIX = prompt(*range(8))


@pytest.fixture
def table() -> PageTable:
    """Blocks 1 and 2 hold PREFIX and are cached; 3 to 7 are free."""
    table = PageTable(8, 4)
    run(table, table.create(PREFIX))
    table.free([1])
    return table


def found(table: PageTable) -> int:
    reader = table.create(prompt(*range(9)))
    tokens = table.match(reader).tokens
    table.free([reader])
    return tokens


def test_a_pinned_prefix_is_not_evicted_and_counts_as_cached_not_as_room(table: PageTable) -> None:
    assert table.pin(PREFIX, until=100) == Pinned(1, 8)
    assert (table.available(), table.states().cached, table.states().free) == (5, 2, 5)
    big = table.create(prompt(*range(50, 70)))
    run(table, big)
    assert found(table) == 8
    table.append([big], [1])
    with pytest.raises(OutOfBlocks) as refusal:
        table.extend([big], [21])
    assert refusal.value.numbers == {"needed": 1, "available": 0}
    table.unpin([1])
    assert (table.available(), table.check()) == (2, [])
    table.extend([big], [21])
    assert found(table) == 4  # the tail went first


def test_14_a_pin_whose_request_never_comes_ends_with_its_time(table: PageTable) -> None:
    table.pin(PREFIX, until=100)
    table.advance(99)
    assert table.available() == 5
    table.advance(100)
    assert table.available() == 7
    assert found(table) == 8  # it is in the cache as any other now
    with pytest.raises(NotFound, match="pin 1 is not held"):
        table.unpin([1])
    assert table.check() == []


def test_the_last_of_several_pins_counts(table: PageTable) -> None:
    table.pin(PREFIX, until=50)
    table.pin(PREFIX[:4], until=80)
    table.advance(50)
    assert table.available() == 6
    table.advance(80)
    assert (table.available(), table.check()) == (7, [])


def test_pinned_blocks_that_are_used_and_given_back_stay_pinned(table: PageTable) -> None:
    table.pin(PREFIX, until=10)
    reader = table.create(prompt(*range(9)))
    assert table.reuse(reader) == 8
    assert table.states().cached == 0
    table.free([reader])
    assert (table.states().cached, table.available(), table.check()) == (2, 5, [])


def test_a_pin_causes_no_copy_and_ends_with_the_content_that_it_held(table: PageTable) -> None:
    writer = table.create(prompt(*range(9)))
    table.reuse(writer)
    table.pin(PREFIX, until=10)
    table.truncate([writer], [6])
    grown = table.grow([writer], [2], [90, 91], [0])
    assert grown.extended.copy_src.size == 0
    assert found(table) == 4
    table.commit([writer], [8])
    table.free([writer])
    assert table.available() == 6  # block 1 is pinned, block 2 holds other tokens now
    table.advance(10)
    assert (table.available(), table.check()) == (7, [])


@pytest.mark.parametrize(
    ("command", "kind", "reason"),
    [
        (lambda t: t.pin(PREFIX, until=5), InvalidArgument, "UNTIL_PASSED"),
        (lambda t: t.pin(PREFIX[:3], until=9), NotFound, "PREFIX_NOT_CACHED"),
        (lambda t: t.pin(PREFIX, until=9, namespace=b"other"), NotFound, "PREFIX_NOT_CACHED"),
        (lambda t: t.pin([-1], until=9), InvalidArgument, "TOKEN_OUT_OF_RANGE"),
        (lambda t: t.unpin([1]), NotFound, "PIN_NOT_FOUND"),
        (lambda t: t.advance(4), InvalidArgument, "CLOCK_BACKWARDS"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    table: PageTable, command: object, kind: type[Refused], reason: str
) -> None:
    table.advance(5)
    before = snapshot(table)
    with pytest.raises(kind) as refusal:
        command(table)  # type: ignore[operator]
    assert refusal.value.reason == reason
    assert snapshot(table) == before


@pytest.mark.parametrize(
    ("block", "pins", "sentence"),
    [(1, 2, "block 1 has 2 pins, 1 name it"), (5, 1, "block 5 is pinned and not in the index")],
)
def test_pins_that_do_not_balance_are_told(table: PageTable, block: int, pins: int, sentence: str) -> None:
    table.pin(PREFIX, until=10)
    table._pool.pinned[block] = pins
    assert sentence in table.check()


def test_the_other_pinned_blocks_stay_pinned_when_one_is_written_over() -> None:
    table = PageTable(12, 4)
    run(table, table.create(prompt(*range(17))))
    table.free([1])
    table.pin(prompt(*range(16)), until=10)
    writer = table.create(prompt(*range(17)))
    assert table.reuse(writer) == 16
    table.truncate([writer], [14])
    table.grow([writer], [1], [99], [0])
    assert table.check() == []
    table.free([writer])
    assert (table.states().cached, table.available(), table.check()) == (3, 8, [])
