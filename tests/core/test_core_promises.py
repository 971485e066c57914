"""Reservations, the limit of the pool, and admission: 15 blocks of 4 tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_model import prompt, run, snapshot

from block_manager_svc.core import PageTable
from block_manager_svc.core.admission import Admission, Verdict
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfBlocks, Refused
from block_manager_svc.core.errors import ResourceExhausted as Exhausted


@pytest.fixture
def table() -> PageTable:
    return PageTable(16, 4)


def computed(table: PageTable, *tokens: int) -> int:
    sequence = table.create(prompt(*tokens))
    run(table, sequence)
    return sequence


def free_and_reserved(table: PageTable) -> tuple[int, int]:
    return table.states().free, table.states().reserved


def test_reserved_blocks_are_for_who_names_the_reservation(table: PageTable) -> None:
    reservation = table.reserve(10, until=100)
    assert (free_and_reserved(table), table.available()) == ((5, 10), 5)
    with pytest.raises(OutOfBlocks) as refusal:
        table.begin([24], range(24), [0])
    assert refusal.value.numbers == {"needed": 6, "available": 5}
    begun = table.begin([24], range(24), [0], reservation=reservation)
    assert (free_and_reserved(table), table.available()) == ((5, 4), 5)
    table.commit(begun.sequences, [24])
    table.grow(begun.sequences, [20], range(20), [0], reservation=reservation)  # 4 of it, and one more
    assert free_and_reserved(table) == (4, 0)
    with pytest.raises(NotFound) as used_up:
        table.grow(begun.sequences, [1], [1], [0], reservation=reservation)
    assert (used_up.value.reason, used_up.value.numbers) == ("RESERVATION_NOT_FOUND", {"reservation": reservation})
    assert table.check() == []


def test_a_reservation_ends_at_its_time_or_when_it_is_released(table: PageTable) -> None:
    first, second = table.reserve(5, until=10), table.reserve(6, until=20)
    table.advance(9)
    assert free_and_reserved(table) == (4, 11)
    table.advance(10)
    assert free_and_reserved(table) == (9, 6)
    with pytest.raises(NotFound):
        table.release([second, first])  # all or none
    assert free_and_reserved(table) == (9, 6)
    table.release([second])
    assert free_and_reserved(table) == (15, 0)


def test_a_reservation_evicts_what_is_cached_so_that_its_blocks_are_there(table: PageTable) -> None:
    table.free([computed(table, *range(40))])
    assert table.states().cached == 10
    table.reserve(12, until=10)
    assert (free_and_reserved(table), table.states().cached) == ((0, 12), 3)
    reader = table.create(prompt(*range(41)))
    assert table.reuse(reader) == 12  # what is left of it; the promise holds
    assert table.check() == []


def test_a_reservation_and_a_pin_are_their_owners_only(table: PageTable) -> None:
    table.free([computed(table, *range(8))])
    reservation, pin = table.reserve(2, until=10, owner=1), table.pin(prompt(*range(8)), until=10, owner=1).pin
    for command in (
        lambda: table.release([reservation], owner=2),
        lambda: table.unpin([pin], owner=2),
        lambda: table.begin([1], [5], [0], reservation=reservation, owner=2),
    ):
        with pytest.raises(NotFound):
            command()
    table.release([reservation], owner=1)
    table.unpin([pin], owner=1)


@pytest.mark.parametrize(
    ("command", "kind", "reason"),
    [
        (lambda t: t.reserve(16, until=9), OutOfBlocks, "OUT_OF_BLOCKS"),
        (lambda t: t.reserve(0, until=9), InvalidArgument, "COUNT_OUT_OF_RANGE"),
        (lambda t: t.reserve(-1, until=9), InvalidArgument, "COUNT_OUT_OF_RANGE"),
        (lambda t: t.reserve(1, until=0), InvalidArgument, "UNTIL_PASSED"),
        (lambda t: t.release([1]), NotFound, "RESERVATION_NOT_FOUND"),
        (lambda t: t.resize(0), InvalidArgument, "LIMIT_OUT_OF_RANGE"),
        (lambda t: t.resize(16), InvalidArgument, "LIMIT_OUT_OF_RANGE"),
    ],
)
def test_what_cannot_be_promised_is_refused(
    table: PageTable, command: Callable[[PageTable], object], kind: type[Refused], reason: str
) -> None:
    before = snapshot(table)
    with pytest.raises(kind) as refusal:
        command(table)
    assert refusal.value.reason == reason
    assert snapshot(table) == before


def test_a_reservation_named_twice_is_released_neither_time(table: PageTable) -> None:
    reservation = table.reserve(2, until=9)
    with pytest.raises(NotFound):
        table.release([reservation, reservation])
    assert table.states().reserved == 2


def test_a_limit_holds_for_all_that_is_in_use_cached_or_reserved(table: PageTable) -> None:
    a = computed(table, *range(16))
    table.free([computed(table, *range(50, 66))])
    reservation = table.reserve(2, until=9)
    assert table.resize(8) == 2
    assert (table.limit, table.available(), table.states().cached) == (8, 2, 2)
    with pytest.raises(FailedPrecondition) as refusal:
        table.resize(5)
    assert (refusal.value.reason, refusal.value.numbers) == ("RESIZE_BELOW_USE", {"limit": 5, "used": 6})
    with pytest.raises(OutOfBlocks):
        table.begin([12], range(80, 92), [0])
    table.release([reservation])
    table.begin([12], range(80, 92), [0])
    table.free([a])
    assert table.resize(15) == 0
    assert table.check() == []


def test_pinned_blocks_count_against_a_smaller_limit(table: PageTable) -> None:
    table.free([computed(table, *range(16))])
    table.pin(prompt(*range(16)), until=9)
    with pytest.raises(FailedPrecondition):
        table.resize(3)
    assert table.resize(4) == 0


def test_admission_says_what_is_cached_needed_and_missing() -> None:
    table = PageTable(16, 4, watermark=3)
    a = computed(table, *range(16))
    assert table.admission(prompt(*range(17))) == Admission(Verdict.OK, cached=16, needed=1, shortfall=0)
    assert table.admission(prompt(*range(100, 132))) == Admission(Verdict.OK, cached=0, needed=8, shortfall=0)
    assert table.admission(prompt(*range(100, 132)), lookahead=1) == Admission(Verdict.LATER, 0, 9, 1)
    assert table.admission(prompt(*range(100, 160))) == Admission(Verdict.LATER, 0, 15, 7)
    assert table.admission(prompt(*range(100, 161))) == Admission(Verdict.NEVER, 0, 16, 1)
    with pytest.raises(OutOfBlocks) as later:
        table.begin([32], range(100, 132), [1])
    assert later.value.numbers == {"needed": 9, "available": 8}
    with pytest.raises(Exhausted) as never:
        table.begin([61], range(100, 161), [0])
    assert (never.value.reason, never.value.numbers) == ("NEVER_FITS", {"needed": 16, "limit": 15})
    table.free([a])
    # Idle blocks that are found are taken as well as new ones.
    assert table.admission(prompt(*range(17))) == Admission(Verdict.OK, cached=16, needed=5, shortfall=0)
    # The limit of the pool is what it can ever give.
    table.resize(8)
    assert table.admission(prompt(*range(100, 136))) == Admission(Verdict.NEVER, 0, 9, 1)


def test_the_watermark_is_for_those_who_are_here() -> None:
    table = PageTable(16, 4, watermark=3)
    (a,) = table.begin([44], range(44), [0]).sequences
    with pytest.raises(OutOfBlocks):
        table.begin([8], range(50, 58), [0])
    table.begin([4], range(50, 54), [0])
    table.commit([a], [44])
    table.grow([a], [9], range(9), [0])
    assert table.available() == 0


@pytest.mark.parametrize("watermark", [-1, 16])
def test_a_watermark_that_cannot_be_is_refused(watermark: int) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        PageTable(16, 4, watermark=watermark)
    assert refusal.value.reason == "WATERMARK_OUT_OF_RANGE"


def test_what_is_held_and_given_back_a_million_times_leaves_nothing_behind(table: PageTable) -> None:
    """Terms that ended before their time are not kept until then."""
    for _ in range(1000):
        table.release([table.reserve(1, until=10**9)])
    assert len(table._reservations._due) < 200
