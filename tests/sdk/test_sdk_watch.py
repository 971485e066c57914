"""`watch` as the SDK reads it: events out of columns."""

from __future__ import annotations

import numpy as np
import pytest
from google.rpc import code_pb2
from sdk_scripted import HEADER, Scripted, refusing

from pagedkv import (
    Aborted,
    AsyncClient,
    BlockMoved,
    BlockRemoved,
    BlockStored,
    CachedBlocksReset,
    Client,
    Internal,
    SequenceCreated,
    SequenceEnded,
    TableChanged,
    WatchPhase,
)
from pagedkv.v1 import block_manager_pb2 as bm

ONE, TWO = b"1" * 32, b"2" * 32


def message() -> bm.WatchEventsResponse:
    return bm.WatchEventsResponse(
        header=HEADER,
        phase=bm.WATCH_PHASE_CHANGES,
        block_size=2,
        kind=bytes([1, 1, 2, 3, 4, 5, 7, 6]),
        hash=ONE + TWO + TWO + ONE,
        parent=bytes(32) + ONE,
        place=np.array([4, 5, 9, 4], "<u4").tobytes(),
        namespace=np.array([0, 0], "<u4").tobytes(),
        namespaces=[b"space"],
        tokens=np.array([1, 2, 3, 4], "<i4").tobytes(),
        sequence=np.array([7, 7, 7], "<u8").tobytes(),
        table_revision=np.array([41], "<u8").tobytes(),
    )


EVENTS = (
    BlockStored(ONE, b"", b"space", 4, (1, 2)),
    BlockStored(TWO, ONE, b"space", 5, (3, 4)),
    BlockMoved(TWO, 9),
    BlockRemoved(ONE, 4),
    CachedBlocksReset(),
    SequenceCreated(7),
    TableChanged(7, 41),
    SequenceEnded(7),
)


def test_events_are_read_in_order_and_the_end_is_raised(service: Scripted, client: Client) -> None:
    service.watched = [message(), refusing(code_pb2.ABORTED, "watch again", reason="RESYNC_NEEDED")]
    with client.watch(tokens=True) as updates:
        told = next(updates)
        assert (told.phase, told.block_size, told.events) == (WatchPhase.CHANGES, 2, EVENTS)
        with pytest.raises(Aborted, match="RESYNC_NEEDED"):
            next(updates)
    assert service.requests("WatchEvents") == [bm.WatchEventsRequest(blocks=True, sequences=True, tokens=True)]


async def test_the_asyncio_client_reads_the_same(service: Scripted) -> None:
    service.watched = [message(), refusing(code_pb2.ABORTED, "watch again", reason="POOL_RESET")]
    async with AsyncClient(service.address) as client, client.watch(sequences=False) as updates:
        assert (await anext(updates)).events == EVENTS
        with pytest.raises(Aborted, match="POOL_RESET"):
            await anext(updates)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hash", ONE),
        ("hash", b"x"),
        ("phase", 9),
        ("kind", b"\x09"),
        ("place", b"\1"),
        ("tokens", b"123"),
        ("block_size", 0),
    ],
)
def test_columns_that_do_not_fit_are_refused(service: Scripted, client: Client, name: str, value: object) -> None:
    broken = message()
    setattr(broken, name, value)
    service.watched = [broken]
    with client.watch() as updates, pytest.raises(Internal, match="REPLY_INVALID"):
        next(updates)
