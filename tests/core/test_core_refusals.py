"""What callers can get wrong: each gets its own reason and numbers, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from core_model import prompt, run, snapshot

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, OutOfBlocks, Refused, SequenceNotFound

A, B, GONE, NEVER = 1, 2, 3, 99


@pytest.fixture
def table() -> PageTable:
    table = PageTable(10, 4)
    for tokens in (range(10), range(50, 53), range(1)):
        table.create(prompt(*tokens))
    run(table, A, 6)
    table.extend([A], [9])
    table.free([GONE])
    return table


@pytest.mark.parametrize(
    ("command", "reason", "numbers"),
    [
        (lambda t: t.create(prompt()), "NO_TOKENS", {"tokens": 0}),
        (lambda t: t.create([]), "NO_TOKENS", {"tokens": 0}),
        (lambda t: t.create(prompt(1, -2, 3)), "TOKEN_OUT_OF_RANGE", {"token": -2, "place": 1}),
        (lambda t: t.create([1, -2]), "TOKEN_OUT_OF_RANGE", {"token": -2, "place": 1}),
        (lambda t: t.create([1, 2**31]), "TOKEN_OUT_OF_RANGE", {"token": 2**31, "place": 1}),
        (lambda t: t.create([1.5]), "NOT_INTEGERS", {"dtype": "float64"}),
        (lambda t: t.create(np.ones((2, 2), np.int32)), "NOT_A_COLUMN", {"dimensions": 2}),
        (lambda t: t.append([A, B], [1]), "UNEQUAL_COLUMNS", {"values": 1, "expected": 2}),
        (lambda t: t.append([A, B], [1, -1]), "TOKEN_OUT_OF_RANGE", {"token": -1, "place": 1}),
        (lambda t: t.append([A, A], [1, 1]), "DUPLICATE_SEQUENCE", {"sequence": A}),
        (lambda t: t.extend([A], [5]), "UPTO_BELOW_COMPUTED", {"sequence": A, "upto": 5, "computed": 6}),
        (lambda t: t.extend([A], [-1]), "UPTO_BELOW_COMPUTED", {"sequence": A, "upto": -1, "computed": 6}),
        (lambda t: t.extend([B, A], [3, 11]), "UPTO_BEYOND_LENGTH", {"sequence": A, "upto": 11, "limit": 10}),
        (lambda t: t.blocks_needed([A], [2**40]), "UPTO_BEYOND_LENGTH", {"sequence": A, "upto": 2**40, "limit": 10}),
        (lambda t: t.extend([A, B], [9]), "UNEQUAL_COLUMNS", {"values": 1, "expected": 2}),
        (lambda t: t.grow([A, B], [1, 1], [5], [0, 0]), "UNEQUAL_COLUMNS", {"values": 1, "expected": 2}),
        (lambda t: t.grow([A, B], [1], [5], [0, 0]), "UNEQUAL_COLUMNS", {"values": 1, "expected": 2}),
        (lambda t: t.grow([A], [-1], [], [0]), "COUNT_OUT_OF_RANGE", {"count": -1, "place": 0}),
        (lambda t: t.grow([A], [0], [], [2**31]), "COUNT_OUT_OF_RANGE", {"count": 2**31, "place": 0}),
        (lambda t: t.grow([A, B], [0, 1], [-7], [0, 0]), "TOKEN_OUT_OF_RANGE", {"token": -7, "place": 0}),
        (lambda t: t.grow([A, A], [0, 0], [], [0, 0]), "DUPLICATE_SEQUENCE", {"sequence": A}),
        (lambda t: t.grow([A, GONE], [0, 0], [], [0, 0]), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.truncate([B, A], [1, 11]), "LENGTH_OUT_OF_RANGE", {"sequence": A, "asked": 11, "length": 10}),
        (lambda t: t.truncate([A], [0]), "LENGTH_OUT_OF_RANGE", {"sequence": A, "asked": 0, "length": 10}),
        (lambda t: t.truncate([A, GONE], [9, 1]), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.commit([A], [10]), "UPTO_NOT_WRITABLE", {"sequence": A, "upto": 10, "limit": 9}),
        (lambda t: t.commit([B], [1]), "UPTO_NOT_WRITABLE", {"sequence": B, "upto": 1, "limit": 0}),
        (lambda t: t.commit([A], [5]), "UPTO_BELOW_COMPUTED", {"sequence": A, "upto": 5, "computed": 6}),
        (lambda t: t.commit([B, A, B], [0, 6, 0]), "DUPLICATE_SEQUENCE", {"sequence": B}),
        (lambda t: t.fork(A, 0), "COUNT_OUT_OF_RANGE", {"count": 0}),
        (lambda t: t.fork(A, -5), "COUNT_OUT_OF_RANGE", {"count": -5}),
        (lambda t: t.free([A, B, A]), "DUPLICATE_SEQUENCE", {"sequence": A}),
        (lambda t: t.drop([[A]]), "NOT_A_COLUMN", {"dimensions": 2}),
        (lambda t: t.token_range([A], [-1], [3]), "POSITION_OUT_OF_RANGE", {"first": -1}),
        (lambda t: t.token_range([A], [4], [3]), "POSITION_OUT_OF_RANGE", {"first": 4, "upto": 3}),
        (lambda t: t.token_range([A], [4], [11]), "POSITION_OUT_OF_RANGE", {"upto": 11, "length": 10}),
        (lambda t: t.free([A, GONE]), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.drop([NEVER]), "SEQUENCE_NOT_FOUND", {"sequence": NEVER}),
        (lambda t: t.match(GONE), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.reuse(GONE), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.fork(GONE), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.fork(-1, 2), "SEQUENCE_NOT_FOUND", {"sequence": -1}),
        (lambda t: t.tokens(0), "SEQUENCE_NOT_FOUND", {"sequence": 0}),
        (lambda t: t.append([A, GONE], [1, 1]), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.tables([GONE]), "SEQUENCE_NOT_FOUND", {"sequence": GONE}),
        (lambda t: t.length([2**62]), "SEQUENCE_NOT_FOUND", {"sequence": 2**62}),
        (lambda t: t.reuse(A), "TABLE_NOT_EMPTY", {"sequence": A, "blocks": 3}),
    ],
)
def test_a_wrong_argument_is_refused_with_its_numbers_and_changes_nothing(
    table: PageTable, command: Callable[[PageTable], object], reason: str, numbers: dict[str, object]
) -> None:
    before = snapshot(table)
    with pytest.raises(Refused) as refusal:
        command(table)
    assert refusal.value.reason == reason
    assert numbers.items() <= refusal.value.numbers.items()
    for number in numbers.values():
        assert str(number) in refusal.value.message
    kinds = {"TABLE_NOT_EMPTY": FailedPrecondition, "SEQUENCE_NOT_FOUND": SequenceNotFound}
    assert isinstance(refusal.value, kinds.get(reason, InvalidArgument))
    assert snapshot(table) == before


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "reason"),
    [
        (1, 4, "POOL_SIZE_OUT_OF_RANGE"),
        (-3, 4, "POOL_SIZE_OUT_OF_RANGE"),
        (2**31, 4, "POOL_SIZE_OUT_OF_RANGE"),
        (8, 0, "BLOCK_SIZE_OUT_OF_RANGE"),
        (8, 65536, "BLOCK_SIZE_OUT_OF_RANGE"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(num_blocks: int, block_size: int, reason: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        PageTable(num_blocks, block_size)
    assert refusal.value.reason == reason


def test_a_second_free_is_not_found_and_changes_nothing(table: PageTable) -> None:
    table.free([A])
    before = snapshot(table)
    with pytest.raises(SequenceNotFound):
        table.free([A])
    assert snapshot(table) == before


def test_a_lookahead_is_no_token_that_could_be_committed(table: PageTable) -> None:
    table.grow([B], [0], [], [9])
    before = snapshot(table)
    with pytest.raises(InvalidArgument) as refusal:
        table.commit([B], [4])
    assert (refusal.value.reason, refusal.value.numbers["limit"]) == ("UPTO_NOT_WRITABLE", 3)
    assert snapshot(table) == before


def test_growth_that_does_not_fit_takes_nothing_and_adds_no_token(table: PageTable) -> None:
    before = snapshot(table)
    with pytest.raises(OutOfBlocks):
        table.grow([A, B], [1, 0], [7], [0, 2**31 - 1])
    assert snapshot(table) == before


def test_an_extension_that_does_not_fit_takes_nothing(table: PageTable) -> None:
    long = table.create(prompt(*range(40)))
    before = snapshot(table)
    with pytest.raises(OutOfBlocks) as refusal:
        table.extend([B, long], [3, 40])
    assert refusal.value.numbers == {"needed": 11, "available": 6}
    assert snapshot(table) == before
    table.extend([B, long], [3, 20])  # six: all that is left
    assert table.available() == 0


def test_more_than_the_writer_was_given_cannot_be_committed_by_a_child(table: PageTable) -> None:
    """What the parent has in flight at a fork is the parent's: a child has positions of its own to ask for."""
    child = int(table.fork(A)[0])
    with pytest.raises(InvalidArgument) as refusal:
        table.commit([child], [9])
    assert refusal.value.reason == "UPTO_NOT_WRITABLE"
    table.extend([child], [9])
    table.commit([child, A], [9, 9])
    assert table.check() == []


def test_an_eviction_policy_that_is_not_there_is_refused_and_the_others_are_named() -> None:
    with pytest.raises(InvalidArgument, match="no eviction policy 'random'") as refusal:
        PageTable(8, 4, eviction="random")  # type: ignore[arg-type]
    assert refusal.value.reason == "EVICTION_UNKNOWN"
    assert refusal.value.numbers == {"known": "lru, lfu, s3fifo, priority"}


@pytest.mark.parametrize("num_host", [-1, 2**31 - 8])
def test_a_host_pool_that_cannot_be_is_refused(num_host: int) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        PageTable(8, 4, num_host=num_host)
    assert refusal.value.reason == "POOL_SIZE_OUT_OF_RANGE"
    assert refusal.value.numbers == {"num_host": num_host, "num_blocks": 8}
