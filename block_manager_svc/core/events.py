"""What happens to the page table, for those who watch: which blocks can be found, which sequences there are.

    stored(hash, …) ── moved(hash, place) ── removed(hash)          created(id) ── table changed(id) ── ended(id)

Nothing is recorded, nor hashed, unless somebody watches. A block's hash is a name for its content and all that comes
before, for those outside who have no nodes of the index. It is computed here alone, and nothing is ever found by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, NamedTuple

from block_manager_svc.core.step import I64

HASH_BYTES: Final = 32
NO_PARENT: Final = bytes(HASH_BYTES)

# hash(parent, namespace, tokens, extra keys) of a block; parent: the hash of the block before, NO_PARENT for the first.
HashBlock = Callable[[bytes, bytes, bytes, bytes], bytes]


class BlockStored(NamedTuple):
    """A block can be found. Never two of one hash at a time."""

    hash: bytes
    parent: bytes
    namespace: bytes
    tokens: bytes  # int32
    place: int  # device block, or num_blocks + h for host slot h


class BlockMoved(NamedTuple):
    """What can be found lies elsewhere now."""

    hash: bytes
    place: int


class BlockRemoved(NamedTuple):
    """What could be found cannot any more."""

    hash: bytes
    place: int  # where it lay


class CacheReset(NamedTuple):
    """No block that was stored can be found any more."""


class SequenceCreated(NamedTuple):
    sequence: int


class SequencesEnded(NamedTuple):
    sequences: I64


class TablesChanged(NamedTuple):
    """The block tables of these sequences have other entries, since this revision of the page table."""

    sequences: I64
    revision: int


Event = BlockStored | BlockMoved | BlockRemoved | CacheReset | SequenceCreated | SequencesEnded | TablesChanged


def chained_sha256(parent: bytes, namespace: bytes, tokens: bytes, extra: bytes) -> bytes:
    """SHA-256 over the four, the middle two behind their lengths (u32, little-endian)."""
    names = len(namespace).to_bytes(4, "little") + namespace
    return hashlib.sha256(parent + names + len(tokens).to_bytes(4, "little") + tokens + extra).digest()


class EventLog:
    """Takes note of events until they are drained. Blocks are named by the serials of their nodes in the index.

    wake: called when there is something to drain, after there was nothing.
    """

    __slots__ = ("_events", "_hash", "_namespaces", "_serials", "_stored", "_wake")

    def __init__(self, wake: Callable[[], object], hash_block: HashBlock = chained_sha256) -> None:
        self._wake = wake
        self._hash = hash_block
        self._events: list[Event] = []
        self._namespaces: dict[int, bytes] = {}  # by the serial of their root
        self._stored: dict[int, BlockStored] = {}
        self._serials: dict[bytes, int] = {}  # of what is stored, by hash

    def drain(self) -> list[Event]:
        """All events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stored_blocks(self) -> list[BlockStored]:
        """What can be found now, parents before children."""
        return list(self._stored.values())

    # --- from the index -----------------------------------------------------------------------------------------------

    def root(self, serial: int, namespace: bytes) -> None:
        """What is chained behind this node is of that namespace."""
        self._namespaces[serial] = namespace

    def stored(self, serial: int, parent: int, tokens: bytes, extra: bytes, place: int) -> None:
        before = self._stored.get(parent)
        if before is not None:
            chain, namespace = before.hash, before.namespace
        elif parent in self._namespaces:
            chain, namespace = NO_PARENT, self._namespaces[parent]
        else:
            return  # behind what was removed it cannot be found
        name = self._hash(chain, namespace, tokens, extra)
        if (other := self._serials.get(name)) is not None:
            # The same content, whose prefix was removed and has come again; or another content, if the hash is weak.
            self.removed(other)
        event = self._stored[serial] = BlockStored(name, chain, namespace, tokens, place)
        self._serials[name] = serial
        self._note(event)

    def moved(self, serial: int, place: int) -> None:
        if (block := self._stored.get(serial)) is not None:
            self._stored[serial] = block._replace(place=place)
            self._note(BlockMoved(block.hash, place))

    def removed(self, serial: int) -> None:
        if (block := self._stored.pop(serial, None)) is not None:
            del self._serials[block.hash]
            self._note(BlockRemoved(block.hash, block.place))

    def reset(self) -> None:
        self._stored.clear()
        self._serials.clear()
        self._note(CacheReset())

    # --- from the sequences -------------------------------------------------------------------------------------------

    def created(self, sequence: int) -> None:
        self._note(SequenceCreated(sequence))

    def ended(self, sequences: I64) -> None:
        self._note(SequencesEnded(sequences))

    def tables_changed(self, sequences: I64, revision: int) -> None:
        self._note(TablesChanged(sequences, revision))

    def _note(self, event: Event) -> None:
        if not self._events:
            self._wake()
        self._events.append(event)
