"""What each command does, on small cases whose numbers can be followed by eye. A block holds 4 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from core_model import prompt, run

from block_manager_svc.core import BlockStates, Match, PageTable, Sharing
from block_manager_svc.core.errors import OutOfBlocks

SIZE = 4


@pytest.fixture
def table() -> PageTable:
    return PageTable(20, SIZE)


def states(table: PageTable) -> tuple[int, int, int, int]:
    s = table.states()
    return s.free, s.active, s.sealed, s.cached


def test_an_empty_table_has_all_blocks_free_but_the_null_block(table: PageTable) -> None:
    assert table.states() == BlockStates(null=1, free=19, reserved=0, active=0, sealed=0, cached=0, quarantined=0)
    assert table.sharing() == Sharing(0, 0, 0)
    assert table.sequences().tolist() == []
    assert table.revision == 0


def test_a_new_sequence_takes_no_block(table: PageTable) -> None:
    first, second = table.create(prompt(1, 2, 3)), table.create(prompt(4))
    assert (first, second, table.next_sequence) == (1, 2, 3)
    assert table.tokens(first).tolist() == [1, 2, 3]
    assert table.length([second, first]).tolist() == [1, 3]
    assert table.computed([first]).tolist() == [0]
    assert states(table) == (19, 0, 0, 0)
    assert table.tables([first]).indptr.tolist() == [0, 0]
    assert table.tables([first]).last_page_len.tolist() == [0]


def test_the_smallest_pool_has_one_block() -> None:
    table = PageTable(2, 1)
    sequence = table.create(prompt(5))
    run(table, sequence)
    assert table.tables([sequence]).indices.tolist() == [1]
    assert table.available() == 0
    assert table.check() == []


def test_the_tokens_handed_out_are_a_copy(table: PageTable) -> None:
    sequence = table.create(prompt(1, 2, 3))
    table.tokens(sequence)[:] = 9
    assert table.tokens(sequence).tolist() == [1, 2, 3]


def test_ids_go_on_from_where_a_predecessor_ended() -> None:
    before = PageTable(8, SIZE)
    last = before.create(prompt(1))
    after = PageTable(8, SIZE, first_sequence=before.next_sequence)
    assert after.create(prompt(1)) == last + 1
    assert after.check() == []


def test_extending_takes_the_lowest_blocks_in_order_of_the_sequences(table: PageTable) -> None:
    a, b = table.create(prompt(*range(9))), table.create(prompt(*range(20, 25)))
    assert table.blocks_needed([b, a], [5, 9]).tolist() == [2, 3]
    extended = table.extend([b, a], [5, 9])
    assert extended.delta_sequence.tolist() == [0, 1]
    assert extended.delta_first.tolist() == [0, 0]
    assert extended.delta_count.tolist() == [2, 3]
    assert extended.delta_blocks.tolist() == [1, 2, 3, 4, 5]
    assert extended.copy_src.tolist() == extended.copy_dst.tolist() == []
    assert {c.dtype for c in (extended.copy_src, extended.delta_sequence, extended.delta_blocks)} == {
        np.dtype(np.int32)
    }
    tables = table.tables([a, b])
    assert tables.indptr.tolist() == [0, 3, 5]
    assert tables.indices.tolist() == [3, 4, 5, 1, 2]
    assert tables.last_page_len.tolist() == [1, 1]
    assert tables.refcount.tolist() == [1] * 5


def test_a_chunk_that_ends_in_a_block_leaves_room_for_the_next(table: PageTable) -> None:
    sequence = table.create(prompt(*range(10)))
    assert run(table, sequence, 6).delta_blocks.tolist() == [1, 2]
    assert table.blocks_needed([sequence], [8]).tolist() == [0]
    extended = run(table, sequence, 8)
    assert extended.delta_sequence.tolist() == []
    extended = run(table, sequence, 10)
    assert (extended.delta_first.tolist(), extended.delta_count.tolist()) == ([2], [1])
    assert table.computed([sequence]).tolist() == [10]


def test_nothing_is_needed_for_no_new_position(table: PageTable) -> None:
    sequence = table.create(prompt(1, 2, 3))
    assert table.blocks_needed([sequence], [0]).tolist() == [0]
    table.extend([sequence], [0])
    run(table, sequence)
    assert table.blocks_needed([sequence], [3]).tolist() == [0]
    assert states(table) == (18, 1, 0, 0)


def test_a_single_sequence_never_copies(table: PageTable) -> None:
    sequence = table.create(prompt(1))
    for token in range(40):
        run(table, sequence)
        table.append([sequence], [token])
    assert table.counters.copies_on_write == 0
    assert table.counters.allocated_blocks == 10
    assert table.tokens(sequence).tolist() == [1, *range(40)]


def test_appending_adds_tokens_and_no_slots(table: PageTable) -> None:
    a, b = table.create(prompt(1)), table.create(prompt(2))
    for token in range(40):  # past the first room that they were given
        table.append([b, a], [token, token + 100])
    assert table.tokens(a).tolist() == [1, *range(100, 140)]
    assert table.tokens(b).tolist() == [2, *range(40)]
    assert states(table) == (19, 0, 0, 0)


def test_tokens_of_ranges_come_one_sequence_after_another(table: PageTable) -> None:
    a, b = table.create(prompt(1, 2, 3, 4, 5)), table.create(prompt(6, 7, 8))
    assert table.token_range([b, a], [1, 2], [3, 4]).tolist() == [7, 8, 3, 4]
    assert table.token_range([a, b], [0, 3], [2, 3]).tolist() == [1, 2]


def test_only_full_committed_blocks_are_sealed_and_found(table: PageTable) -> None:
    a = table.create(prompt(*range(10)))
    table.extend([a], [10])
    b = table.create(prompt(*range(10)))
    assert states(table) == (16, 3, 0, 0)
    assert table.match(b) == Match(0, 0, 0)
    table.commit([a], [7])
    assert states(table) == (16, 2, 1, 0)
    assert table.match(b) == Match(4, 1, 0)
    table.commit([a], [10])
    assert states(table) == (16, 1, 2, 0)
    assert table.match(b) == Match(8, 2, 0)


def test_reuse_references_what_was_found_and_counts_it_as_computed(table: PageTable) -> None:
    a = table.create(prompt(*range(10)))
    run(table, a)
    b = table.create(prompt(*range(9), 77, 78))
    assert table.reuse(b) == 8
    assert table.computed([b]).tolist() == [8]
    assert table.tables([b]).indices.tolist() == [1, 2]
    assert table.tables([b]).refcount.tolist() == [2, 2]
    assert table.tables([b]).last_page_len.tolist() == [4]
    assert table.sharing() == Sharing(table_entries=5, referenced_blocks=3, shared_blocks=2)
    assert run(table, b).delta_blocks.tolist() == [4]
    assert table.counters.copies_on_write == 0
    assert table.tables([b]).last_page_len.tolist() == [3]


def test_nothing_found_leaves_nothing_computed(table: PageTable) -> None:
    sequence = table.create(prompt(*range(9)))
    assert table.reuse(sequence) == 0
    assert table.tables([sequence]).indices.size == 0


def test_namespaces_do_not_share(table: PageTable) -> None:
    a = table.create(prompt(*range(9)), b"one")
    run(table, a)
    assert table.match(table.create(prompt(*range(9)), b"two")).blocks == 0
    assert table.match(table.create(prompt(*range(9)))).blocks == 0
    assert table.match(table.create(prompt(*range(9)), b"one")).blocks == 2


def test_idle_hits_are_counted_apart(table: PageTable) -> None:
    a = table.create(prompt(*range(13)))
    run(table, a)
    b = table.create(prompt(*range(6)))
    table.reuse(b)
    table.free([a])
    c = table.create(prompt(*range(13)))
    assert table.match(c) == Match(tokens=12, blocks=3, idle_blocks=2)
    before = table.available()
    table.reuse(c)
    assert table.available() == before - 2


def test_forks_share_all_blocks_and_copy_the_partial_one_when_they_write(table: PageTable) -> None:
    parent = table.create(prompt(*range(6)))
    run(table, parent)
    children = table.fork(parent, 3)
    family = [parent, *children.tolist()]
    assert table.sharing() == Sharing(table_entries=8, referenced_blocks=2, shared_blocks=2)
    assert table.length(family).tolist() == [6] * 4
    assert table.computed(family).tolist() == [6] * 4
    table.append(family, [50, 51, 52, 53])
    assert table.blocks_needed(family, [7] * 4).tolist() == [1, 1, 1, 0]
    extended = table.extend(family, [7] * 4)
    assert extended.copy_src.tolist() == [2, 2, 2]
    assert extended.copy_dst.tolist() == [3, 4, 5]
    assert extended.delta_sequence.tolist() == [0, 1, 2]
    assert extended.delta_first.tolist() == [1, 1, 1]
    assert extended.delta_blocks.tolist() == [3, 4, 5]
    assert table.tables(family).indices.tolist() == [1, 3, 1, 4, 1, 5, 1, 2]
    assert table.counters.copies_on_write == 3
    table.commit(family, [7] * 4)
    assert table.check() == []


def test_forks_of_full_blocks_never_copy(table: PageTable) -> None:
    parent = table.create(prompt(*range(8)))
    run(table, parent)
    family = [parent, *table.fork(parent, 3).tolist()]
    table.append(family, [1, 2, 3, 4])
    extended = table.extend(family, [9] * 4)
    assert extended.copy_src.size == 0
    assert extended.delta_blocks.tolist() == [3, 4, 5, 6]


def test_a_sharer_outside_the_batch_makes_all_in_it_copy(table: PageTable) -> None:
    parent = table.create(prompt(*range(6)))
    run(table, parent)
    a, b = table.fork(parent, 2).tolist()
    table.append([a, b], [1, 2])
    assert table.blocks_needed([a, b], [7, 7]).tolist() == [1, 1]
    table.extend([a, b], [7, 7])
    assert table.tables([parent]).refcount.tolist() == [3, 1]


def test_copies_and_new_blocks_of_one_sequence_are_one_delta(table: PageTable) -> None:
    parent = table.create(prompt(*range(14)))
    run(table, parent, 6)
    child = int(table.fork(parent)[0])
    assert table.blocks_needed([child], [14]).tolist() == [3]
    extended = table.extend([child], [14])
    assert (extended.copy_src.tolist(), extended.copy_dst.tolist()) == ([2], [3])
    assert extended.delta_first.tolist() == [1]
    assert extended.delta_count.tolist() == [3]
    assert extended.delta_blocks.tolist() == [3, 4, 5]


def test_a_fork_shares_what_is_computed_and_leaves_the_rest_to_its_parent(table: PageTable) -> None:
    parent = table.create(prompt(*range(14)))
    run(table, parent, 2)
    table.extend([parent], [14])  # made writable, not written
    child, other = table.fork(parent, 2).tolist()
    assert table.tables([child]).indices.tolist() == [1]
    assert table.tables([child]).last_page_len.tolist() == [2]
    assert table.blocks_needed([child], [10]).tolist() == [3]
    extended = table.extend([child, other], [10, 3])
    assert extended.copy_src.tolist() == [1, 1]
    assert extended.copy_dst.tolist() == [5, 8]
    assert extended.delta_blocks.tolist() == [5, 6, 7, 8]
    assert table.tables([child]).indices.tolist() == [5, 6, 7]
    table.commit([parent], [14])  # what was in flight when it was forked
    assert table.check() == []


def test_growing_gives_the_slots_of_the_new_tokens_and_of_the_lookahead(table: PageTable) -> None:
    a, b = table.create(prompt(*range(6))), table.create(prompt(50))
    grown = table.grow([a, b], [0, 3], [51, 52, 53], [3, 0])
    assert grown.extended.delta_blocks.tolist() == [1, 2, 3, 4]
    assert grown.slot_indptr.tolist() == [0, 9, 13]
    assert grown.slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 17, 18, 19]
    assert table.tokens(b).tolist() == [50, 51, 52, 53]
    table.commit([a, b], [6, 4])
    # Two of the three drafts were taken: the slots that were given are not given again, but for the last.
    again = table.grow([a], [2], [6, 7], [0])
    assert again.slots.tolist() == [10, 11]
    assert table.tables([a]).indices.tolist() == [1, 2]
    assert states(table) == (16, 1, 2, 0)


def test_a_lookahead_that_was_not_used_comes_back(table: PageTable) -> None:
    a = table.create(prompt(1, 2, 3))
    table.grow([a], [0], [], [30])
    assert (table.tables([a]).indices.size, states(table)) == (9, (10, 9, 0, 0))
    table.commit([a], [3])
    table.grow([a], [1], [4], [0])
    assert (table.tables([a]).indices.tolist(), states(table)) == ([1], (18, 1, 0, 0))
    assert table.check() == []


def test_what_comes_back_in_a_batch_can_be_taken_in_it() -> None:
    table = PageTable(4, SIZE)
    a, b = table.create(prompt(1)), table.create(prompt(2, 3, 4, 5, 6))
    table.grow([a], [0], [], [11])
    assert table.available() == 0
    grown = table.grow([a, b], [0, 0], [], [0, 0])
    assert grown.extended.delta_blocks.tolist() == [2, 3]
    with pytest.raises(OutOfBlocks) as refusal:
        table.grow([a, b], [0, 4], [7, 8, 9, 10], [0, 0])
    assert refusal.value.numbers == {"needed": 1, "available": 0}
    assert table.check() == []


def test_truncating_gives_the_blocks_behind_back_and_keeps_what_is_computed_below(table: PageTable) -> None:
    a = table.create(prompt(*range(14)))
    run(table, a)
    table.truncate([a], [6])
    assert (table.tokens(a).tolist(), table.computed([a]).tolist()) == (list(range(6)), [6])
    assert table.tables([a]).indices.tolist() == [1, 2]
    assert states(table) == (16, 0, 2, 1)  # block 3 was sealed, 4 was not full
    assert table.check() == []


def test_a_sealed_block_that_was_cut_is_found_until_it_is_written_in_place(table: PageTable) -> None:
    a = table.create(prompt(*range(12)))
    run(table, a)
    table.truncate([a], [6])
    reader = table.create(prompt(*range(9)))
    assert table.match(reader).tokens == 8
    grown = table.grow([a], [1], [99], [0])
    assert (grown.extended.copy_src.size, grown.slots.tolist()) == (0, [2 * SIZE + 2])
    assert table.match(reader).tokens == 4
    table.grow([a], [1], [98], [0])
    table.commit([a], [8])
    assert table.match(table.create(prompt(0, 1, 2, 3, 4, 5, 99, 98, 0))).tokens == 8
    assert table.check() == []


def test_a_sealed_block_that_was_cut_and_is_shared_is_copied(table: PageTable) -> None:
    a = table.create(prompt(*range(8)))
    run(table, a)
    child = int(table.fork(a)[0])
    table.truncate([child], [6])
    grown = table.grow([child], [1], [99], [0])
    assert (grown.extended.copy_src.tolist(), grown.extended.copy_dst.tolist()) == ([2], [3])
    assert table.match(table.create(prompt(*range(9)))).tokens == 8  # a's is still found
    assert table.check() == []


def test_a_double_whose_canonical_one_is_gone_goes_on_unfound_when_it_was_cut() -> None:
    table = PageTable(7, SIZE)
    first, double = table.create(prompt(*range(8))), table.create(prompt(*range(8)))
    table.extend([first, double], [8, 8])
    table.commit([first, double], [8, 8])
    table.free([first])
    taker = table.create(prompt(*range(50, 66)))
    run(table, taker)  # evicts what `first` had
    table.truncate([double], [4])
    table.free([taker])
    table.grow([double], [4], [90, 91, 92, 93], [0])
    table.commit([double], [8])
    assert table.match(table.create(prompt(0, 1, 2, 3, 90, 91, 92, 93, 0))).tokens == 0
    assert table.check() == []


def test_a_child_alone_with_a_block_that_its_parent_sealed_takes_it_out_of_the_index_to_write(table: PageTable) -> None:
    parent = table.create(prompt(*range(9)))
    run(table, parent, 2)
    table.extend([parent], [9])
    child = int(table.fork(parent)[0])
    table.commit([parent], [9])
    table.free([parent])
    reader = table.create(prompt(*range(9)))
    assert table.match(reader).blocks == 2
    extended = table.extend([child], [3])
    assert extended.copy_src.size == 0
    assert table.match(reader).blocks == 0
    assert table.check() == []
    table.commit([child], [3])
    run(table, child, 4)
    assert table.match(reader).blocks == 1  # the second is behind the first as it was before
    run(table, child)
    assert table.match(reader).blocks == 2
    assert table.check() == []


def test_dropping_keeps_the_tokens_and_gives_the_blocks_back(table: PageTable) -> None:
    sequence = table.create(prompt(*range(10)))
    run(table, sequence)
    table.drop([sequence])
    assert table.computed([sequence]).tolist() == [0]
    assert table.tokens(sequence).tolist() == list(range(10))
    assert states(table) == (17, 0, 0, 2)
    assert table.reuse(sequence) == 8  # of its own blocks, as long as they are there
    run(table, sequence)
    assert states(table) == (16, 1, 2, 0)


def test_blocks_that_are_not_sealed_are_free_at_once(table: PageTable) -> None:
    sequence = table.create(prompt(*range(10)))
    table.extend([sequence], [10])
    table.free([sequence])
    assert states(table) == (19, 0, 0, 0)


def test_a_block_is_given_back_with_its_last_holder(table: PageTable) -> None:
    parent = table.create(prompt(*range(6)))
    run(table, parent)
    child = int(table.fork(parent)[0])
    table.free([parent])
    assert states(table) == (17, 1, 1, 0)
    assert table.sharing() == Sharing(2, 2, 0)
    table.free([child])
    assert states(table) == (18, 0, 0, 1)
    assert table.sharing() == Sharing(0, 0, 0)


def test_several_holders_can_go_in_one_batch(table: PageTable) -> None:
    parent = table.create(prompt(*range(10)))
    run(table, parent)
    family = [parent, *table.fork(parent, 4).tolist()]
    table.drop(family[:2])
    table.free(family[2:])
    assert states(table) == (17, 0, 0, 2)
    assert table.sequences().tolist() == family[:2]
    assert table.check() == []


def test_free_blocks_are_taken_before_anything_is_evicted(table: PageTable) -> None:
    a = table.create(prompt(*range(16)))
    run(table, a)
    table.free([a])  # 4 cached, 15 free
    b = table.create(prompt(*range(100, 160)))
    table.extend([b], [60])
    assert table.counters.evicted_blocks == 0
    assert states(table) == (0, 15, 0, 4)
    c = table.create(prompt(1, 2, 3, 4, 5))
    table.extend([c], [5])
    assert table.counters.evicted_blocks == 2


def test_the_tail_of_a_freed_sequence_is_evicted_before_its_head(table: PageTable) -> None:
    a = table.create(prompt(*range(17)))
    run(table, a)
    table.free([a])
    again = table.create(prompt(*range(17)))
    filler = table.create(prompt(*[9] * 68))
    for held, left in ((60, 4), (64, 3), (68, 2)):
        table.extend([filler], [held])
        assert table.match(again) == Match(4 * left, left, left)
    assert table.check() == []


def test_what_was_used_last_is_evicted_last(table: PageTable) -> None:
    old, new = table.create(prompt(*range(5))), table.create(prompt(*range(50, 55)))
    run(table, old)
    run(table, new)
    table.free([old])
    table.free([new])
    once_more = table.create(prompt(*range(5)))
    table.reuse(once_more)
    table.free([once_more])
    filler = table.create(prompt(*[9] * 72))
    table.extend([filler], [72])  # 18 of 19 blocks
    assert table.match(table.create(prompt(*range(5)))).blocks == 1
    assert table.match(table.create(prompt(*range(50, 55)))).blocks == 0


def test_equal_content_is_sealed_and_not_indexed_and_its_children_chain_from_the_first(table: PageTable) -> None:
    a, b = table.create(prompt(*range(5))), table.create(prompt(*range(4), 7, 8, 9, 10, 11))
    table.extend([a, b], [5, 9])
    table.commit([a, b], [5, 9])
    assert states(table) == (14, 2, 3, 0)
    c = table.create(prompt(*range(4), 7, 8, 9, 10, 11))
    table.reuse(c)
    assert table.tables([c]).indices.tolist() == [1, 4]  # a's first block, then b's second
    table.free([b])
    assert states(table) == (16, 1, 2, 0)  # b's double and its partial block are free; its second is c's
    assert table.check() == []


def test_sequences_are_listed_in_order_of_creation(table: PageTable) -> None:
    ids = [table.create(prompt(1)) for _ in range(100)]
    table.free(ids[::2])
    ids = [*ids[1::2], *[table.create(prompt(1)) for _ in range(60)]]
    assert table.sequences().tolist() == ids


def test_peaks_are_of_the_states_after_commands(table: PageTable) -> None:
    parent = table.create(prompt(*range(6)))
    run(table, parent)
    family = [parent, *table.fork(parent, 3).tolist()]
    table.append(family, [1, 2, 3, 4])
    table.extend(family, [7] * 4)  # a copy for each of three replaces an entry, it adds none
    counters = table.counters
    assert (counters.peak_table_entries, counters.peak_referenced_blocks, counters.peak_shared_blocks) == (8, 5, 2)
    table.free(family)
    assert (counters.peak_table_entries, counters.peak_referenced_blocks, counters.peak_shared_blocks) == (8, 5, 2)


def test_each_command_counts_one_revision_and_reads_none(table: PageTable) -> None:
    a = table.create(prompt(1, 2))
    table.reuse(a)
    table.extend([a], [2])
    table.commit([a], [2])
    table.append([a], [1])
    b = table.fork(a)
    table.drop(b)
    table.free(b)
    assert table.revision == 8
    table.match(a)
    table.blocks_needed([a], [3])
    table.tables([a])
    table.check()
    assert table.revision == 8


def test_a_plan_is_not_used_for_other_arguments_or_after_a_command(table: PageTable) -> None:
    a = table.create(prompt(*range(12)))
    upto = np.array([4], np.int64)
    assert table.blocks_needed([a], upto).tolist() == [1]
    upto[0] = 12  # the caller's array, not the plan's
    assert table.blocks_needed([a], upto).tolist() == [3]
    upto[0] = 4
    table.extend([a], [12])
    assert table.blocks_needed([a], [12]).tolist() == [0]
    table.commit([a], [12])
    assert table.computed([a]).tolist() == [12]


def test_an_empty_batch_is_a_command_that_does_nothing(table: PageTable) -> None:
    none = np.empty(0, np.int64)
    assert table.extend(none, none).delta_blocks.size == 0
    table.append(none, none)
    table.commit(none, none)
    table.drop(none)
    table.free(none)
    assert table.tables(none).indptr.tolist() == [0]
    assert table.blocks_needed(none, none).size == 0


def test_the_same_commands_give_the_same_state_bit_for_bit() -> None:
    def history() -> tuple[object, ...]:
        table = PageTable(40, 2)
        rng = np.random.default_rng(7)
        alive: list[int] = []
        for _ in range(300):
            if len(alive) < 5:
                alive.append(table.create(rng.integers(0, 2, 8).astype(np.int32)))
                table.reuse(alive[-1])
            chosen = alive[int(rng.integers(len(alive)))]
            if rng.random() < 0.2:
                table.free([chosen])
                alive.remove(chosen)
            elif rng.random() < 0.2:
                alive.append(int(table.fork(chosen)[0]))
            elif table.blocks_needed([chosen], table.length([chosen]))[0] <= table.available():
                run(table, chosen)
                table.append([chosen], [int(rng.integers(0, 2))])
            else:
                table.drop([chosen])
        columns = table.tables(table.sequences())
        return (table.sequences().tolist(), columns.indices.tolist(), table.states(), str(table.counters))

    assert history() == history()


def test_a_block_that_was_half_computed_before_a_reset_of_the_cache_is_not_found_when_it_is_full(
    table: PageTable,
) -> None:
    sequence = table.create(prompt(1, 2, 3))
    run(table, sequence)
    table.reset_cache()
    table.append([sequence], [4])
    run(table, sequence)
    assert table.match(table.create(prompt(1, 2, 3, 4, 5))).blocks == 0
    table.free([sequence])
    assert table.states().cached == 0


def test_what_is_sealed_behind_a_block_that_is_gone_is_not_kept_as_cached(table: PageTable) -> None:
    """The second of two equal sequences chains from the first one's block, and that one is written again."""
    first, second = table.create(prompt(1, 2, 3, 4, 5)), table.create(prompt(1, 2, 3, 4, 5))
    run(table, first)
    run(table, second)
    table.truncate([first], [3])
    table.append([first], [9])
    run(table, first)
    for token in (6, 7, 8):
        table.append([second], [token])
    run(table, second)
    assert table.match(table.create(prompt(1, 2, 3, 4, 5, 6, 7, 8, 0))).blocks == 0
    table.free([second])
    assert table.states().cached == 0


def test_a_double_goes_on_from_whichever_block_holds_its_content_now(table: PageTable) -> None:
    first, second = table.create(prompt(1, 2, 3, 4)), table.create(prompt(1, 2, 3, 4))
    run(table, first)
    run(table, second)
    table.truncate([first], [3])
    table.append([first], [9])
    run(table, first)
    third = table.create(prompt(1, 2, 3, 4, 5))  # computes the same once more, and is found from now on
    run(table, third)
    for token in (6, 7, 8, 9):
        table.append([second], [token])
    run(table, second)
    assert table.match(table.create(prompt(1, 2, 3, 4, 6, 7, 8, 9, 0))).blocks == 2
