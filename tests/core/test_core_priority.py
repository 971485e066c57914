"""Eviction by priority with time to live, by hand and against a list. Under the page table: state machine and walk."""

from __future__ import annotations

import numpy as np
import pytest
from core_model import prompt, run
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.core import PageTable, Retention
from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.core.eviction import Priority


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def retained(retention: Retention, *numbers: int) -> Priority:
    """Blocks that are held, of these some with this retention, and 8 and 9 with none."""
    policy = Priority(20)
    policy.retain(blocks(*numbers), retention)
    policy.add(blocks(*numbers, 8, 9))
    return policy


def test_the_lowest_priority_goes_first_and_among_equals_the_oldest() -> None:
    policy = retained(Retention(80), 1, 2)
    policy.retain(blocks(3), Retention(0))
    policy.retain(blocks(4), Retention(100))
    policy.add(blocks(4, 3))
    assert policy.order().tolist() == [3, 8, 9, 1, 2, 4]
    assert policy.evict(4).tolist() == [3, 8, 9, 1]
    assert (len(policy), policy.evict(0).tolist(), policy.order().tolist()) == (2, [], [2, 4])


def test_what_nobody_spoke_for_has_priority_35() -> None:
    policy = retained(Retention(35), 1)
    policy.retain(blocks(2), Retention(34))
    policy.retain(blocks(3), Retention(36))
    policy.add(blocks(3, 2))
    assert policy.order().tolist() == [2, 1, 8, 9, 3]


@pytest.mark.parametrize("priority", [80, 10])
def test_after_its_time_a_block_has_the_default_priority_as_if_released_then(priority: int) -> None:
    policy = retained(Retention(priority, ttl_ms=50), 1, 2)
    before = [8, 9, 1, 2] if priority == 80 else [1, 2, 8, 9]
    policy.advance(49)
    assert policy.order().tolist() == before
    policy.advance(50)
    assert policy.order().tolist() == [8, 9, 1, 2]
    policy.retain(blocks(3), Retention(36))
    policy.retain(blocks(4), Retention(34))
    policy.add(blocks(3, 4))
    assert policy.order().tolist() == [4, 8, 9, 1, 2, 3]


def test_what_ends_at_once_goes_in_the_order_of_its_end_and_then_of_its_release() -> None:
    policy = retained(Retention(80, ttl_ms=50), 1, 2)
    policy.retain(blocks(3), Retention(90, ttl_ms=20))
    policy.add(blocks(3))
    policy.advance(1000)
    assert policy.order().tolist() == [8, 9, 3, 1, 2]


def test_the_time_begins_anew_with_each_release_and_stands_still_in_between() -> None:
    policy = retained(Retention(80, ttl_ms=50), 1, 2)
    policy.advance(40)
    policy.remove(blocks(1))
    policy.advance(60)
    assert policy.order().tolist() == [8, 9, 2]
    policy.add(blocks(1))
    policy.advance(109)
    assert policy.order().tolist() == [8, 9, 2, 1]
    policy.retain(blocks(3), Retention(36))
    policy.add(blocks(3))
    assert policy.order().tolist() == [8, 9, 2, 3, 1]
    policy.advance(110)
    assert policy.order().tolist() == [8, 9, 2, 1, 3]


def test_an_evicted_block_keeps_nothing_of_its_priority() -> None:
    policy = retained(Retention(10, ttl_ms=50), 1)
    assert policy.evict(1).tolist() == [1]
    policy.add(blocks(1))
    policy.advance(60)
    assert policy.order().tolist() == [8, 9, 1]


def test_the_default_priority_does_not_end() -> None:
    policy = retained(Retention(35, ttl_ms=5), 1, 2)
    policy.advance(10)
    assert policy.order().tolist() == [1, 2, 8, 9]


def test_blocks_that_come_and_go_within_their_time_cost_no_memory() -> None:
    policy = retained(Retention(80, ttl_ms=1_000_000), 1)
    for _ in range(1000):
        policy.remove(blocks(1))
        policy.add(blocks(1))
    assert len(policy._due) < 100
    policy.advance(1_000_000)
    assert policy.order().tolist() == [8, 9, 1]
    assert policy._ends == {}


# --- the page table: a block holds 4 tokens -------------------------------------------------------------------------


def ask(table: PageTable, first: int, retention: Retention | None = None) -> int:
    """A request of 9 tokens from `first` on, of which two blocks are full. Returns what was found."""
    sequence = table.create(prompt(*range(first, first + 9)), retention=retention)
    found = table.reuse(sequence)
    run(table, sequence)
    table.free([sequence])
    return found


@pytest.fixture
def table() -> PageTable:
    return PageTable(8, 4, eviction="priority")


def test_a_prefix_with_priority_outlives_what_comes_later(table: PageTable) -> None:
    ask(table, 100, Retention(90))
    assert [ask(table, first) for first in (200, 300, 400, 500)] == [0] * 4
    assert ask(table, 100) == 8
    assert table.check() == []


def test_the_page_tables_clock_ends_priorities(table: PageTable) -> None:
    ask(table, 100, Retention(90, ttl_ms=1000))
    table.advance(1000)
    assert [ask(table, first) for first in (200, 300, 400, 500)] == [0] * 4
    assert ask(table, 100) == 0


def test_who_finds_blocks_has_the_last_word_on_them_or_none(table: PageTable) -> None:
    ask(table, 100, Retention(90))
    ask(table, 100)
    assert [ask(table, first) for first in (200, 300, 400)] == [0] * 3
    assert ask(table, 100, Retention(0)) == 8
    ask(table, 500)
    assert (ask(table, 400), ask(table, 100)) == (8, 0)


def test_a_child_of_a_fork_speaks_as_its_parent(table: PageTable) -> None:
    parent = table.create(prompt(*range(100, 104)), retention=Retention(90))
    run(table, parent)
    [child] = table.fork(parent).tolist()
    table.free([parent])
    table.grow([child], [5], list(range(104, 109)), [0])
    table.commit([child], [9])
    table.free([child])
    assert [ask(table, first) for first in (200, 300, 400, 500)] == [0] * 4
    assert ask(table, 100) == 8


def test_prompts_that_begin_together_have_one_retention(table: PageTable) -> None:
    begun = table.begin([9, 5], [*range(100, 109), *range(50, 55)], [0, 0], retention=Retention(90)).sequences
    table.commit(begun, [9, 5])
    table.free(begun)
    again = table.begin([9], list(range(100, 109)), [0], retention=Retention(0)).sequences
    table.free(again)
    ask(table, 200)
    ask(table, 300)
    assert (ask(table, 50), ask(table, 100)) == (4, 0)


def test_the_double_of_a_block_says_nothing_about_it(table: PageTable) -> None:
    """It is not findable, and free as soon as its holder is gone; whoever takes the block next is not meant."""
    first, second = table.create(prompt(*range(5))), table.create(prompt(*range(5)), retention=Retention(0))
    for sequence in (first, second):
        table.extend([sequence], [5])
    table.commit([first, second], [5, 5])
    table.free([second])  # blocks 3 and 4
    table.free([first])
    ask(table, 100)  # takes 2, 3 and 4, and fills 2 and 3
    assert table._pool.cached.order().tolist() == [1, 3, 2]


def test_content_that_is_written_over_loses_its_priority(table: PageTable) -> None:
    ask(table, 100, Retention(90))  # fills 1 and 2
    writer = table.create(prompt(*range(100, 109)))
    table.reuse(writer)
    table.truncate([writer], [6])
    table.grow([writer], [2], [50, 51], [0])
    table.commit([writer], [8])
    table.free([writer])
    ask(table, 200)  # fills 3 and 4
    assert table._pool.cached.order().tolist() == [2, 4, 3, 1]
    assert table.check() == []


def test_blocks_that_come_back_from_the_host_have_their_sequences_priority_again() -> None:
    table = PageTable(8, 4, num_host=8, eviction="priority")
    sequence = table.create(prompt(*range(100, 109)), retention=Retention(90))
    run(table, sequence)
    table.swap([sequence], [])
    ask(table, 600)  # in the blocks that it left, with no priority
    table.swap([], [sequence])
    table.free([sequence])
    assert [ask(table, first) for first in (200, 300, 400, 500)] == [0] * 4
    assert ask(table, 100) == 8
    assert table.check() == []


@pytest.mark.parametrize(
    ("priority", "ttl_ms", "reason"),
    [(-1, None, "PRIORITY_OUT_OF_RANGE"), (101, 5, "PRIORITY_OUT_OF_RANGE"), (50, 0, "TTL_OUT_OF_RANGE")],
)
def test_a_retention_that_cannot_be_is_refused(priority: int, ttl_ms: int | None, reason: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        Retention(priority, ttl_ms)
    assert refusal.value.reason == reason
    assert Retention(0, 1).priority + Retention(100).priority == 100


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "remove", "evict", "forget", "retain", "retain", "advance"]),
            st.lists(st.integers(1, 15), unique=True, max_size=8),
            st.sampled_from([(0, 0), (20, 3), (35, 3), (60, 0), (60, 5), (100, 2)]),
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_it_agrees_with_a_list(commands: list[tuple[str, list[int], tuple[int, int]]]) -> None:
    policy = Priority(16)
    held: list[int] = []
    said: dict[int, tuple[int, int]] = {}
    ends: dict[int, int] = {}
    now = 0

    def priority(n: int) -> int:
        return said.get(n, (35, 0))[0]

    for command, numbers, retention in commands:
        inside = [n for n in numbers if n in held]
        outside = [n for n in numbers if n not in held]
        if command == "add":
            policy.add(blocks(*outside))
            for n in outside:
                held.append(n)
                level, ttl = said.get(n, (35, 0))
                if ttl and level != 35:
                    ends[n] = now + ttl
        elif command == "remove":
            policy.remove(blocks(*inside))
            for n in inside:
                held.remove(n)
                ends.pop(n, None)
        elif command == "forget":
            policy.forget(blocks(*outside))
            for n in outside:
                said.pop(n, None)
        elif command == "retain":
            policy.retain(blocks(*outside), Retention(retention[0], retention[1] or None))
            said.update(dict.fromkeys(outside, retention))
        elif command == "advance":
            now += len(numbers)
            policy.advance(now)
            for n in sorted((n for n in held if ends.get(n, now + 1) <= now), key=ends.__getitem__):
                del ends[n], said[n]
                held.remove(n)
                held.append(n)
        else:
            count = min(len(numbers), len(held))
            victims = sorted(held, key=priority)[:count]
            assert policy.evict(count).tolist() == victims
            for n in victims:
                held.remove(n)
                said.pop(n, None)
                ends.pop(n, None)
        assert len(policy) == len(held)
        assert policy.order().tolist() == sorted(held, key=priority)
