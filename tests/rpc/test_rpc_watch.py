"""WatchEvents: a snapshot, then every change; slow readers are told; nobody hears of another tenant's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
from rpc_batches import append, batch, commit, create, fork, free, of_u64, ref, truncate
from rpc_scripted import Refusal, Service, refusal_of, running_service, until
from test_rpc_tenants import bearer, service_with

from block_manager_svc import watchers
from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import Refused
from block_manager_svc.core.events import BlockStored, SequenceCreated
from block_manager_svc.watchers import Scope, Watchers
from pagedkv import Event
from pagedkv._events import (
    BlockMoved,
    BlockRemoved,
    CachedBlocksReset,
    SequenceEnded,
    TableChanged,
    WatchPhase,
    WatchUpdate,
    update,
)
from pagedkv._events import BlockStored as Stored
from pagedkv._events import SequenceCreated as Created
from pagedkv.v1 import block_manager_pb2 as pb

EVERYTHING = Scope(True, True, None, b"")


@dataclass
class Replica:
    """What a reader knows that applies all that it is told."""

    places: dict[bytes, int] = field(default_factory=dict)
    tables: dict[int, int] = field(default_factory=dict)
    revision: int = 0

    def apply(self, update: WatchUpdate) -> None:
        for event in update.events:
            self._apply(event)
        self.revision = update.header.revision

    def _apply(self, event: Event) -> None:
        match event:
            case Stored():
                assert event.hash not in self.places
                assert not event.parent or event.parent in self.places
                self.places[event.hash] = event.place
            case BlockMoved():
                self.places[event.hash] = event.place
            case BlockRemoved():
                assert self.places.pop(event.hash) == event.place
            case CachedBlocksReset():
                self.places.clear()
            case Created():
                self.tables[event.sequence] = 0
            case SequenceEnded():
                del self.tables[event.sequence]
            case TableChanged():
                self.tables[event.sequence] = event.revision


class Reading:
    """One call of WatchEvents, applied as it comes."""

    def __init__(self, service: Service, token: str | None = None, **fields: bool) -> None:
        metadata = bearer(token) if token else None
        self.call = service.reads.WatchEvents(pb.WatchEventsRequest(**fields), metadata=metadata)
        self.replica = Replica()
        self.updates: list[WatchUpdate] = []

    async def next(self) -> WatchUpdate:
        message = await asyncio.wait_for(self.call.read(), 30)
        assert message is not grpc.aio.EOF
        told = update(message)
        self.replica.apply(told)
        self.updates.append(told)
        return told

    async def snapshot(self) -> Replica:
        while (await self.next()).phase != WatchPhase.SNAPSHOT_END:
            pass
        return self.replica

    async def until(self, revision: int) -> Replica:
        while self.replica.revision < revision:
            await self.next()
        return self.replica


async def step(service: Service, *items: pb.BatchItem) -> pb.StepBatchResponse:
    return await service.reads.StepBatch(batch(*items), timeout=30)


async def refused(call: Awaitable[object]) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return refusal_of(caught.value)


def table_of(service: Service) -> PageTable:
    assert service.manager.page_table is not None
    return service.manager.page_table


def true_state(service: Service) -> tuple[list[int], dict[int, int]]:
    """Blocks that can be found by a walk from the roots, and the revision of each table."""
    table = table_of(service)
    alive = table.sequences()
    return sorted(table._pool.index.blocks().tolist()), dict(
        zip(alive.tolist(), table.changed(alive).tolist(), strict=True)
    )


# --- over sockets -----------------------------------------------------------------------------------------------------


async def test_a_reader_that_applies_all_it_is_told_knows_what_is_true() -> None:
    draw = random.Random(7)
    async with running_service(num_blocks=40) as service:
        await step(service, create(list(range(40))), commit(ref(0), 40))
        early = Reading(service)
        await early.snapshot()
        alive = [1]
        for turn in range(120):
            if draw.random() < 0.4 or not alive:
                prompt = [draw.randrange(2)] * draw.randint(1, 70)
                made = await step(service, create(prompt), commit(ref(0), len(prompt)))
                alive += of_u64(made.results[0].sequences)
            else:
                one = draw.choice(alive)
                what = draw.choice((append([one], [3] * draw.randint(1, 20)), fork(one), truncate(one, 1), free(one)))
                reply = await step(service, what)
                if what.HasField("free"):
                    alive.remove(one)
                elif what.HasField("fork"):
                    alive += of_u64(reply.results[0].sequences)
            if turn == 60:
                late = Reading(service)
                await late.snapshot()
            if draw.random() < 0.05:
                await service.reads.ResetCache(pb.ResetCacheRequest())
        if alive:
            await step(service, *(free(each) for each in alive))
        last = await step(service, create(list(range(90, 130))), commit(ref(0), 40))
        places, tables = true_state(service)
        for reading in (early, late):
            known = await reading.until(last.header.revision)
            # Behind what was evicted nothing can be found: the index still holds it, and nobody is told of it.
            assert set(known.places.values()) <= set(places)
            assert len(set(known.places.values())) == len(known.places)
            assert known.tables == tables
            assert (await service.reads.Match(prompts(list(range(90, 131))))).cached == bytes([32, 0, 0, 0])
        assert early.replica.places == late.replica.places
        await step(service, free(*of_u64(last.results[0].sequences)))
        early.call.cancel()
        late.call.cancel()


def prompts(prompt: list[int]) -> pb.MatchRequest:
    return pb.MatchRequest(counts=np.array([len(prompt)], "<u4").tobytes(), tokens=np.array(prompt, "<i4").tobytes())


async def test_only_what_was_asked_for_is_told_and_tokens_only_on_demand() -> None:
    async with running_service() as service:
        blocks, sequences = Reading(service, blocks=True, tokens=True), Reading(service, sequences=True)
        for reading in (blocks, sequences):
            await reading.snapshot()
        made = await step(service, create(list(range(20))), commit(ref(0), 20), free(ref(0)))
        for reading in (blocks, sequences):
            await reading.until(made.header.revision)
        (stored,) = (event for told in blocks.updates for event in told.events)
        assert isinstance(stored, Stored)
        assert (stored.tokens, stored.parent) == (tuple(range(16)), b"")
        kinds = {type(event) for told in sequences.updates for event in told.events}
        assert kinds == {Created, TableChanged, SequenceEnded}
        blocks.call.cancel()
        sequences.call.cancel()


async def test_nothing_is_recorded_once_the_last_reader_has_left() -> None:
    async with running_service() as service:
        one, other = Reading(service), Reading(service)
        for reading in (one, other):
            await reading.snapshot()
        assert table_of(service)._pool.index.events is not None
        one.call.cancel()
        await step(service, create([1]), free(ref(0)))
        assert table_of(service)._pool.index.events is not None
        other.call.cancel()
        await until(lambda: table_of(service)._pool.index.events is None, "nothing is recorded")


async def test_a_stalled_reader_is_told_to_resync_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "MAX_WAITING", 64)
    async with running_service() as service:
        stalled = service.reads.WatchEvents(pb.WatchEventsRequest())
        await stalled.read()
        good = Reading(service)
        await good.snapshot()
        # One turn with more than may wait.
        items = [create([1] * 5) for _ in range(50)]
        reply = await step(service, *items, *(free(ref(i)) for i in range(50)))
        refusal = await refused(read_to_the_end(stalled))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "RESYNC_NEEDED")
        assert (refusal.numbers["limit"], refusal.numbers["waiting"]) == ("64", "150")
        assert refusal.numbers["revision"] == str(reply.header.revision)
        assert (await refused(until_ended(good))).reason == "RESYNC_NEEDED"  # nobody could have read it in time
        again = Reading(service)
        assert (await again.snapshot()).tables == {}
        again.call.cancel()


async def until_ended(reading: Reading) -> None:
    while True:
        await reading.next()


async def read_to_the_end(call: object) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_a_reset_of_the_pool_ends_the_watch() -> None:
    async with running_service() as service:
        reading = Reading(service)
        await reading.snapshot()
        service.executor.detach()
        service.executor.__init__(service.manager, service.executor.plans, {}, 512, 0)  # type: ignore[misc]
        service.executor.attach()
        refusal = await refused(until_ended(reading))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "POOL_RESET")
        again = Reading(service)
        await again.snapshot()
        assert again.updates[-1].header.epoch == service.manager.epoch
        again.call.cancel()


async def test_a_service_that_is_about_to_stop_says_so_to_its_readers() -> None:
    async with running_service() as service:
        reading = Reading(service)
        await reading.snapshot()
        await service.manager.drain(0)
        refusal = await refused(until_ended(reading))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert table_of(service)._pool.index.events is None
        assert (await refused(Reading(service).next())).reason == "DRAINING"


async def test_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "MAX_READERS", 1)
    async with running_service() as service:
        one = Reading(service)
        await one.snapshot()
        refusal = await refused(Reading(service).next())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
        assert refusal.retry_after is not None
        one.call.cancel()
        await until(lambda: not service.manager.watchers._readers, "the reader has left")
        two = Reading(service)
        await two.snapshot()
        two.call.cancel()


async def test_without_an_executor_there_is_nothing_to_watch() -> None:
    async with running_service(attached=False) as service:
        assert (await refused(Reading(service).next())).reason == "EXECUTOR_UNAVAILABLE"


async def test_a_tenant_hears_of_its_own_and_an_operator_of_all(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:

        async def act(tenant: str) -> pb.StepBatchResponse:
            items = batch(create(list(range(20))), commit(ref(0), 20))
            return await service.reads.StepBatch(items, metadata=bearer(f"{tenant}-engine"))

        before = await act("blue")
        blue, red, operator = (Reading(service, token) for token in ("blue-engine", "red-gateway", "green-operator"))
        for reading, known in ((blue, 1), (red, 0), (operator, 1)):
            replica = await reading.snapshot()
            assert (len(replica.places), len(replica.tables)) == (known, known)
        after = await act("red")
        for reading, known in ((red, 1), (operator, 2)):
            replica = await reading.until(after.header.revision)
            assert (len(replica.places), len(replica.tables)) == (known, known)
        for tenant, reply in (("blue", before), ("red", after)):
            items = batch(free(*of_u64(reply.results[0].sequences)))
            last = await service.reads.StepBatch(items, metadata=bearer(f"{tenant}-engine"))
        assert (await operator.until(last.header.revision)).tables == {}
        while blue.replica.tables:
            await blue.next()
        assert len(blue.replica.places) == 1
        events = [event for told in blue.updates for event in told.events]
        assert {event.sequence for event in events if isinstance(event, Created)} == {1}
        for reading in (blue, red, operator):
            reading.call.cancel()


# --- the fan-out alone ------------------------------------------------------------------------------------------------


async def test_a_reader_that_comes_later_goes_on_from_its_snapshot() -> None:
    table, everybody = PageTable(16, 4), Watchers()
    first, snapshot = everybody.join(table, EVERYTHING)
    assert snapshot.events == []
    sequence = table.create([1, 2, 3, 4, 5])
    table.extend([sequence], [5])
    table.commit([sequence], [5])
    second, snapshot = everybody.join(table, EVERYTHING)
    assert {type(event) for event in snapshot.events} >= {BlockStored, SequenceCreated}
    assert (await first.next(1) or snapshot).revision == snapshot.revision == table.revision
    assert await second.next(0.01) is None
    table.free([sequence])
    for reader in (first, second):
        told = await reader.next(1)
        assert told is not None
        assert told.revision == table.revision
    everybody.leave(first)
    everybody.leave(second)
    everybody.leave(second)
    assert table._pool.index.events is None


async def test_what_waits_is_bounded_and_worthless_once_some_of_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "MAX_WAITING", 5)
    table, everybody = PageTable(64, 4), Watchers()
    reader, _ = everybody.join(table, EVERYTHING)
    for _ in range(4):
        table.free([table.create([1])])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(Refused) as refusal:
        await reader.next(1)
    assert refusal.value.reason == "RESYNC_NEEDED"
    table.create([1])
    await asyncio.sleep(0)
    with pytest.raises(Refused):
        await reader.next(1)


async def test_of_a_rolled_back_batch_nothing_is_told() -> None:
    async with running_service() as service:
        reading = Reading(service)
        await reading.snapshot()
        call = service.reads.StepBatch(batch(create([1] * 20), commit(ref(0), 20), free(99), atomic=True))
        assert (await refused(call)).reason == "SEQUENCE_NOT_FOUND"
        last = await step(service, create([2]), free(ref(0)))
        replica = await reading.until(last.header.revision)
        events = [event for told in reading.updates for event in told.events]
        assert len([event for event in events if isinstance(event, Created)]) == 1
        assert (replica.places, replica.tables) == ({}, {})
        reading.call.cancel()
