"""Batches: results in order, references to earlier items, and failures that change nothing."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from block_manager_svc.core import PageTable
from block_manager_svc.core.batch import MAX_CHILDREN, MAX_SLOTS, Done, execute
from block_manager_svc.core.commands import (
    Append,
    Command,
    Commit,
    Create,
    Fork,
    Free,
    Pin,
    Release,
    Reserve,
    Swap,
    Truncate,
    Unpin,
    reference,
    referred,
)
from block_manager_svc.core.errors import Refused
from block_manager_svc.core.step import I32, I64, OpKind

ENGINE = 1


def i64(*values: int) -> I64:
    return np.array(values, np.int64)


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def create(*prompts: list[int], lookahead: int = 0, namespace: bytes = b"") -> Create:
    return Create(i64(*map(len, prompts)), i32(*chain(*prompts)), np.full(len(prompts), lookahead, np.int64), namespace)


def append(sequences: list[int], *tokens: list[int], lookahead: int = 0) -> Append:
    return Append(
        i64(*sequences), i64(*map(len, tokens)), i32(*chain(*tokens)), np.full(len(sequences), lookahead, np.int64)
    )


@pytest.fixture
def table() -> PageTable:
    return PageTable(num_blocks=17, block_size=4)


def done(table: PageTable, *commands: Command) -> list[Done]:
    executed = execute(table, list(commands), owner=ENGINE)
    assert table.check() == []
    for result in executed.results:
        assert isinstance(result, Done), result
    return executed.results  # type: ignore[return-value]


def refused(table: PageTable, *commands: Command) -> Refused:
    """What the last of the commands is refused with; the table is as the others leave it."""
    executed = execute(table, list(commands), owner=ENGINE)
    assert table.check() == []
    *before, last = executed.results
    assert all(isinstance(result, Done) for result in before), before
    assert isinstance(last, Refused)
    return last


def test_a_reference_says_which_item_and_where_and_is_no_id() -> None:
    for item, position in ((0, 0), (4095, 1), (2**31 - 1, 2**32 - 1)):
        assert -(2**63) <= reference(item, position) < 0
        assert referred(reference(item, position)) == (item, position)
    assert reference(3, 5) % 2**64 == 1 << 63 | 3 << 32 | 5


# --- create -----------------------------------------------------------------------------------------------------------


def test_create_gives_blocks_and_slots_for_the_prompt_and_the_lookahead(table: PageTable) -> None:
    [made] = done(table, create([1, 2, 3, 4, 5], [6], lookahead=2))
    assert made.sequences.tolist() == [1, 2]
    assert made.cached.tolist() == [0, 0]
    assert made.slot_indptr.tolist() == [0, 7, 10]
    assert made.slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 12, 13, 14]
    assert table.length(made.sequences).tolist() == [5, 1]
    assert table.tables(made.sequences).indices.tolist() == [1, 2, 3]


def test_create_finds_what_was_committed_and_names_slots_from_there_on(table: PageTable) -> None:
    prompt = list(range(9))
    done(table, create(prompt), Commit(i64(1), i64(9)), Free(i64(1)))
    [made] = done(table, create(prompt, [*prompt[:8], 77], [7]))
    assert made.cached.tolist() == [8, 8, 0]
    first, second, other = (table.tables([s]).indices.tolist() for s in made.sequences.tolist())
    assert first[:2] == second[:2] == [1, 2]
    assert made.slot_indptr.tolist() == [0, 1, 2, 3]
    assert made.slots.tolist() == [first[2] * 4, second[2] * 4, other[0] * 4]


def test_prompts_of_one_create_do_not_find_each_other(table: PageTable) -> None:
    [made] = done(table, create([1] * 9, [1] * 9))
    assert made.cached.tolist() == [0, 0]
    assert len(set(table.tables(made.sequences).indices.tolist())) == 6


def test_create_is_for_all_its_prompts_or_for_none(table: PageTable) -> None:
    before = table.states()
    why = refused(table, create([1] * 32, [2] * 33))
    assert (why.reason, why.numbers) == ("NEVER_FITS", {"needed": 17, "limit": 16})
    assert table.states() == before
    assert table.sequences().size == 0
    done(table, create([1] * 32, [2] * 32))
    assert table.available() == 0


def test_create_never_evicts_what_it_has_found(table: PageTable) -> None:
    prompt = list(range(33))
    done(table, create(prompt), Commit(i64(1), i64(33)), Free(i64(1)))
    # 8 blocks are found and idle, 8 are free: with 9 more only one of those found could make room.
    why = refused(table, create([*prompt[:32], *[9] * 33]))
    assert (why.reason, why.numbers) == ("NEVER_FITS", {"needed": 17, "limit": 16})
    [made] = done(table, create([*prompt[:32], *[9] * 32]))
    assert made.cached.tolist() == [32]
    assert table.counters.evicted_blocks == 0


def test_pinned_hits_do_not_count_as_taken(table: PageTable) -> None:
    prompt = list(range(8))
    done(table, create(prompt), Commit(i64(1), i64(8)), Free(i64(1)), Pin(i32(*prompt), 1000, b""))
    assert table.available() == 14
    [made] = done(table, create([*prompt, *[9] * 56]))
    assert made.cached.tolist() == [8]
    assert table.available() == 0


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (Create(i64(0), i32(), i64(0), b""), "NO_TOKENS"),
        (Create(i64(2), i32(1), i64(0), b""), "UNEQUAL_COLUMNS"),
        (Create(i64(1, 1), i32(1, 2), i64(0), b""), "UNEQUAL_COLUMNS"),
        (Create(i64(-1), i32(), i64(0), b""), "COUNT_OUT_OF_RANGE"),
        (Create(i64(1), i32(1), i64(2**31), b""), "COUNT_OUT_OF_RANGE"),
        (Create(i64(1), i32(-1), i64(0), b""), "TOKEN_OUT_OF_RANGE"),
        (Create(i64(1), i32(1), i64(MAX_SLOTS), b""), "TOO_MANY_SLOTS"),
    ],
)
def test_a_create_that_cannot_be(table: PageTable, command: Command, reason: str) -> None:
    assert refused(table, command).reason == reason
    assert table.sequences().size == 0


def test_a_create_of_nothing_makes_nothing(table: PageTable) -> None:
    [made] = done(table, create())
    assert (made.sequences.tolist(), made.slot_indptr.tolist(), made.slots.tolist()) == ([], [0], [])


# --- the other commands -----------------------------------------------------------------------------------------------


def test_counts_and_lookahead_that_are_left_out_mean_one_each_and_none(table: PageTable) -> None:
    done(table, create([1, 2, 3], [4]))
    [grown] = done(table, Append(i64(2, 1), None, i32(8, 9), None))
    assert (grown.slot_indptr.tolist(), grown.slots.tolist()) == ([0, 1, 2], [9, 7])
    assert (table.tokens(2).tolist(), table.tokens(1).tolist()) == ([4, 8], [1, 2, 3, 9])
    assert refused(table, Append(i64(2, 1), None, i32(8), None)).reason == "UNEQUAL_COLUMNS"


def test_items_run_in_order_and_name_what_earlier_ones_made(table: PageTable) -> None:
    executed = execute(
        table,
        [
            create([1, 2, 3], [9]),
            Commit(i64(reference(0, 0)), i64(3)),
            Fork(i64(reference(0, 0)), i64(2)),
            append([reference(2, 1), reference(0, 0)], [4], [5, 6]),
            Free(i64(reference(0, 1))),
        ],
        owner=ENGINE,
    )
    assert table.check() == []
    made, _, forked, grown, _ = executed.results
    assert isinstance(made, Done)
    assert isinstance(forked, Done)
    assert isinstance(grown, Done)
    assert made.sequences.tolist() == [1, 2]
    assert forked.sequences.tolist() == [3, 4]
    # Block 1 has three holders: both that append copy it, and the child that does not keeps it.
    assert (grown.ops.src.tolist(), grown.ops.dst.tolist()) == ([1, 1], [3, 4])
    assert grown.slots.tolist() == [3 * 4 + 3, 4 * 4 + 3, 5 * 4]
    assert executed.ops.kind.tolist() == [OpKind.COPY, OpKind.COPY]
    assert executed.ops.src.tolist() == [1, 1]
    assert executed.ops.dst.tolist() == [3, 4]
    assert executed.touched.tolist() == [1, 3, 4]  # 2 was freed
    assert table.tokens(4).tolist() == [1, 2, 3, 4]


def test_a_failing_item_changes_nothing_and_the_rest_goes_on(table: PageTable) -> None:
    executed = execute(
        table,
        [
            create([1, 2, 3]),
            Commit(i64(reference(0, 0)), i64(4)),
            append([reference(0, 0)], [7]),
            Free(i64(99)),
            Truncate(i64(reference(0, 0)), i64(2)),
        ],
        owner=ENGINE,
    )
    reasons = [result.reason if isinstance(result, Refused) else None for result in executed.results]
    assert reasons == [None, "UPTO_NOT_WRITABLE", None, "SEQUENCE_NOT_FOUND", None]
    assert table.tokens(1).tolist() == [1, 2]
    assert executed.touched.tolist() == [1]
    assert table.check() == []


@pytest.mark.parametrize("item", [0, 1, 2, 3, 4, 4000])
def test_a_reference_to_what_was_not_made(table: PageTable, item: int) -> None:
    """0 made one sequence, 1 failed, 2 makes none, 3 is the item itself, 4 and 4000 do not exist."""
    executed = execute(
        table,
        [create([1]), create([]), Commit(i64(reference(0, 0)), i64(1)), Free(i64(reference(item, 1)))],
        owner=ENGINE,
    )
    why = executed.results[3]
    assert isinstance(why, Refused)
    assert (why.reason, why.numbers) == ("REFERENCE_INVALID", {"item": item, "position": 1})
    assert table.sequences().tolist() == [1]


def test_a_reference_names_only_its_kind(table: PageTable) -> None:
    prompt = [1] * 4
    prepare = [create(prompt), Commit(i64(reference(0, 0)), i64(4)), Pin(i32(*prompt), 1000, b"")]
    assert refused(table, *prepare, Free(i64(reference(2, 0)))).reason == "REFERENCE_INVALID"
    assert refused(table, create([5]), Unpin(i64(reference(0, 0)))).reason == "REFERENCE_INVALID"
    done(table, Pin(i32(*prompt), 1000, b""), Unpin(i64(reference(0, 0))))


def test_unpin_is_for_all_or_for_none(table: PageTable) -> None:
    prompt = i32(1, 1, 1, 1)
    done(table, create([1] * 4), Commit(i64(1), i64(4)))
    first, second = (result.pin for result in done(table, Pin(prompt, 1000, b""), Pin(prompt, 1000, b"")))
    for pins in ([first, 77], [first, second, first]):
        assert refused(table, Unpin(i64(*pins))).reason == "PIN_NOT_FOUND"
    done(table, Unpin(i64(second, first)), Free(i64(1)), Pin(prompt, 1000, b""))


def test_sequences_leave_for_the_host_and_others_come_back() -> None:
    table = PageTable(num_blocks=17, block_size=4, num_host=10)
    executed = execute(
        table,
        [
            create([1] * 8, [2] * 5),
            Commit(i64(reference(0, 0), reference(0, 1)), i64(8, 5)),
            Fork(i64(reference(0, 1)), i64(1)),
            Swap(i64(reference(0, 0)), i64()),
            append([reference(0, 0)], [3]),
            append([reference(2, 0)], [3]),
            Swap(i64(reference(0, 1)), i64(reference(0, 0))),
        ],
        owner=ENGINE,
    )
    assert table.check() == []
    reasons = [result.reason if isinstance(result, Refused) else "" for result in executed.results]
    assert reasons == ["", "", "", "", "SEQUENCE_SWAPPED_OUT", "", ""]
    # Of sequence 2 only the half-written block moves: the child, on the device, still shares the full one.
    kinds = [OpKind.SWAP_OUT] * 2 + [OpKind.COPY] + [OpKind.SWAP_OUT] + [OpKind.SWAP_IN] * 2
    assert executed.ops.kind.tolist() == kinds
    assert executed.touched.tolist() == [1, 2, 3]
    assert refused(table, Swap(i64(1), i64(1))).reason == "DUPLICATE_SEQUENCE"


def test_a_reservation_is_drawn_from_and_released(table: PageTable) -> None:
    reserved, *_ = done(
        table,
        Reserve(10, 1000),
        Create(i64(9), i32(*range(9)), i64(0), b"", reference(0, 0)),
        Append(i64(reference(1, 0)), i64(4), i32(1, 2, 3, 4), None, reference(0, 0)),
    )
    assert reserved.reservation == 1
    assert (table.states().reserved, table.available()) == (6, 6)
    assert refused(table, Append(i64(1), None, i32(1), None, 7)).reason == "RESERVATION_NOT_FOUND"
    assert refused(table, Append(i64(1), None, i32(1), None, reference(5, 0))).reason == "REFERENCE_INVALID"
    assert refused(table, create([1] * 28)).reason == "OUT_OF_BLOCKS"
    done(table, Release(i64(1)), create([1] * 28))
    assert refused(table, Release(i64(1))).reason == "RESERVATION_NOT_FOUND"
    assert refused(table, Reserve(1, 0)).reason == "UNTIL_PASSED"


def test_a_namespace_finds_only_its_own(table: PageTable) -> None:
    prompt = [1] * 9
    done(table, create(prompt, namespace=b"a"), Commit(i64(1), i64(9)))
    other, same = done(table, create(prompt, namespace=b"b"), create(prompt, namespace=b"a"))
    assert (other.cached.tolist(), same.cached.tolist()) == ([0], [8])
    assert refused(table, Pin(i32(*prompt), 1000, b"c")).reason == "PREFIX_NOT_CACHED"


def test_sequences_of_another_owner_are_not_there(table: PageTable) -> None:
    theirs = table.create([1, 2, 3])
    mine = done(table, create([1]))[0].sequences.tolist()[0]
    for command in (
        append([mine, theirs], [4], [4]),
        Commit(i64(theirs), i64(0)),
        Fork(i64(theirs), i64(1)),
        Truncate(i64(theirs), i64(1)),
        Free(i64(mine, theirs)),
    ):
        why = refused(table, command)
        assert (why.reason, why.numbers) == ("SEQUENCE_NOT_FOUND", {"sequence": theirs})
    assert table.sequences(owner=ENGINE).tolist() == [mine]
    [forked] = done(table, Fork(i64(mine), i64(2)))
    assert table.sequences(owner=ENGINE).tolist() == [mine, *forked.sequences.tolist()]
    assert table.sequences(owner=0).tolist() == [theirs]
    assert table.owners(i64(mine, theirs)).tolist() == [ENGINE, 0]
    assert table.owned(i64(theirs, mine, 0, -1, 1 << 40), ENGINE).tolist() == [False, True, False, False, False]


def test_sequences_of_another_owner_are_refused_before_all_else_that_is_wrong(table: PageTable) -> None:
    theirs, never = table.create([1, 2, 3]), 1 << 40
    [mine] = done(table, create([1]))[0].sequences.tolist()
    for first, *others in ([theirs, never], [theirs, theirs], [never, theirs], [never, never]):
        why = refused(table, Free(i64(mine, first, *others)))
        assert (why.reason, why.numbers) == ("SEQUENCE_NOT_FOUND", {"sequence": first})
    assert refused(table, Free(i64(mine, mine))).reason == "DUPLICATE_SEQUENCE"


def test_bounds_are_those_of_the_whole_batch(table: PageTable) -> None:
    done(table, create([1]))
    fork = Fork(i64(1), i64(MAX_CHILDREN // 2))
    why = execute(table, [fork, Fork(i64(1), i64(MAX_CHILDREN // 2 + 1)), fork], owner=ENGINE).results[1]
    assert isinstance(why, Refused)
    assert (why.reason, why.numbers["limit"]) == ("TOO_MANY_CHILDREN", MAX_CHILDREN // 2)
    assert table.sequences().size == 1 + MAX_CHILDREN
    assert refused(table, Fork(i64(1), i64(0))).reason == "COUNT_OUT_OF_RANGE"
    assert refused(table, Fork(i64(1), i64(2**32))).reason == "COUNT_OUT_OF_RANGE"

    large = PageTable(num_blocks=1 << 15, block_size=64)
    half = create([1], lookahead=MAX_SLOTS // 2)
    executed = execute(large, [half, half, append([reference(0, 0)], [2], lookahead=MAX_SLOTS // 2)], owner=ENGINE)
    reasons = [result.reason if isinstance(result, Refused) else None for result in executed.results]
    assert reasons == [None, "TOO_MANY_SLOTS", "TOO_MANY_SLOTS"]


def test_an_empty_batch_leaves_nothing(table: PageTable) -> None:
    executed = execute(table, [], owner=ENGINE)
    assert (executed.results, executed.ops.kind.size, executed.touched.size) == ([], 0, 0)


def test_a_table_says_when_it_last_changed(table: PageTable) -> None:
    def changed(sequence: int) -> int:
        assert table.changed([sequence]).tolist() == table.tables([sequence]).changed.tolist()
        return int(table.changed([sequence])[0])

    done(table, create([1, 2, 3], lookahead=5))
    began = changed(1)
    assert began == table.revision
    done(table, append([1], [4], lookahead=4))  # no entry more or less
    done(table, Commit(i64(1), i64(4)))
    assert changed(1) == began < table.revision
    done(table, append([1], [5]))
    same = changed(1)
    assert same == began
    done(table, append([1], [6, 7, 8, 9]))
    assert changed(1) == table.revision
    done(table, Truncate(i64(1), i64(8)))
    assert changed(1) == table.revision
    done(table, Truncate(i64(1), i64(7)))
    assert changed(1) < table.revision
    [forked] = done(table, Fork(i64(1), i64(1)))
    assert changed(int(forked.sequences[0])) == table.revision > changed(1)
    table.drop([1])
    assert changed(1) == table.revision
