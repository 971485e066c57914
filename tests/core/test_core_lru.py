from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.core.eviction import LRU


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_what_was_added_first_goes_first() -> None:
    lru = LRU(10)
    lru.add(blocks(4, 2))
    lru.add(blocks(9))
    assert lru.order().tolist() == [4, 2, 9]
    assert lru.evict(2).tolist() == [4, 2]
    assert len(lru) == 1
    assert lru.evict(0).tolist() == []
    assert lru.evict(1).tolist() == [9]
    assert len(lru) == 0
    assert lru.order().tolist() == []


def test_a_block_that_is_added_again_goes_last() -> None:
    lru = LRU(10)
    lru.add(blocks(1, 2, 3))
    lru.remove(blocks(1))
    lru.add(blocks(1))
    assert lru.evict(3).tolist() == [2, 3, 1]


def test_runs_and_single_blocks_are_removed_from_any_place() -> None:
    lru = LRU(20)
    lru.add(blocks(*range(1, 11)))
    lru.remove(blocks(10, 3, 4, 5, 1, 8, 7))
    assert lru.order().tolist() == [2, 6, 9]
    lru.remove(blocks(2, 6, 9))
    assert lru.order().tolist() == []
    lru.add(blocks(5))
    assert lru.order().tolist() == [5]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "evict"]), st.lists(st.integers(1, 15), unique=True, max_size=8)),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_a_list(commands: list[tuple[str, list[int]]]) -> None:
    lru = LRU(16)
    order: list[int] = []
    for command, numbers in commands:
        if command == "add":
            new = [n for n in numbers if n not in order]
            lru.add(np.array(new, np.int64))
            order += new
        elif command == "remove":
            held = [n for n in numbers if n in order]
            lru.remove(np.array(held, np.int64))
            order = [n for n in order if n not in held]
        else:
            count = min(len(numbers), len(order))
            assert lru.evict(count).tolist() == order[:count]
            del order[:count]
        assert len(lru) == len(order)
        assert lru.order().tolist() == order
