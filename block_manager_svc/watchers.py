"""Who watches the page table: each reader gets a snapshot, then every change, or is told that it is too slow.

    page table ──► EventLog ── drained once a turn of the event loop ──► inbox of each reader ──► its stream

The pool pays for appending to a bounded list, whoever reads or does not. While nobody watches, nothing is recorded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import Aborted, Refused, ResourceExhausted
from block_manager_svc.core.events import (
    BlockMoved,
    BlockRemoved,
    BlockStored,
    CacheReset,
    Event,
    EventLog,
    SequenceCreated,
    SequencesEnded,
    TablesChanged,
)
from block_manager_svc.core.step import I64

MAX_READERS: Final = 64
MAX_WAITING: Final = 1 << 16  # events that may wait for a reader


class Scope(NamedTuple):
    """What a reader wants, and may know of: its own tenant's, or, with tenant None, all."""

    blocks: bool
    sequences: bool
    tenant: int | None  # number
    realm: bytes  # begins the namespaces that it may know of


class Update(NamedTuple):
    """Events, the last of which happened at this revision."""

    revision: int
    events: list[Event]


class Reader:
    """One reader's inbox."""

    __slots__ = ("_failed", "_hashes", "_inbox", "_ready", "_scope", "_sequences", "_waiting")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._inbox: deque[Update] = deque()
        self._waiting = 0
        self._ready = asyncio.Event()
        self._failed: Refused | None = None
        # Of a tenant's reader: the blocks and sequences that it was told of.
        self._hashes: set[bytes] = set()
        self._sequences: set[int] = set()

    async def next(self, seconds: float) -> Update | None:
        """The oldest update that waits; None if none came in time. Raises RESYNC_NEEDED, POOL_RESET."""
        if not self._inbox and self._failed is None:
            self._ready.clear()
            try:
                await asyncio.wait_for(self._ready.wait(), seconds)
            except TimeoutError:
                return None
        if self._failed is not None:
            raise self._failed
        update = self._inbox.popleft()
        self._waiting -= len(update.events)
        return update

    def put(self, update: Update, table: PageTable) -> None:
        if self._failed is not None:
            return
        events = self.visible(update.events, table)
        if not events:
            return
        if self._waiting + len(events) > MAX_WAITING:
            self.fail(
                Aborted(
                    "RESYNC_NEEDED",
                    f"{self._waiting + len(events)} events wait, at most {MAX_WAITING} may: watch again for a snapshot",
                    waiting=self._waiting + len(events),
                    limit=MAX_WAITING,
                    revision=update.revision,
                )
            )
            return
        self._inbox.append(Update(update.revision, events))
        self._waiting += len(events)
        self._ready.set()

    def fail(self, why: Refused) -> None:
        """Nothing more comes, and what waits is not worth reading."""
        self._inbox.clear()
        self._failed = why
        self._ready.set()

    def visible(self, events: list[Event], table: PageTable) -> list[Event]:
        """Those that the reader wants and may know of, cut to what it may know."""
        scope = self._scope
        seen: list[Event] = []
        for event in events:
            match event:
                case BlockStored():
                    if scope.blocks and self._may_know(event.namespace):
                        self._hashes.add(event.hash)
                        seen.append(event)
                case BlockMoved() | BlockRemoved():
                    if event.hash in self._hashes:
                        if isinstance(event, BlockRemoved):
                            self._hashes.discard(event.hash)
                        seen.append(event)
                case CacheReset():
                    if scope.blocks:
                        self._hashes.clear()
                        seen.append(event)
                case SequenceCreated(sequence):
                    if scope.sequences and self._owns(table, sequence):
                        self._sequences.add(sequence)
                        seen.append(event)
                case SequencesEnded(sequences):
                    if (known := self._known(sequences)).size:
                        self._sequences.difference_update(known.tolist())
                        seen.append(SequencesEnded(known))
                case TablesChanged(sequences, revision):
                    if (known := self._known(sequences)).size:
                        seen.append(TablesChanged(known, revision))
        return seen

    def _may_know(self, namespace: bytes) -> bool:
        return self._scope.tenant is None or namespace.startswith(self._scope.realm)

    def _owns(self, table: PageTable, sequence: int) -> bool:
        """Of what has come and gone within one turn nobody but an operator hears."""
        tenant = self._scope.tenant
        if tenant is None:
            return True
        alive = table.alive([sequence]).all()
        return bool(alive) and abs(int(table.owners([sequence])[0])) == tenant

    def _known(self, sequences: I64) -> I64:
        return np.array([i for i in sequences.tolist() if i in self._sequences], np.int64)


class Watchers:
    """All readers of one service's page table. Belongs to the event loop that the table belongs to."""

    def __init__(self) -> None:
        self._readers: set[Reader] = set()
        self._table: PageTable | None = None
        self._log: EventLog | None = None

    def join(self, table: PageTable, scope: Scope) -> tuple[Reader, Update]:
        """A new reader, and the snapshot that its updates go on from: blocks, parents before children; sequences.

        Costs time proportional to what is in them. ResourceExhausted TOO_MANY_WATCHERS.
        """
        if len(self._readers) >= MAX_READERS:
            raise ResourceExhausted(
                "TOO_MANY_WATCHERS", f"{MAX_READERS} readers watch already", limit=MAX_READERS, retry_after=1.0
            )
        if self._log is None:
            self._table, self._log = table, table.watch(self._wake)
        self._distribute()
        assert self._log is not None
        reader = Reader(scope)
        alive = table.sequences()
        events: list[Event] = [*self._log.stored_blocks()]
        for sequence, revision in zip(alive.tolist(), table.changed(alive).tolist(), strict=True):
            events += (SequenceCreated(sequence), TablesChanged(np.array([sequence]), revision))
        snapshot = Update(table.revision, reader.visible(events, table))
        self._readers.add(reader)
        return reader, snapshot

    def leave(self, reader: Reader) -> None:
        """The last to leave ends the recording."""
        self._readers.discard(reader)
        if not self._readers and self._table is not None:
            self._table.unwatch()
            self._table = self._log = None

    def reset(self) -> None:
        """The page table is gone."""
        self.end(Aborted("POOL_RESET", "the pool was reset: watch again, for a snapshot of the new one"))

    def end(self, why: Refused) -> None:
        """Tells all readers why no more comes."""
        for reader in self._readers:
            reader.fail(why)
        self._readers.clear()
        if self._table is not None:
            self._table.unwatch()
        self._table = self._log = None

    def _wake(self) -> None:
        # Once a turn: commands of one batch, or of a step, arrive together.
        asyncio.get_running_loop().call_soon(self._distribute)

    def _distribute(self) -> None:
        if self._log is None or self._table is None:
            return
        if events := self._log.drain():
            update = Update(self._table.revision, events)
            for reader in self._readers:
                reader.put(update, self._table)
