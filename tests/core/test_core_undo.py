"""Recordings of each kind of container: every way to write into one is taken back."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from block_manager_svc.core.eviction.fifo import Fifo
from block_manager_svc.core.undo import Agenda, Recording


class Part:
    """One of each; `items` are those of `column`, as in a list of blocks."""

    __slots__ = (
        "agenda",
        "bits",
        "column",
        "fifo",
        "ids",
        "items",
        "lists",
        "names",
        "number",
        "numbers",
        "pair",
        "same_fifo",
    )

    def __init__(self) -> None:
        self.column = np.arange(8)
        self.items = self.column.data
        self.bits = bytearray(b"\1\0\1\1")
        self.numbers = [3, 1, 2]
        self.names = {"a": 1, "b": 2}
        self.lists = {4: [1, 2]}
        self.pair = ({7}.pop(), "seven")
        self.fifo: Fifo[str] = Fifo()
        self.fifo.append("first")
        self.same_fifo = self.fifo
        self.agenda = Agenda([(1, 1)])
        self.ids = itertools.count(5)
        self.number = 1

    def state(self) -> list[object]:
        return [
            self.column.tolist(),
            self.items.tolist(),
            bytes(self.bits),
            list(self.numbers),
            dict(self.names),
            {key: list(values) for key, values in self.lists.items()},
            list(self.fifo),
            self.number,
        ]


def add_at(part: Part) -> None:
    np.add.at(part.column, [1, 1, 2], 10)


def into_a_part_of_it(part: Part) -> None:
    part.column[2:6] |= 64


def add_out(part: Part) -> None:
    np.add(part.column, 1, out=part.column)


def another_array(part: Part) -> None:
    part.column = np.concatenate((part.column, part.column))
    part.column[0] = 9


def like_it(part: Part) -> None:
    part.column = np.empty_like(part.column)
    part.column[:] = 4


def of_a_slice(part: Part) -> None:
    view = part.column[1:4]
    view[np.array([True, False, True])] = 77


WRITES: list[Callable[[Part], object]] = [
    lambda part: part.column.__setitem__(3, 9),
    lambda part: part.column.__setitem__(slice(1, 4), 9),
    lambda part: part.column.__setitem__(np.array([1, 1, 5]), np.array([7, 8, 9])),
    lambda part: part.column.__setitem__(part.column > 3, 0),
    add_at,
    into_a_part_of_it,
    add_out,
    another_array,
    like_it,
    of_a_slice,
    lambda part: part.items.__setitem__(2, 9),
    lambda part: part.bits.__setitem__(part.bits.find(0, 1), 1),
    lambda part: part.numbers.append(9),
    lambda part: part.numbers.extend([9, 8]),
    lambda part: part.numbers.pop(),
    lambda part: part.numbers.remove(1),
    lambda part: part.numbers.insert(0, 9),
    lambda part: part.numbers.__setitem__(1, 9),
    lambda part: part.numbers.__setitem__(slice(0, 2), [9]),
    lambda part: part.names.__setitem__("a", 9),
    lambda part: part.names.__setitem__("c", 9),
    lambda part: part.names.pop("a"),
    lambda part: part.names.pop("z", None),
    lambda part: part.names.update({"a": 5, "d": 6}),
    lambda part: part.names.clear(),
    lambda part: part.lists[4].append(3),
    lambda part: part.lists.setdefault(4, []).append(3),
    lambda part: part.lists.setdefault(5, []).append(3),
    lambda part: part.lists.update({6: part.lists.pop(4)}),
    lambda part: part.fifo.append("second"),
    lambda part: part.same_fifo.popleft(),
    lambda part: setattr(part, "number", 2),
    lambda part: setattr(part, "numbers", [0]),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_reaches_the_state_and_is_taken_back(write: Callable[[Part], object]) -> None:
    part, plain = Part(), Part()
    before = part.state()
    write(plain)
    with Recording(part):
        write(part)
    assert part.state() == plain.state()
    assert [type(getattr(part, name)) for name in Part.__slots__] == [type(getattr(plain, n)) for n in Part.__slots__]

    part = Part()
    column, numbers = part.column, part.numbers
    with Recording(part) as recording:
        write(part)
        recording.take_back()
    assert part.state() == before
    assert part.column is column
    assert part.numbers is numbers


def test_all_writes_one_after_another_are_taken_back_in_reverse() -> None:
    part = Part()
    before = part.state()
    for rotation in range(len(WRITES)):
        with Recording(part) as recording:
            for write in WRITES[rotation:] + WRITES[:rotation]:
                with contextlib.suppress(LookupError, ValueError):  # what an earlier write has taken away
                    write(part)
            recording.take_back()
        assert part.state() == before


def test_sets_record_too() -> None:
    class Holder:
        __slots__ = ("values",)

        def __init__(self) -> None:
            self.values = {1, 2}

    holder = Holder()
    with Recording(holder) as recording:
        holder.values.add(3)
        holder.values.add(1)
        holder.values.discard(2)
        holder.values.discard(9)
        assert sorted(holder.values) == [1, 3]
        assert (len(holder.values), 3 in holder.values, 2 in holder.values) == (2, True, False)
        recording.take_back()
        holder.values.add(4)
    assert holder.values == {1, 2, 4}


def test_what_cannot_be_recorded_is_a_fault_at_once() -> None:
    class Holder:
        __slots__ = ("value",)

    for value in (deque([1]), ([1],)):
        holder = Holder()
        holder.value = value
        with pytest.raises(AssertionError, match="is not recorded"):
            Recording(holder).__enter__()


def test_reading_while_recording_gives_plain_values() -> None:
    part = Part()
    with Recording(part):
        assert type(part.column[np.array([1, 2])]) is np.ndarray
        assert type(part.column + 1) is np.ndarray
        assert np.add(part.column, 1, out=np.empty(8, np.int64)).tolist() == list(range(1, 9))
        assert (part.column[2], part.items[2], part.bits[0], part.numbers[0], len(part.bits)) == (2, 2, 1, 3, 4)
        assert (list(part.numbers), list(part.names), part.names.get("z"), "a" in part.names) == (
            [3, 1, 2],
            ["a", "b"],
            None,
            True,
        )
        assert (len(part.names), len(part.numbers), part.names["b"]) == (2, 3, 2)
        assert next(part.ids) == 5
    assert next(part.ids) == 6
