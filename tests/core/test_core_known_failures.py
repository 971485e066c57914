"""How block managers of public engines have failed, as far as it concerns the core: the numbers are those of
docs' list of known failures. A block holds 4 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from core_model import Device, Model, prompt, run, snapshot

from block_manager_svc.core import Match, PageTable
from block_manager_svc.core.errors import OutOfBlocks, SequenceNotFound
from block_manager_svc.core.step import OpKind


@pytest.fixture
def table() -> PageTable:
    return PageTable(8, 4)


def test_1_sharers_are_freed_once_each_and_a_second_free_changes_nothing(table: PageTable) -> None:
    parent = table.create(prompt(*range(10)))
    run(table, parent)
    child = int(table.fork(parent)[0])
    table.free([parent])
    assert table.tables([child]).refcount.tolist() == [1, 1, 1]
    table.free([child])
    before = snapshot(table)
    for gone in (parent, child):
        with pytest.raises(SequenceNotFound):
            table.free([gone])
    assert snapshot(table) == before
    assert table.available() == 7


def test_2_the_parent_of_a_freed_child_appends_in_place(table: PageTable) -> None:
    parent = table.create(prompt(*range(6)))
    run(table, parent)
    table.free(table.fork(parent))
    table.append([parent], [1])
    extended = run(table, parent)
    assert extended.copy_src.size == 0
    assert extended.delta_blocks.size == 0
    assert table.counters.copies_on_write == 0


@pytest.mark.parametrize("sharers", [2, 3, 5])
def test_3_of_n_sharers_that_all_append_n_minus_1_copy_and_the_last_writes_in_place(sharers: int) -> None:
    table, model, device = PageTable(16, 4), Model(16, 4), Device(16, 4)
    parent = table.create(prompt(*range(6)))
    model.create(parent, list(range(6)), b"")
    model.extend([parent], [6])
    device.run(model, [parent], [6], table.extend([parent], [6]))
    table.commit([parent], [6])
    model.commit(parent, 6)
    family = [parent, *table.fork(parent, sharers - 1).tolist()]
    for child in family[1:]:
        model.fork(parent, child)
    model.compare(table)
    table.append(family, range(sharers))
    for sequence, token in zip(family, range(sharers), strict=True):
        model.sequences[sequence].tokens.append(token)

    upto = [7] * sharers
    assert table.blocks_needed(family, upto).tolist() == [1] * (sharers - 1) + [0]
    model.extend(family, upto)
    extended = table.extend(family, upto)
    assert extended.copy_src.tolist() == [2] * (sharers - 1)
    assert extended.delta_sequence.tolist() == list(range(sharers - 1))
    device.run(model, family, upto, extended)
    table.commit(family, upto)
    for sequence in family:
        model.commit(sequence, 7)
    device.verify(model)
    model.compare(table)


def test_4_of_a_prompt_that_is_wholly_cached_one_token_is_left_and_the_chain_stays_intact(table: PageTable) -> None:
    first = table.create(prompt(*range(8)))
    run(table, first)
    table.free([first])
    again = table.create(prompt(*range(8)))
    assert table.match(again) == Match(tokens=4, blocks=1, idle_blocks=1)
    assert table.reuse(again) == 4
    run(table, again)  # its second block holds what a cached one does
    table.append([again], [8])
    longer = table.create(prompt(*range(9)))
    assert table.reuse(longer) == 8
    assert table.check() == []


def test_5_own_hits_do_not_count_as_room_for_the_rest(table: PageTable) -> None:
    """5 free or evictable, 2 of them the request's own hits; 4 more are needed: refused, no refcount changed."""
    first = table.create(prompt(*range(8)))
    run(table, first)
    other = table.create(prompt(*range(50, 58)))
    table.extend([other], [8])
    table.free([first])
    request = table.create(prompt(*range(24)))
    assert table.available() == 5
    hits = table.match(request)
    assert hits == Match(tokens=8, blocks=2, idle_blocks=2)
    needed = 6 - hits.blocks
    assert needed + hits.idle_blocks > table.available()  # so it is not let in;
    table.reuse(request)  # and if it were,
    before = snapshot(table)
    with pytest.raises(OutOfBlocks) as refusal:
        table.extend([request], [24])
    assert refusal.value.numbers == {"needed": 4, "available": 3}
    assert snapshot(table) == before


def test_6_own_hits_are_not_evicted_by_the_allocation_that_they_are_part_of(table: PageTable) -> None:
    first = table.create(prompt(*range(8)))
    run(table, first)
    table.free([first])
    second = table.create(prompt(*range(50, 58)))
    run(table, second)
    table.free([second])  # the first's blocks would go first
    request = table.create(prompt(*range(27)))
    table.reuse(request)
    assert table.tables([request]).indices.tolist() == [1, 2]
    table.extend([request], [27])  # all 7 blocks: 3 free ones, and 2 evicted
    assert table.counters.evicted_blocks == 2
    assert table.tables([request]).indices.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert table.check() == []


def test_7_a_block_that_was_evicted_and_taken_again_is_not_found_by_what_it_held(table: PageTable) -> None:
    first = table.create(prompt(*range(8)))
    run(table, first)
    table.free([first])
    filler = table.create(prompt(*[9] * 28))
    table.extend([filler], [28])
    assert table.counters.evicted_blocks == 2
    again = table.create(prompt(*range(8)))
    assert table.match(again).blocks == 0
    table.commit([filler], [28])
    assert table.match(again).blocks == 0
    assert table.match(table.create(prompt(*[9] * 28))).blocks == 6


def test_8_identical_prompts_of_one_step_do_not_read_what_is_not_written(table: PageTable) -> None:
    a, b = table.create(prompt(*range(9))), table.create(prompt(*range(9)))
    for sequence in (a, b):
        assert table.reuse(sequence) == 0
    table.extend([a, b], [9, 9])
    assert table.match(table.create(prompt(*range(9)))).blocks == 0
    assert set(table.tables([a]).indices.tolist()).isdisjoint(table.tables([b]).indices.tolist())
    table.commit([a, b], [9, 9])

    third = table.create(prompt(*range(9)))
    assert table.match(third).blocks == 2
    table.free([b])  # the double: its blocks are free, the content stays findable
    assert table.match(third) == Match(tokens=8, blocks=2, idle_blocks=0)
    table.free([a])  # the canonical one: cached
    assert table.match(third) == Match(tokens=8, blocks=2, idle_blocks=2)
    assert table.check() == []


def test_8_freeing_the_canonical_one_first_keeps_the_double_whole() -> None:
    table = PageTable(9, 4)
    a, b = table.create(prompt(*range(9))), table.create(prompt(*range(9)))
    table.extend([a, b], [9, 9])
    table.commit([a, b], [9, 9])
    held = table.tables([b]).indices.tolist()
    table.free([a])
    filler = table.create(prompt(*[9] * 20))
    table.extend([filler], [20])  # all that is left
    assert table.tables([b]).indices.tolist() == held
    assert table.match(table.create(prompt(*range(9)))).blocks == 0
    assert table.check() == []


def test_9_equality_of_tokens_decides_not_a_hash(table: PageTable) -> None:
    """Every pair of 64 contents that sums, exclusive ors and low bits cannot tell apart."""
    contents = [prompt(i << 20, (63 - i) << 20, i ^ 63, 63) for i in range(64)]
    table = PageTable(130, 4)
    for content in contents:
        run(table, table.create(content))
    for i, content in enumerate(contents):
        reader = table.create(np.append(content, 0).astype(np.int32))
        table.reuse(reader)
        assert table.tables([reader]).indices.tolist() == [i + 1]


def test_10_rejected_drafts_are_never_found_and_their_blocks_return(table: PageTable) -> None:
    a = table.create(prompt(*range(3)))
    table.grow([a], [0], [], [9])
    table.grow([a], [9], [90 + i for i in range(9)], [0])  # drafts, written and not committed
    table.truncate([a], [4])  # one was right
    table.commit([a], [4])
    assert table.tables([a]).indices.tolist() == [1]
    assert table.available() == 6
    assert table.match(table.create(prompt(0, 1, 2, 90, 91, 92, 93, 94, 95))).tokens == 4
    assert table.match(table.create(prompt(0, 1, 2, 91, 92))).tokens == 0
    assert table.check() == []


def test_19_a_cache_reset_leaves_blocks_in_use_alone_and_what_was_cached_is_not_found(table: PageTable) -> None:
    user, idle = table.create(prompt(*range(10))), table.create(prompt(*range(50, 58)))
    run(table, user)
    run(table, idle)
    table.free([idle])
    table.pin(prompt(*range(50, 58)), until=9)
    assert (table.states().cached, table.reset_cache(), table.states().cached) == (2, 2, 0)
    assert table.tables([user]).indices.tolist() == [1, 2, 3]
    for tokens in (range(10), range(50, 60)):
        assert table.match(table.create(prompt(*tokens))).tokens == 0
    table.append([user], [10])
    table.append([user], [11])
    run(table, user)  # seals a block behind those that are not found
    table.truncate([user], [9])
    table.advance(9)
    assert table.check() == []
    again = table.create(prompt(*range(9)))
    run(table, again)
    assert table.match(table.create(prompt(*range(9)))).tokens == 8
    assert table.check() == []


def test_11_a_swap_in_does_not_live_on_blocks_that_its_own_sequence_holds() -> None:
    table = PageTable(8, 4, num_host=8)
    a = table.create(prompt(*range(16)))
    run(table, a)
    table.pin(prompt(*range(8)), until=9)
    table.swap([a], [])  # two blocks stay for the pin, two leave
    table.advance(9)
    other = table.create(prompt(*range(50, 66)))
    run(table, other)
    # One block is free, and two that only `a` holds, which no eviction may take.
    assert (table.available(), table.tables([a]).indices.tolist()) == (1, [1, 2, 9, 10])
    before = snapshot(table)
    with pytest.raises(OutOfBlocks) as refusal:
        table.swap([], [a])
    assert refusal.value.numbers == {"needed": 2, "available": 1}
    assert snapshot(table) == before
    table.free([other])
    table.swap([], [a])
    assert table.check() == []


def test_12_and_13_what_leaves_a_block_does_so_before_another_comes_into_it() -> None:
    table = PageTable(4, 4, num_host=6)
    a, b = (table.create(prompt(*range(start, start + 12))) for start in (0, 50))
    run(table, a)
    table.swap([a], [])
    run(table, b)
    ops = table.swap([b], [a]).ops
    # A block is vacated before it is filled, and so is a host slot: none has two contents at any time.
    device, host = {1, 2, 3}, {1, 2, 3}
    for kind, src, dst in zip(ops.kind.tolist(), ops.src.tolist(), ops.dst.tolist(), strict=True):
        source, target = (device, host) if kind == OpKind.SWAP_OUT else (host, device)
        assert dst not in target
        source.remove(src)
        target.add(dst)
    assert (len(device), len(host)) == (3, 3)


def test_16_an_idle_pool_admits_what_fits_whatever_the_watermark() -> None:
    table = PageTable(8, 4, watermark=7)
    begun = table.begin([28], range(28), [0])
    assert table.available() == 0
    table.free(begun.sequences)


def test_14_a_reservation_whose_request_never_comes_is_released_when_its_time_is_over(table: PageTable) -> None:
    table.reserve(7, until=10)
    with pytest.raises(OutOfBlocks):
        table.begin([4], range(4), [0])
    table.advance(10)
    table.begin([4], range(4), [0])


def test_15_what_can_never_fit_says_so_with_the_numbers(table: PageTable) -> None:
    """Even of an idle pool; the caller can fail it and go on with the next."""
    request = table.create(prompt(*range(29)))
    needed = int(table.blocks_needed([request], [29])[0])
    assert (needed, table.available()) == (8, 7)
    with pytest.raises(OutOfBlocks) as refusal:
        table.extend([request], [29])
    assert refusal.value.numbers == {"needed": 8, "available": 7}
    table.free([request])
    other = table.create(prompt(*range(28)))
    run(table, other)
    assert table.available() == 0
