"""LFU against a list and a count; what is special to it. The page table with it: the state machine and the walk."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.core import PageTable
from block_manager_svc.core.eviction import LFU
from block_manager_svc.core.eviction.lfu import MOST


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def found_again(lfu: LFU, *numbers: int) -> None:
    lfu.remove(blocks(*numbers))
    lfu.add(blocks(*numbers))


def test_what_was_found_least_often_goes_first_and_among_equals_the_oldest() -> None:
    lfu = LFU(10)
    lfu.add(blocks(1, 2, 3, 4))
    found_again(lfu, 1, 2)
    found_again(lfu, 2)
    assert lfu.order().tolist() == [3, 4, 1, 2]
    assert lfu.evict(3).tolist() == [3, 4, 1]
    assert (len(lfu), lfu.order().tolist()) == (1, [2])
    assert lfu.evict(0).tolist() == []


def test_a_block_that_was_evicted_or_forgotten_begins_anew() -> None:
    lfu = LFU(10)
    lfu.add(blocks(1, 2))
    for _ in range(3):
        found_again(lfu, 1, 2)
    assert lfu.evict(1).tolist() == [1]
    lfu.add(blocks(1))
    lfu.remove(blocks(2))
    lfu.forget(blocks(2))
    lfu.add(blocks(2))
    assert lfu.order().tolist() == [1, 2]


def test_no_blocks_are_no_change() -> None:
    lfu = LFU(10)
    lfu.add(blocks(1, 2))
    found_again(lfu)
    assert lfu.order().tolist() == [1, 2]


def test_counts_end_somewhere() -> None:
    lfu = LFU(4)
    lfu.add(blocks(1, 2))
    for _ in range(MOST + 300):
        found_again(lfu, 1)
    for _ in range(MOST):
        found_again(lfu, 2)
    assert lfu.order().tolist() == [1, 2]  # equals now, the older one first


def test_a_prompt_that_many_ask_for_outlives_one_that_came_later() -> None:
    table = PageTable(8, 4, eviction="lfu")

    def ask(first: int) -> int:
        sequence = table.create(np.arange(first, first + 9, dtype=np.int32))
        found = table.reuse(sequence)
        table.extend([sequence], [9])
        table.commit([sequence], [9])
        table.free([sequence])
        return found

    assert [ask(10), ask(10), ask(10)] == [0, 8, 8]
    for once in (30, 50, 70, 90):
        assert ask(once) == 0
    assert ask(10) == 8
    assert table.check() == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "evict", "forget"]),
            st.lists(st.integers(1, 15), unique=True, max_size=8),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_a_list_and_a_count(commands: list[tuple[str, list[int]]]) -> None:
    lfu = LFU(16)
    held: list[int] = []
    uses = dict.fromkeys(range(16), 0)
    for command, numbers in commands:
        if command == "add":
            new = [n for n in numbers if n not in held]
            lfu.add(blocks(*new))
            held += new
        elif command == "remove":
            gone = [n for n in numbers if n in held]
            lfu.remove(blocks(*gone))
            held = [n for n in held if n not in gone]
            uses.update({n: min(uses[n] + 1, MOST) for n in gone})
        elif command == "forget":
            outside = [n for n in numbers if n not in held]
            lfu.forget(blocks(*outside))
            uses.update(dict.fromkeys(outside, 0))
        else:
            count = min(len(numbers), len(held))
            victims = sorted(held, key=uses.__getitem__)[:count]
            assert lfu.evict(count).tolist() == victims
            held = [n for n in held if n not in victims]
            uses.update(dict.fromkeys(victims, 0))
        assert len(lfu) == len(held)
        assert lfu.order().tolist() == sorted(held, key=uses.__getitem__)
