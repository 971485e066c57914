"""What is held for somebody until a moment on the page table's clock: pins and reservations, by id."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

from block_manager_svc.core.errors import NotFound
from block_manager_svc.core.undo import Agenda

T = TypeVar("T")


class Terms(Generic[T]):
    """Ids are never used again."""

    __slots__ = ("_due", "_held", "_ids", "_not_found")

    def __init__(self, not_found: Callable[[int], NotFound]) -> None:
        """not_found: the refusal of an id that is not held."""
        self._not_found = not_found
        self._ids = count(1)
        self._held: dict[int, tuple[int, T]] = {}  # id -> whose it is, and what
        self._due = Agenda()  # of (until, id), with those that are gone

    def add(self, value: T, until: int, owner: int) -> int:
        held = next(self._ids)
        self._held[held] = owner, value
        heapq.heappush(self._due, (until, held))
        return held

    def get(self, held: int, owner: int) -> T:
        """NotFound if it was removed, its time is over, it is somebody else's, or it never was."""
        found = self._held.get(held)
        if found is None or found[0] != owner:
            raise self._not_found(held)
        return found[1]

    def held(self, held: int) -> T:
        """What is held under an id, whoever's it is."""
        return self._held[held][1]

    def check(self, ids: list[int], owner: int) -> None:
        """That all of these are held, and distinct; NotFound as `get`."""
        seen: set[int] = set()
        for held in ids:
            if held in seen:
                raise self._not_found(held)
            self.get(held, owner)
            seen.add(held)

    def replace(self, held: int, value: T) -> None:
        self._held[held] = self._held[held][0], value

    def remove(self, held: int) -> None:
        del self._held[held]
        if len(self._due) > 2 * len(self._held) + 64:
            self._due = Agenda(due for due in self._due if due[1] in self._held)
            heapq.heapify(self._due)

    def over(self, now: int) -> Iterator[tuple[int, T]]:
        """Those whose time is over, the earliest first; each is to be removed before the next is asked for."""
        while self._due and self._due[0][0] <= now:
            _, held = heapq.heappop(self._due)
            if held in self._held:
                yield held, self._held[held][1]

    def values(self) -> list[T]:
        return [value for _, value in self._held.values()]
