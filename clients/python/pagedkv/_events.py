"""What `watch` tells: a snapshot, then every change of what is cached and which sequences there are."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagedkv._batch import column_of
from pagedkv._errors import Internal
from pagedkv._types import Header
from pagedkv.v1 import block_manager_pb2 as pb

_HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be found, behind its parent (b"" for the first of a prompt)."""

    hash: bytes
    parent: bytes
    namespace: bytes
    place: int
    tokens: tuple[int, ...]  # if asked for


@dataclass(frozen=True, slots=True)
class BlockMoved:
    """It can be found elsewhere."""

    hash: bytes
    place: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """It cannot be found any more."""

    hash: bytes
    place: int


@dataclass(frozen=True, slots=True)
class CachedBlocksReset:
    """No block that was stored can be found any more."""


@dataclass(frozen=True, slots=True)
class SequenceCreated:
    sequence: int


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    sequence: int


@dataclass(frozen=True, slots=True)
class TableChanged:
    """Its block table has other entries, since this revision."""

    sequence: int
    revision: int


Event = BlockStored | BlockMoved | BlockRemoved | CachedBlocksReset | SequenceCreated | SequenceEnded | TableChanged


class WatchPhase(enum.StrEnum):
    SNAPSHOT = "snapshot"  # more of it comes
    SNAPSHOT_END = "snapshot end"  # its last piece
    CHANGES = "changes"


@dataclass(frozen=True, slots=True)
class WatchUpdate:
    """Who has applied all events up to this one knows what was true at `header.revision`. Changes without events say
    that nothing has changed."""

    header: Header
    phase: WatchPhase
    block_size: int
    events: tuple[Event, ...]


_PHASES: Final[dict[int, WatchPhase]] = {
    pb.WATCH_PHASE_SNAPSHOT: WatchPhase.SNAPSHOT,
    pb.WATCH_PHASE_SNAPSHOT_END: WatchPhase.SNAPSHOT_END,
    pb.WATCH_PHASE_CHANGES: WatchPhase.CHANGES,
}


def update(response: pb.WatchEventsResponse) -> WatchUpdate:
    """Raises Internal when columns do not fit their kinds."""
    header = Header(response.header.service_id, response.header.epoch, response.header.revision)
    try:
        phase, events = _PHASES[response.phase], tuple(_events(response))
    except (LookupError, ValueError, RuntimeError) as error:
        raise Internal("REPLY_INVALID", "the columns of these events do not fit their kinds") from error
    return WatchUpdate(header, phase, response.block_size, events)


def _events(response: pb.WatchEventsResponse) -> Iterator[Event]:
    hashes, parents = _cut(response.hash, _HASH_BYTES), _cut(response.parent, _HASH_BYTES)
    tokens = _cut(response.tokens, 4 * response.block_size)
    places, namespaces = iter(column_of("I", response.place)), iter(column_of("I", response.namespace))
    sequences, revisions = iter(column_of("Q", response.sequence)), iter(column_of("Q", response.table_revision))
    for kind in response.kind:
        match kind:
            case pb.EVENT_KIND_BLOCK_STORED:
                parent = next(parents)
                yield BlockStored(
                    next(hashes),
                    parent if any(parent) else b"",
                    response.namespaces[next(namespaces)],
                    next(places),
                    tuple(column_of("i", next(tokens))) if response.tokens else (),
                )
            case pb.EVENT_KIND_BLOCK_MOVED:
                yield BlockMoved(next(hashes), next(places))
            case pb.EVENT_KIND_BLOCK_REMOVED:
                yield BlockRemoved(next(hashes), next(places))
            case pb.EVENT_KIND_CACHE_RESET:
                yield CachedBlocksReset()
            case pb.EVENT_KIND_SEQUENCE_CREATED:
                yield SequenceCreated(next(sequences))
            case pb.EVENT_KIND_SEQUENCE_ENDED:
                yield SequenceEnded(next(sequences))
            case pb.EVENT_KIND_TABLE_CHANGED:
                yield TableChanged(next(sequences), next(revisions))
            case _:
                raise ValueError(f"an event of kind {kind}")


def _cut(column: bytes, width: int) -> Iterator[bytes]:
    if column and (not width or len(column) % width):
        raise ValueError("no whole number of values")
    return iter([column[i : i + width] for i in range(0, len(column), width or 1)])
