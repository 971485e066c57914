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
    assert allocator.allocate(0).dtype == np.int64  # an index into columns, whatever is asked
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


# --- what it costs, in bytes of the bitmap that are looked at -------------------------------------------------------


class Work:
    """Sizes in bytes of what passes between bits and flags."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unpacked: list[int] = []
        self.packed: list[int] = []
        unpack, pack = np.unpackbits, np.packbits

        def unpackbits(bits: np.ndarray, **options: str) -> np.ndarray:
            self.unpacked.append(bits.size)
            return unpack(bits, **options)

        def packbits(flags: np.ndarray, **options: str) -> np.ndarray:
            self.packed.append(flags.size // 8)
            return pack(flags, **options)

        monkeypatch.setattr(np, "unpackbits", unpackbits)
        monkeypatch.setattr(np, "packbits", packbits)


@pytest.fixture
def taken() -> BitmapAllocator:
    """2**20 blocks in 1,024 leaves, none of them free."""
    allocator = BitmapAllocator(1 << 20)
    allocator.allocate((1 << 20) - 1)
    return allocator


def test_neighbours_are_found_in_one_look_at_little_more_than_them(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = BitmapAllocator(1 << 20)
    work = Work(monkeypatch)
    allocator.allocate(4096)
    assert work.unpacked == [16 + 4096 // 8]


def test_leaves_that_have_nothing_are_jumped_over(taken: BitmapAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    taken.free(np.array([3, (900 << 10) + 5]))
    assert taken.allocate(1).tolist() == [3]
    work = Work(monkeypatch)
    assert taken.allocate(1).tolist() == [(900 << 10) + 5]
    # What is left of the first leaf may have something, for all that is known; the 899 after it have nothing.
    assert sum(work.unpacked) < 512


def test_scattered_blocks_are_found_in_few_looks(taken: BitmapAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    taken.free(np.arange(64, 1 << 16, 64))
    work = Work(monkeypatch)
    assert taken.allocate(1000).size == 1000
    assert len(work.unpacked) < 8
    assert sum(work.unpacked) < 3 * (1 << 16) // 8


def test_blocks_that_lie_close_are_freed_through_a_window_as_wide_as_they_lie(
    taken: BitmapAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = np.arange(0, 1600, 16) + (500 << 10)
    work = Work(monkeypatch)
    taken.free(np.append(blocks, (500 << 10) + 1599))
    taken.free(blocks + (3 << 10) + 1)  # as sparse as may be: one of 16
    taken.free(np.arange(0, 17 * 99, 17) + (600 << 10))
    assert work.packed == [200, 199]
    leaves = np.flatnonzero(taken._any_free_view[:-1])
    assert leaves.tolist() == [500, 501, 503, 504, 600, 601]


@pytest.mark.parametrize("count", [1, 24, 25, 100])
@pytest.mark.parametrize("step", [1, 30])
def test_what_is_freed_behind_an_empty_leaf_is_found(count: int, step: int) -> None:
    """A leaf is told from its summary, whichever way its blocks were freed."""
    allocator = BitmapAllocator(20 << 10)
    allocator.allocate((20 << 10) - 1)
    allocator.free(np.array([1023]))
    blocks = np.arange(count) * step + (15 << 10) + 7
    allocator.free(blocks)
    assert allocator.allocate(1).tolist() == [1023]
    assert allocator.allocate(count).tolist() == blocks.tolist()
    assert allocator.check() == []


def test_a_block_outside_the_pool_is_told_by_its_number() -> None:
    allocator = BitmapAllocator(1000)
    allocator.free(np.array([1000]))
    assert "blocks 1 to 1000 are free, the pool hands out 1 to 999" in allocator.check()


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
