"""A queue that anything in it can be taken out of, in constant time: the order is in numbers, not in a structure.

first ─► 4  5  7  8 ─► next        the keys that came in as numbers 4, 5, 7 and 8; 6 was taken out
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Fifo(Generic[K]):
    __slots__ = ("_first", "_keys", "_next", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[K, int] = {}
        self._keys: dict[int, K] = {}
        self._first = 0  # no number below is in use
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: K) -> bool:
        return key in self._numbers

    def append(self, key: K) -> None:
        """To the end; it must not be in the queue."""
        self._numbers[key] = self._next
        self._keys[self._next] = key
        self._next += 1

    def remove(self, key: K) -> None:
        """It must be in the queue."""
        del self._keys[self._numbers.pop(key)]

    def popleft(self) -> K:
        """The first to have come, of a queue that is not empty."""
        while self._first not in self._keys:
            self._first += 1
        key = self._keys.pop(self._first)
        del self._numbers[key]
        return key

    def __iter__(self) -> Iterator[K]:
        """In order, for audits."""
        return (self._keys[number] for number in sorted(self._keys))

    def copy(self) -> Fifo[K]:
        copied: Fifo[K] = Fifo()
        for key in self:
            copied.append(key)
        return copied
