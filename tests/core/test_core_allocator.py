from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.core.allocator import BitmapAllocator


def test_the_lowest_numbers_go_first_and_block_0_never() -> None:
    allocator = BitmapAllocator(6)
    assert len(allocator) == 5
    assert allocator.allocate(2).tolist() == [1, 2]
    assert allocator.allocate(3).tolist() == [3, 4, 5]
    assert len(allocator) == 0
    assert allocator.allocate(0).tolist() == []
    assert allocator.check() == []


def test_what_is_given_back_is_handed_out_again_before_higher_numbers() -> None:
    allocator = BitmapAllocator(5000)
    allocator.allocate(3000)
    allocator.free(np.array([2500, 7, 1100]))
    assert allocator.allocate(4).tolist() == [7, 1100, 2500, 3001]
    assert allocator.check() == []


@pytest.mark.parametrize("num_blocks", [2, 1023, 1024, 1025, 2048, 70_001])
def test_the_whole_pool_can_be_taken_and_given_back(num_blocks: int) -> None:
    allocator = BitmapAllocator(num_blocks)
    for _ in range(2):
        blocks = allocator.allocate(num_blocks - 1)
        assert blocks.tolist() == list(range(1, num_blocks))
        assert len(allocator) == 0
        assert allocator.free_blocks().size == 0
        assert allocator.check() == []
        allocator.free(blocks[::-1])
        assert len(allocator) == num_blocks - 1


def test_blocks_scattered_over_the_pool_are_found_in_order() -> None:
    allocator = BitmapAllocator(1 << 18)
    allocator.allocate((1 << 18) - 1)
    scattered = np.random.default_rng(0).permutation(np.arange(1, 1 << 18))[:300]
    allocator.free(scattered)
    assert allocator.check() == []
    assert allocator.allocate(300).tolist() == sorted(scattered.tolist())
    assert allocator.check() == []


@given(
    num_blocks=st.sampled_from([40, 3000]),
    commands=st.lists(st.tuples(st.booleans(), st.integers(0, 900), st.integers(0, 2**32 - 1)), max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_it_agrees_with_a_set_of_numbers(num_blocks: int, commands: list[tuple[bool, int, int]]) -> None:
    allocator = BitmapAllocator(num_blocks)
    free = set(range(1, num_blocks))
    taken: set[int] = set()
    for take, count, seed in commands:
        if take:
            count = min(count, len(free))
            expected = sorted(free)[:count]
            assert allocator.allocate(count).tolist() == expected
            free -= set(expected)
            taken |= set(expected)
        else:
            back = np.random.default_rng(seed).permutation(sorted(taken))[:count].astype(np.int64)
            allocator.free(back)
            taken -= set(back.tolist())
            free |= set(back.tolist())
        assert len(allocator) == len(free)
        assert allocator.free_blocks().tolist() == sorted(free)
        assert allocator.check() == []
