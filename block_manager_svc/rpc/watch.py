"""WatchEvents: events of the page table in columns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import grpc.aio
import numpy as np

from block_manager_svc.core.errors import Draining, ExecutorUnavailable
from block_manager_svc.core.events import (
    BlockMoved,
    BlockRemoved,
    BlockStored,
    CacheReset,
    Event,
    SequenceCreated,
    SequencesEnded,
)
from block_manager_svc.manager import Manager
from block_manager_svc.rpc.authentication import caller
from block_manager_svc.rpc.reply import reader_too_slow
from block_manager_svc.watchers import Scope
from pagedkv.v1 import block_manager_pb2 as pb

PER_MESSAGE: Final = 4096  # events; with tokens of 64 a block some 1.3 MiB, below the 4 MiB that clients take
HEARTBEAT_S: Final = 10.0

_Context = grpc.aio.ServicerContext[Any, Any]


class WatchEvents:
    """The rpc, over one manager. write_timeout: seconds that a reader may leave a message unread."""

    def __init__(self, manager: Manager, write_timeout: float) -> None:
        self._manager = manager
        self._write_timeout = write_timeout

    async def __call__(self, request: pb.WatchEventsRequest, context: _Context) -> None:
        table, who = self._manager.page_table, caller()
        if table is None:
            raise ExecutorUnavailable("no executor has attached yet, so there is no pool: start one, or try again")
        if self._manager.draining:
            raise Draining
        both = request.blocks == request.sequences  # neither is both
        scope = Scope(
            request.blocks or both,
            request.sequences or both,
            None if who.is_operator else who.tenant.number,
            who.tenant.realm,
        )
        watchers = self._manager.watchers
        reader, snapshot = watchers.join(table, scope)
        epoch = self._manager.epoch
        try:
            pieces = list(_pieces(snapshot.events)) or [[]]
            for i, events in enumerate(pieces):
                phase = pb.WATCH_PHASE_SNAPSHOT if i + 1 < len(pieces) else pb.WATCH_PHASE_SNAPSHOT_END
                await self._write(context, self._message(request, epoch, snapshot.revision, phase, events))
            while True:
                update = await reader.next(HEARTBEAT_S)
                # Nothing waits, so the reader knows all up to now.
                revision, changes = (table.revision, []) if update is None else (update.revision, update.events)
                for events in _pieces(changes) if changes else [[]]:
                    message = self._message(request, epoch, revision, pb.WATCH_PHASE_CHANGES, events)
                    await self._write(context, message)
        finally:
            watchers.leave(reader)

    def _message(
        self, request: pb.WatchEventsRequest, epoch: int, revision: int, phase: pb.WatchPhase, events: list[Event]
    ) -> pb.WatchEventsResponse:
        header = pb.ReplyHeader(service_id=self._manager.service_id, epoch=epoch, revision=revision)
        table = self._manager.page_table
        assert table is not None
        return pb.WatchEventsResponse(
            header=header, phase=phase, block_size=table.block_size, **_columns(events, request.tokens)
        )

    async def _write(self, context: _Context, message: pb.WatchEventsResponse) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await context.write(message)
        except TimeoutError:
            raise reader_too_slow(
                f"a message waited for {self._write_timeout} s", write_timeout_s=self._write_timeout
            ) from None


def _pieces(events: list[Event]) -> Iterator[list[Event]]:
    for start in range(0, len(events), PER_MESSAGE):
        yield events[start : start + PER_MESSAGE]


def _columns(events: list[Event], with_tokens: bool) -> dict[str, Any]:
    kinds = bytearray()
    hashes: list[bytes] = []
    parents: list[bytes] = []
    tokens: list[bytes] = []
    places: list[int] = []
    namespaces: dict[bytes, int] = {}
    of_namespace: list[int] = []
    sequences: list[int] = []
    revisions: list[int] = []

    def add(kind: pb.EventKind) -> None:
        kinds.append(int(kind))

    for event in events:
        match event:
            case BlockStored():
                add(pb.EVENT_KIND_BLOCK_STORED)
                hashes.append(event.hash)
                parents.append(event.parent)
                places.append(event.place)
                of_namespace.append(namespaces.setdefault(event.namespace, len(namespaces)))
                if with_tokens:
                    tokens.append(event.tokens)
            case BlockMoved() | BlockRemoved():
                moved = isinstance(event, BlockMoved)
                add(pb.EVENT_KIND_BLOCK_MOVED if moved else pb.EVENT_KIND_BLOCK_REMOVED)
                hashes.append(event.hash)
                places.append(event.place)
            case CacheReset():
                add(pb.EVENT_KIND_CACHE_RESET)
            case SequenceCreated(sequence):
                add(pb.EVENT_KIND_SEQUENCE_CREATED)
                sequences.append(sequence)
            case SequencesEnded(ended):
                for sequence in ended.tolist():
                    add(pb.EVENT_KIND_SEQUENCE_ENDED)
                    sequences.append(sequence)
            case _:  # TablesChanged, the last of the kinds
                for sequence in event.sequences.tolist():
                    add(pb.EVENT_KIND_TABLE_CHANGED)
                    sequences.append(sequence)
                    revisions.append(event.revision)
    return {
        "kind": bytes(kinds),
        "hash": b"".join(hashes),
        "parent": b"".join(parents),
        "place": np.array(places, "<u4").tobytes(),
        "namespace": np.array(of_namespace, "<u4").tobytes(),
        "namespaces": list(namespaces),
        "tokens": b"".join(tokens),
        "sequence": np.array(sequences, "<u8").tobytes(),
        "table_revision": np.array(revisions, "<u8").tobytes(),
    }
