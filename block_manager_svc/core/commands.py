"""What a batch is made of: commands over columns, each all or nothing.

    items     0: Create(counts=[5, 9])      1: Fork(sequences=[reference(0, 1)])     2: Append(…)
    results      sequences [7, 8]              sequences [9]

Columns of ids (int64) may name what an earlier item of the same batch made, by `reference(item, position)` instead of
the id that is not known yet. A reference is negative, an id is positive, so a column without references is told by its
smallest value.
"""

from __future__ import annotations

from dataclasses import dataclass

from block_manager_svc.core.eviction.retention import Retention
from block_manager_svc.core.extra_keys import ExtraKeys
from block_manager_svc.core.step import I32, I64

_POSITION_BITS = 32
_POSITIONS = (1 << _POSITION_BITS) - 1


def reference(item: int, position: int) -> int:
    """Stands for the id at `position` (below 2**32) of what item number `item` (below 2**31) made."""
    return -(1 << 63) | item << _POSITION_BITS | position


def referred(reference: int) -> tuple[int, int]:
    """The item and the position that a reference names."""
    return (reference >> _POSITION_BITS) & 0x7FFF_FFFF, reference & _POSITIONS


@dataclass(frozen=True, slots=True)
class Create:
    """New sequences, with the blocks for their prompts. See PageTable.begin."""

    counts: I64
    tokens: I32
    lookahead: I64
    namespace: bytes
    reservation: int = 0
    retention: Retention | None = None
    extra: ExtraKeys | None = None
    window: int = 0
    sinks: int = 0


@dataclass(frozen=True, slots=True)
class Append:
    """See PageTable.grow."""

    sequences: I64
    counts: I64 | None
    tokens: I32
    lookahead: I64 | None
    reservation: int = 0
    extra: ExtraKeys | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """See PageTable.commit."""

    sequences: I64
    upto: I64


@dataclass(frozen=True, slots=True)
class Fork:
    """counts[i] children of each, those of the first before those of the second. See PageTable.fork."""

    sequences: I64
    counts: I64


@dataclass(frozen=True, slots=True)
class Truncate:
    """See PageTable.truncate."""

    sequences: I64
    lengths: I64


@dataclass(frozen=True, slots=True)
class Free:
    """See PageTable.free."""

    sequences: I64


@dataclass(frozen=True, slots=True)
class Swap:
    """Sequences of `out` leave the device, then those of `back` come in. See PageTable.swap."""

    out: I64
    back: I64


@dataclass(frozen=True, slots=True)
class Pin:
    """See PageTable.pin. until: ms of the table's clock."""

    tokens: I32
    until: int
    namespace: bytes
    extra: ExtraKeys | None = None


@dataclass(frozen=True, slots=True)
class Unpin:
    """Ends each of these pins. See PageTable.unpin."""

    pins: I64


@dataclass(frozen=True, slots=True)
class Reserve:
    """See PageTable.reserve. until: ms of the table's clock."""

    blocks: int
    until: int


@dataclass(frozen=True, slots=True)
class Release:
    """Ends each of these reservations. See PageTable.release."""

    reservations: I64


@dataclass(frozen=True, slots=True)
class Expecting:
    """`command`, if the table of each of `sequences` has last changed at revisions[i]; else it changes nothing.

    FailedPrecondition TABLE_REVISION_STALE: one has changed since.
    """

    sequences: I64
    revisions: I64
    command: Command


Command = Create | Append | Commit | Fork | Truncate | Free | Swap | Pin | Unpin | Reserve | Release | Expecting
