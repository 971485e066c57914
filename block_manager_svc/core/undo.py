"""Takes changes of the core's state back, exactly: also the order in which blocks will be allocated and evicted.

While a `Recording` is on, every container in the state is replaced, where it is kept, by one that remembers what it
held before each write, and writes through:

    pool.refcount ─► recording view ── refcount[[3, 5]] = 1 ──► log: refcount[[3, 5]] were [0, 2]
                          └─ the same memory ─► array

So recording and taking back cost what was touched, whatever the pool's size; those who change the state know nothing of
it; and a container of a kind that is not known here is a fault at once, not a change that stays. References and numbers
are few: all are noted at the beginning.

Not taken back is what nothing later can see: ids that were counted off are skipped, an `Agenda` keeps entries that are
over, and a dictionary may list its items in another order (where order matters, the state has no dictionary).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

Log = list[Callable[[], object]]


class Agenda(list[Any]):
    """A heap of (moment, …, id). Whoever takes from it knows by the id, never used again, whether an entry is over."""

    __slots__ = ()


class Recording:
    """Records while its `with` lasts; `take_back` undoes everything since its beginning.

    root: the object that has the whole state in attributes (`__slots__`), its own and those of parts of the core.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._log: Log = []
        self._noted: list[tuple[object, str, object, object]] = []  # part, attribute, what it was, what it became
        self._parts: set[int] = set()

    def __enter__(self) -> Self:
        self._visit(self._root)
        return self

    def take_back(self) -> None:
        while self._log:
            self._log.pop()()
        for part, name, _, recording in self._noted:
            setattr(part, name, recording)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Puts plain containers back."""
        for part, name, value, recording in self._noted:
            now = getattr(part, name)
            if now is recording:
                plain = value
            elif isinstance(now, _Array):  # made from another
                plain = now.view(np.ndarray)
            else:
                continue
            setattr(part, name, plain)

    def _visit(self, part: object) -> None:
        if id(part) in self._parts:
            return
        self._parts.add(id(part))
        for kind in type(part).__mro__:
            for name in getattr(kind, "__slots__", ()):
                value = getattr(part, name)
                recording = self._recording(value)
                self._noted.append((part, name, value, recording))
                if recording is not value:
                    setattr(part, name, recording)

    def _recording(self, value: object) -> object:
        kind = type(value)
        if kind is np.ndarray:
            view: _Array = value.view(_Array)  # type: ignore[attr-defined]
            view.log = self._log
            return view
        if kind in _CONTAINERS:
            for each in value if kind is list else ():  # type: ignore[attr-defined]
                if type(each).__module__.startswith("block_manager_svc.core") and not isinstance(each, _LEFT_ALONE):
                    self._visit(each)
            return _CONTAINERS[kind](value, self._log)
        if kind is tuple:
            for each in value:  # type: ignore[attr-defined]
                assert self._recording(each) is each, f"a {type(each).__name__} in a tuple is not recorded"
        elif kind.__module__.startswith("block_manager_svc.core") and not issubclass(kind, _LEFT_ALONE):
            self._visit(value)
        else:
            assert isinstance(value, _LEFT_ALONE) or callable(value), f"a {kind.__name__} is not recorded"
        return value


# Values, among them the named tuples of results; and what is not taken back, see above.
_LEFT_ALONE: Final = (int, float, str, bytes, tuple, type(None), itertools.count, Agenda)


class _Array(np.ndarray[Any, Any]):
    """A view that records; slices of it do too."""

    log: Log

    def __array_finalize__(self, source: object) -> None:
        if isinstance(source, _Array):
            self.log = source.log

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        # Picked by an array it is a copy, and nobody's state.
        return value.view(np.ndarray) if isinstance(key, np.ndarray | list) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = self.view(np.ndarray)
        self.log.append(partial(plain.__setitem__, key, np.array(plain[key])))
        plain[key] = value

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        """Results are plain; what a function writes into is recorded first."""
        if method == "at":
            plain = inputs[0].view(np.ndarray)
            self.log.append(partial(plain.__setitem__, inputs[1], np.array(plain[inputs[1]])))
        out = options.get("out", ())
        for each in out:
            if isinstance(each, _Array):
                plain = each.view(np.ndarray)
                self.log.append(partial(plain.__setitem__, ..., plain.copy()))
        if out:
            options["out"] = tuple(_plain(each) for each in out)
        result = getattr(ufunc, method)(*(_plain(each) for each in inputs), **options)
        return out[0] if out else result


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Array) else value


class _Bytes:
    """Of a bytearray, or of the items of an array."""

    __slots__ = ("_held", "_log", "find")

    def __init__(self, held: Any, log: Log) -> None:
        self._held = held
        self._log = log
        self.find = getattr(held, "find", None)

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, key: Any) -> Any:
        return self._held[key]

    def __setitem__(self, key: int, value: int) -> None:
        self._log.append(partial(self._held.__setitem__, key, self._held[key]))
        self._held[key] = value


class _List(MutableSequence[Any]):
    __slots__ = ("_held", "_log")

    def __init__(self, held: list[Any], log: Log) -> None:
        self._held = held
        self._log = log

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __getitem__(self, key: Any) -> Any:
        return self._held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self._held[:] if isinstance(key, slice) else self._held[key]
        self._log.append(partial(self._held.__setitem__, slice(None) if isinstance(key, slice) else key, before))
        self._held[key] = value

    def __delitem__(self, key: Any) -> None:
        at = range(len(self._held))[key]
        self._log.append(partial(self._held.insert, at, self._held[at]))
        del self._held[at]

    def insert(self, index: int, value: Any) -> None:
        self._log.append(partial(self._held.pop, min(index, len(self._held))))
        self._held.insert(index, value)


class _Dict(MutableMapping[Any, Any]):
    """Lists and dictionaries that are its values record too."""

    __slots__ = ("_held", "_log")

    def __init__(self, held: dict[Any, Any], log: Log) -> None:
        self._held = held
        self._log = log

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __getitem__(self, key: Any) -> Any:
        value = self._held[key]
        return _CONTAINERS[type(value)](value, self._log) if type(value) in (list, dict) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self._held:
            self._log.append(partial(self._held.__setitem__, key, self._held[key]))
        else:
            self._log.append(partial(self._held.__delitem__, key))
        self._held[key] = value._held if isinstance(value, _List | _Dict) else value

    def __delitem__(self, key: Any) -> None:
        self._log.append(partial(self._held.__setitem__, key, self._held[key]))
        del self._held[key]


class _Set(MutableSet[Any]):
    __slots__ = ("_held", "_log")

    def __init__(self, held: set[Any], log: Log) -> None:
        self._held = held
        self._log = log

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __contains__(self, value: object) -> bool:
        return value in self._held

    def add(self, value: Any) -> None:
        if value not in self._held:
            self._log.append(partial(self._held.discard, value))
            self._held.add(value)

    def discard(self, value: Any) -> None:
        if value in self._held:
            self._log.append(partial(self._held.add, value))
            self._held.discard(value)


_CONTAINERS: Final[dict[type, Callable[[Any, Log], object]]] = {
    bytearray: _Bytes,
    memoryview: _Bytes,
    list: _List,
    dict: _Dict,
    set: _Set,
}
