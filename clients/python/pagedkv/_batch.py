"""Batches of an engine that brings its own model: what to do with its sequences, and what came of it.

batch = Batch()
prompts = batch.create([[1, 2, 3], [4, 5]])
batch.commit(prompts, [3, 2])               # an item stands for all ids that it makes,
beams = batch.fork(prompts[0], 4)           # item[i] for one of them
reply = client.step_batch(batch)
reply[beams].sequences
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, overload

from pagedkv._errors import InvalidArgument, PagedKvError
from pagedkv._types import Header

# Of a command, as the wire has it.
Field = bytes | str | int | dict[str, bytes | list[bytes]]
# Position in its sequence -> key.
Keys = Mapping[int, bytes]

_REFERENCE: Final = 1 << 63
# Formats of a buffer whose values may be taken as they are, where the width agrees.
_INTEGER_FORMATS: Final = frozenset("iIlLqQ")


@dataclass(frozen=True, slots=True)
class Item(Sequence[int]):
    """One item of a batch, and in the batch's later items: the ids that it will have made.

    number: its place in the batch, and of its result in the reply.
    made:   how many ids that are.
    """

    number: int
    made: int

    def __len__(self) -> int:
        return self.made

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        positions = range(self.made)[index]
        first = _REFERENCE | self.number << 32
        return first | positions if isinstance(positions, int) else [first | position for position in positions]


class Batch:
    """An ordered list of items, each all or nothing; `Client.step_batch` executes it.

    sequences, and all columns: anything that gives whole numbers. Arrays and buffers of the wire's own width (ids 64
    bits, all else 32) are taken without a look at each value. A single id stands for a column of one.
    Raises InvalidArgument VALUE_OUT_OF_RANGE for what a column cannot hold; the rest is the service's to check.
    """

    __slots__ = ("_items", "revisions")

    def __init__(self) -> None:
        self._items: list[tuple[str, dict[str, Field]]] = []
        self.revisions: dict[int, bytes] = {}  # what items expect, by their number

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> Sequence[tuple[str, dict[str, Field]]]:
        """Command and fields of each, as the wire has them."""
        return self._items

    def create(
        self,
        prompts: Iterable[Iterable[int]],
        *,
        lookahead: int | Iterable[int] = 0,
        adapter: str = "",
        reservation: int = 0,
        priority: int | None = None,
        priority_ttl: float | None = None,
        extra_keys: Mapping[int, Keys] | None = None,
        window: int = 0,
        sinks: int = 0,
    ) -> Item:
        """New sequences with blocks for their prompts, and `lookahead` slots behind (one number, or one for each).

        Result: sequences, cached (tokens of each that need not be computed), and the slots of the others.
        adapter:     version of model and adapter; a prompt finds only what was committed under the same.
        reservation: to take the blocks from, as far as it goes.
        priority:    of their blocks, if the pool evicts by priority: 0 to 100, the higher the later they go; it counts
                     for `priority_ttl` seconds after nothing references them (default: for good).
        extra_keys:  by the prompt's place, and the position in it: what decides the K and V of tokens besides the
                     tokens, such as a hash of the picture that begins there. Without the same, nothing is found.
        window:      positions that each position sees, itself among them (0: all): what is out of sight is given up
                     when a commit makes it so, and is 0 in the table.
        sinks:       positions, from the first, that all positions see nevertheless.
        """
        columns = [_column(prompt, "i", "prompts") for prompt in prompts]
        more: dict[str, Field] = _extra_keys(extra_keys)
        for name, value in (("window", window), ("sinks", sinks)):
            _check_u32(name, value)
            if value:
                more[name] = value
        if priority is not None:
            _check_u32("priority", priority)
            more |= {"priority": priority, "priority_ttl_ms": _ttl_ms(priority_ttl) if priority_ttl else 0}
        counts = [len(column) // 4 for column in columns]
        return self._add(
            "create",
            len(counts),
            counts=_column(counts, "I", "counts"),
            tokens=b"".join(columns),
            lookahead=_lookahead(lookahead, len(counts)),
            adapter=adapter,
            reservation=reservation,
            **more,
        )

    def append(
        self,
        sequences: int | Iterable[int],
        tokens: int | Iterable[int],
        *,
        counts: Iterable[int] | None = None,
        lookahead: int | Iterable[int] = 0,
        reservation: int = 0,
        extra_keys: Mapping[int, Keys] | None = None,
    ) -> Item:
        """More tokens, one sequence's after another's: counts[i] for each, by default one. Result: slots, copies.

        Slots are made for all that is not computed yet and `lookahead` positions behind; of an earlier lookahead, what
        lies beyond comes back. extra_keys: as in `create`, for positions of new tokens.
        """
        ids = _column(sequences, "Q", "sequences")
        return self._add(
            "append",
            sequences=ids,
            counts=b"" if counts is None else _column(counts, "I", "counts"),
            tokens=_column(tokens, "i", "tokens"),
            lookahead=_lookahead(lookahead, len(ids) // 8),
            reservation=reservation,
            **_extra_keys(extra_keys),
        )

    def commit(self, sequences: int | Iterable[int], upto: int | Iterable[int]) -> Item:
        """K and V of each one's positions below `upto` are written: whole blocks of them can be found by others."""
        return self._add("commit", sequences=_column(sequences, "Q", "sequences"), upto=_column(upto, "I", "upto"))

    def fork(self, sequences: int | Iterable[int], counts: int | Iterable[int] = 1) -> Item:
        """Children that share the computed blocks: `counts` of each (one number, or one for each). Result: sequences,
        the children of the first before those of the second."""
        ids = _column(sequences, "Q", "sequences")
        each = _one_each(counts, len(ids) // 8, "counts")
        return self._add("fork", sum(column_of("I", each)), sequences=ids, counts=each)

    def truncate(self, sequences: int | Iterable[int], lengths: int | Iterable[int]) -> Item:
        """Forgets the tokens from `lengths` on, such as drafts that were rejected."""
        return self._add(
            "truncate", sequences=_column(sequences, "Q", "sequences"), lengths=_column(lengths, "I", "lengths")
        )

    def free(self, sequences: int | Iterable[int]) -> Item:
        """Ends sequences. It says: nothing is in flight that touches their blocks."""
        return self._add("free", sequences=_column(sequences, "Q", "sequences"))

    def swap(self, out: int | Iterable[int] = (), back: int | Iterable[int] = ()) -> Item:
        """Sequences of `out` leave the device for the host, then those of `back` return; all or none. Result:
        swapped_blocks. On the host a sequence keeps what is committed, and can be forked, truncated and freed."""
        return self._add("swap", out=_column(out, "Q", "out"), back=_column(back, "Q", "back"))

    def pin(self, tokens: Iterable[int], *, ttl: float, adapter: str = "", extra_keys: Keys | None = None) -> Item:
        """Keeps the cached blocks of a prefix from being evicted for `ttl` seconds. Result: pin, pinned_tokens."""
        prefix, keys = _column(tokens, "i", "tokens"), _extra_keys({0: extra_keys} if extra_keys else None)
        return self._add("pin", 1, tokens=prefix, adapter=adapter, ttl_ms=_ttl_ms(ttl), **keys)

    def unpin(self, pins: int | Iterable[int]) -> Item:
        """Ends pins before their time."""
        return self._add("unpin", pins=_column(pins, "Q", "pins"))

    def reserve(self, blocks: int, *, ttl: float) -> Item:
        """Keeps blocks free for `ttl` seconds, for the creates and appends that name the reservation. Result: its id.

        item[0] stands for it, in the same batch.
        """
        _check_u32("blocks", blocks)
        return self._add("reserve", 1, blocks=blocks, ttl_ms=_ttl_ms(ttl))

    def release(self, reservations: int | Iterable[int]) -> Item:
        """Ends reservations before their time."""
        return self._add("release", reservations=_column(reservations, "Q", "reservations"))

    def only_if(self, item: Item, table_revisions: int | Iterable[int]) -> None:
        """The item fails with TABLE_REVISION_STALE unless the tables of the sequences that it names (swap: those of
        `out` first) are still of these revisions, as replies and `Client.tables` give them."""
        self.revisions[item.number] = _column(table_revisions, "Q", "table_revisions")

    def _add(self, command: str, made: int = 0, /, **fields: Field) -> Item:
        self._items.append((command, fields))
        return Item(len(self._items) - 1, made)


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What an item gave: the columns that its command has, the others empty; or why it changed nothing.

    Columns are `array`s, which numpy.asarray and torch.frombuffer take without a copy: of unsigned 64-bit numbers
    sequences and slots, of unsigned 32-bit numbers the others.

    sequences:          new ids.
    cached:             tokens of each new prompt whose K and V are in its blocks already.
    slot_indptr, slots: sequence i owns slots[slot_indptr[i] : slot_indptr[i + 1]], block * block_size + offset: of its
                        positions from the first that had no slot or no token (of a new prompt: that is not cached)
                        through the end of its lookahead.
    copy_src, copy_dst: blocks that are copied in the reply's step, before which nothing may be written to copy_dst.
    """

    error: PagedKvError | None
    sequences: array[int]
    cached: array[int]
    slot_indptr: array[int]
    slots: array[int]
    copy_src: array[int]
    copy_dst: array[int]
    swapped_blocks: int
    pin: int
    pinned_tokens: int
    reservation: int

    def slots_of(self, i: int) -> array[int]:
        """The slots of the item's i-th sequence."""
        return self.slots[self.slot_indptr[i] : self.slot_indptr[i + 1]]


@dataclass(frozen=True, slots=True)
class BatchReply:
    """What a batch gave: results by item, and what the call's end means.

    step_id:  the step of the op stream that carries copies and swaps, 0: none.
    replayed: the batch was executed before, under the same request id.
    table_sequence, table_revision: the sequences that were made or named and are alive, and the revision at which the
              entries of each block table last changed.
    """

    header: Header
    results: tuple[ItemResult, ...]
    step_id: int
    replayed: bool
    table_sequence: array[int]
    table_revision: array[int]

    def __getitem__(self, item: Item) -> ItemResult:
        """The item's result. Raises its error, if it has one."""
        result = self.results[item.number]
        if result.error is not None:
            raise result.error
        return result

    def raise_errors(self) -> None:
        """Raises the error of the first item that has one."""
        for result in self.results:
            if result.error is not None:
                raise result.error


def column_of(typecode: str, data: bytes) -> array[int]:
    """The values of a little-endian column. typecode: "Q" or "I". ValueError: they are no whole number of values."""
    column: array[int] = array(typecode)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _column(values: int | Iterable[int], typecode: str, name: str) -> bytes:
    """Little-endian values of the typecode's width."""
    if isinstance(values, int):
        values = (values,)
    raw = _raw(values, 8 if typecode == "Q" else 4)
    if raw is not None:
        return raw
    try:
        column = array(typecode, list(values))
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(
            "VALUE_OUT_OF_RANGE", f"{name} has a value that no column can hold: {error}", numbers={"field": name}
        ) from error
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _raw(values: Iterable[int], width: int) -> bytes | None:
    """The bytes of a buffer that holds integers of this width; None: it is something else."""
    if isinstance(values, (list, tuple, Item)) or sys.byteorder == "big":
        return None
    try:
        view = memoryview(values)  # type: ignore[arg-type]  # which is the question
    except TypeError:
        return None
    fits = view.ndim == 1 and view.itemsize == width and view.format in _INTEGER_FORMATS
    return view.tobytes() if fits else None


def _extra_keys(extra_keys: Mapping[int, Keys] | None) -> dict[str, Field]:
    """The field, where there are any."""
    entries = [
        (place, position, key) for place, keys in (extra_keys or {}).items() for position, key in sorted(keys.items())
    ]
    if not entries:
        return {}
    of, positions, keys = zip(*entries, strict=True)
    name = "extra_keys"
    return {name: {"of": _column(of, "I", name), "positions": _column(positions, "I", name), "keys": list(keys)}}


def _check_u32(name: str, value: int) -> None:
    if not 0 <= value < 1 << 32:
        raise InvalidArgument("VALUE_OUT_OF_RANGE", f"{name} cannot be {value}", numbers={"field": name})


def _ttl_ms(ttl: float) -> int:
    ttl_ms = round(ttl * 1000)
    if not 0 <= ttl_ms < 1 << 64:
        raise InvalidArgument("VALUE_OUT_OF_RANGE", f"a ttl of {ttl} s", numbers={"field": "ttl"})
    return ttl_ms


def _one_each(values: int | Iterable[int], length: int, name: str) -> bytes:
    """A column of `length` times the same value, or of values as they are given."""
    return _column((values,) * length if isinstance(values, int) else values, "I", name)


def _lookahead(values: int | Iterable[int], length: int) -> bytes:
    """As `_one_each`; left out where it is none for all."""
    return b"" if isinstance(values, int) and values == 0 else _one_each(values, length, "lookahead")
