from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.core.ragged import RaggedArena, ranges

ROWS = 8


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_ranges_are_joined_in_order() -> None:
    assert ranges(array(5, 0, 9), array(2, 0, 3)).tolist() == [5, 6, 9, 10, 11]
    assert ranges(array(), array()).tolist() == []


def test_an_outgrown_region_keeps_its_values_and_leaves_its_place_to_others() -> None:
    arena = RaggedArena(ROWS, least=4)
    arena.open(0, np.arange(4, dtype=np.int32))
    arena.open(1, np.arange(10, 14, dtype=np.int32))
    arena.reserve(array(0), array(4), array(5))
    assert arena.values(0, 4).tolist() == [0, 1, 2, 3]
    assert arena.capacity[0] == 8
    arena.open(2, np.array([7], np.int32))
    assert arena.start[2] == 0
    assert arena.values(1, 4).tolist() == [10, 11, 12, 13]
    assert arena.check("values") == []


def test_a_reservation_within_the_capacity_moves_nothing() -> None:
    arena = RaggedArena(ROWS, least=4)
    arena.open(3, np.zeros(1, np.int32))
    start = arena.start[3]
    arena.reserve(array(3), array(1), array(4))
    assert arena.start[3] == start
    assert arena.capacity[3] == 4


def test_values_are_gathered_row_by_row() -> None:
    arena = RaggedArena(ROWS, least=4)
    arena.open(0, np.arange(6, dtype=np.int32))
    arena.open(5, np.arange(20, 26, dtype=np.int32))
    assert arena.gather(array(5, 0), array(1, 4), array(3, 2)).tolist() == [21, 22, 23, 4, 5]
    assert arena.gather_equal(array(5, 0), array(0, 2), 2).tolist() == [[20, 21], [2, 3]]


def test_gaps_are_closed_rather_than_the_array_grown_when_they_are_half_of_it() -> None:
    arena = RaggedArena(ROWS, least=4)
    size = arena.data.size
    assert size == 1024
    for row, count in enumerate((512, 128, 128, 64, 128, 64)):
        arena.open(row, np.arange(count, dtype=np.int32))
    arena.close(array(0, 2, 3, 4))
    arena.reserve(array(5), array(64), array(129))
    assert arena.data.size == size
    assert arena.values(1, 128).tolist() == list(range(128))
    assert arena.values(5, 64).tolist() == list(range(64))
    assert arena.check("values") == []


def test_the_array_stays_in_proportion_to_what_is_open() -> None:
    arena = RaggedArena(ROWS, least=4)
    rng = np.random.default_rng(0)
    for i in range(400):
        row = i % ROWS
        arena.close(array(row))
        arena.open(row, np.zeros(int(rng.integers(1, 3000)), np.int32))
    assert arena.data.size <= 8 * ROWS * 4096


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "close", "grow", "renumber"]), st.integers(0, ROWS - 1), st.integers(1, 700)
        ),
        max_size=40,
    )
)
@settings(max_examples=100, deadline=None)
def test_it_agrees_with_lists(commands: list[tuple[str, int, int]]) -> None:
    arena = RaggedArena(ROWS, least=4)
    rows: dict[int, list[int]] = {}
    for value, (command, row, count) in enumerate(commands):
        if command == "renumber":
            old = array(*sorted(rows))
            new = old[::-1].copy()
            arena.move_rows(old, new, ROWS)
            rows = {int(n): rows[int(o)] for o, n in zip(old, new, strict=True)}
        elif command == "close":
            arena.close(array(row))
            rows.pop(row, None)
        elif row not in rows:
            rows[row] = [value] * count
            arena.open(row, np.full(count, value, np.int32))
        else:
            used = len(rows[row])
            arena.reserve(array(row), array(used), array(used + count))
            arena.data[arena.start[row] + used : arena.start[row] + used + count] = value
            rows[row] += [value] * count
        for r, held in rows.items():
            assert arena.values(r, len(held)).tolist() == held
        assert arena.check("values") == []
