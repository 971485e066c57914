"""Batches as the SDK builds and reads them: columns to the byte, references, errors of items and of calls."""

from __future__ import annotations

import struct
from array import array

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2
from sdk_scripted import HEADER, Scripted, refuse

from pagedkv import (
    AlreadyExists,
    AsyncClient,
    Batch,
    Client,
    Header,
    Internal,
    InvalidArgument,
    Item,
    ResourceExhausted,
)
from pagedkv.v1 import block_manager_pb2 as bm


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def i32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def sent(service: Scripted) -> bm.StepBatchRequest:
    [request] = service.requests("StepBatch")
    assert isinstance(request, bm.StepBatchRequest)
    return request


def test_every_command_travels_as_columns(service: Scripted, client: Client) -> None:
    batch = Batch()
    batch.create([[1, 2], [3]], lookahead=[0, 4], adapter="a")
    batch.append([7, 8], [10, 11])
    batch.append(7, [1, 2, 3], counts=[3], lookahead=2)
    batch.commit([7, 8], [4, 5])
    batch.fork(7, 2)
    batch.truncate(7, 1)
    batch.free([7, 8])
    batch.pin([1, 2], ttl=1.5, adapter="a")
    batch.unpin(3)
    batch.swap([7], [8, 9])
    held = batch.reserve(5, ttl=2)
    batch.create([[1]], reservation=held[0], priority=0, priority_ttl=0.5)
    batch.append(7, 1, reservation=4)
    batch.release([3, 4])
    assert len(batch) == 14
    client.step_batch(batch, request_id="id", atomic=True, wait=False)
    assert sent(service) == bm.StepBatchRequest(
        request_id="id",
        atomic=True,
        no_wait=True,
        items=[
            bm.BatchItem(
                create=bm.CreateCommand(counts=u32(2, 1), tokens=i32(1, 2, 3), lookahead=u32(0, 4), adapter="a")
            ),
            bm.BatchItem(append=bm.AppendCommand(sequences=u64(7, 8), tokens=i32(10, 11))),
            bm.BatchItem(
                append=bm.AppendCommand(sequences=u64(7), counts=u32(3), tokens=i32(1, 2, 3), lookahead=u32(2))
            ),
            bm.BatchItem(commit=bm.CommitCommand(sequences=u64(7, 8), upto=u32(4, 5))),
            bm.BatchItem(fork=bm.ForkCommand(sequences=u64(7), counts=u32(2))),
            bm.BatchItem(truncate=bm.TruncateCommand(sequences=u64(7), lengths=u32(1))),
            bm.BatchItem(free=bm.FreeCommand(sequences=u64(7, 8))),
            bm.BatchItem(pin=bm.PinCommand(tokens=i32(1, 2), adapter="a", ttl_ms=1500)),
            bm.BatchItem(unpin=bm.UnpinCommand(pins=u64(3))),
            bm.BatchItem(swap=bm.SwapCommand(out=u64(7), back=u64(8, 9))),
            bm.BatchItem(reserve=bm.ReserveCommand(blocks=5, ttl_ms=2000)),
            bm.BatchItem(
                create=bm.CreateCommand(
                    counts=u32(1), tokens=i32(1), reservation=1 << 63 | 10 << 32, priority=0, priority_ttl_ms=500
                )
            ),
            bm.BatchItem(append=bm.AppendCommand(sequences=u64(7), tokens=i32(1), reservation=4)),
            bm.BatchItem(release=bm.ReleaseCommand(reservations=u64(3, 4))),
        ],
    )


def test_extra_keys_travel_as_columns(service: Scripted, client: Client) -> None:
    batch = Batch()
    batch.create([[1, 2, 3], [4, 5]], extra_keys={1: {1: b"dog", 0: b"cat"}})
    batch.append([7], [8], extra_keys={0: {3: b"cat"}})
    batch.pin([1, 2], ttl=1, extra_keys={1: b"cat"})
    batch.pin([1, 2], ttl=1)
    client.step_batch(batch)
    create, append, pin, plain = sent(service).items
    assert unpacked(create.create.extra_keys) == ([1, 1], [0, 1], [b"cat", b"dog"])
    assert unpacked(append.append.extra_keys) == ([0], [3], [b"cat"])
    assert unpacked(pin.pin.extra_keys) == ([0], [1], [b"cat"])
    assert not plain.pin.HasField("extra_keys")


def test_a_window_travels_with_its_sinks_and_is_left_out_where_there_is_none(service: Scripted, client: Client) -> None:
    batch = Batch()
    batch.create([[1]], window=7, sinks=2)
    batch.create([[1]])
    client.step_batch(batch)
    assert [(item.create.window, item.create.sinks) for item in sent(service).items] == [(7, 2), (0, 0)]
    with pytest.raises(InvalidArgument, match="VALUE_OUT_OF_RANGE"):
        batch.create([[1]], window=-1)


def test_an_item_may_expect_revisions(service: Scripted, client: Client) -> None:
    batch = Batch()
    batch.free([7])
    batch.only_if(batch.append([7, 8], [1, 2]), [5, 6])
    client.step_batch(batch)
    assert [item.table_revision for item in sent(service).items] == [b"", u64(5, 6)]


def unpacked(extra: bm.ExtraKeys) -> tuple[list[int], list[int], list[bytes]]:
    of, positions = (np.frombuffer(column, "<u4").tolist() for column in (extra.of, extra.positions))
    return of, positions, list(extra.keys)


def test_an_item_stands_for_the_ids_that_it_makes(service: Scripted, client: Client) -> None:
    batch = Batch()
    assert batch.pin([1], ttl=1).made == 1
    prompts = batch.create([[1], [2], [3]])
    children = batch.fork(prompts[-1], [2])
    batch.free([*prompts, children[1], 5])
    batch.commit(prompts, [1, 1, 1])
    batch.unpin(Item(0, 1))
    top = 1 << 63
    assert list(prompts) == [top | 1 << 32, top | 1 << 32 | 1, top | 1 << 32 | 2]
    assert prompts[1:] == [top | 1 << 32 | 1, top | 1 << 32 | 2]
    with pytest.raises(IndexError):
        prompts[3]
    client.step_batch(batch)
    items = sent(service).items
    assert items[2].fork.sequences == u64(prompts[2])
    assert items[3].free.sequences == u64(*prompts, top | 2 << 32 | 1, 5)
    assert items[4].commit.sequences == u64(*prompts)
    assert items[5].unpin.pins == u64(top)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        iter([1, 2, 3]),
        bytes([1, 2, 3]),
        array("i", [1, 2, 3]),
        array("q", [1, 2, 3]),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], np.int64),
        np.arange(1, 7, dtype=np.int32)[::2] // 2 + 1,
        np.array([1, 9, 2, 9, 3, 9], np.int32)[::2],
        memoryview(np.array([1, 2, 3], np.int32)),
    ],
)
def test_tokens_may_be_any_whole_numbers(service: Scripted, client: Client, tokens: object) -> None:
    batch = Batch()
    batch.append([1, 2, 3], tokens)  # type: ignore[arg-type]
    client.step_batch(batch)
    assert sent(service).items[0].append.tokens == i32(1, 2, 3)


def test_an_array_of_floats_is_no_column() -> None:
    for values in (np.zeros(3, np.float32), [1.5], ["a"]):
        with pytest.raises(InvalidArgument) as caught:
            Batch().append([1, 2, 3], values)  # type: ignore[arg-type]
        assert (caught.value.reason, caught.value.numbers) == ("VALUE_OUT_OF_RANGE", {"field": "tokens"})


def test_what_no_column_can_hold_is_refused_where_it_is_given() -> None:
    for build in (
        lambda batch: batch.free(-1),
        lambda batch: batch.free(1 << 64),
        lambda batch: batch.create([[1 << 31]]),
        lambda batch: batch.append(1, 1, lookahead=1 << 32),
        lambda batch: batch.fork(1, -1),
        lambda batch: batch.pin([1], ttl=-1),
        lambda batch: batch.reserve(-1, ttl=1),
        lambda batch: batch.create([[1]], priority=-1),
    ):
        with pytest.raises(InvalidArgument) as caught:
            build(Batch())
        assert caught.value.reason == "VALUE_OUT_OF_RANGE"


def test_ids_that_are_no_text_are_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.step_batch(Batch(), request_id="\ud800")
    assert caught.value.reason == "TEXT_NOT_UNICODE"


def test_results_are_columns_and_an_item_s_error_is_raised_where_it_is_read(service: Scripted, client: Client) -> None:
    service.unary["StepBatch"] = bm.StepBatchResponse(
        header=HEADER,
        results=[
            bm.BatchResult(
                sequences=u64(11, 2**40), cached=u32(0, 16), slot_indptr=u32(0, 2, 3), slots=u64(2**40, 17, 33)
            ),
            bm.BatchResult(copy_src=u32(1), copy_dst=u32(2)),
            bm.BatchResult(
                error=bm.BatchError(
                    code=code_pb2.RESOURCE_EXHAUSTED,
                    reason="OUT_OF_BLOCKS",
                    message="7 blocks are needed",
                    metadata={"needed": "7", "available": "3"},
                    retry_delay=Duration(nanos=250_000_000),
                )
            ),
            bm.BatchResult(pin=5, pinned_tokens=32),
            bm.BatchResult(swapped_blocks=9),
            bm.BatchResult(reservation=6),
        ],
        table_sequence=u64(11, 2**40),
        table_revision=u64(3, 41),
        step_id=6,
        replayed=True,
    )
    batch = Batch()
    made = batch.create([[1], [2]])
    grown = batch.append(1, 1)
    failed = batch.append(2, 2)
    pinned = batch.pin([1], ttl=1)
    swapped, reserved = batch.swap([1]), batch.reserve(1, ttl=1)
    reply = client.step_batch(batch)
    assert reply.header == Header(service_id="svc", epoch=7, revision=41)
    assert (reply.step_id, reply.replayed) == (6, True)
    assert (reply.table_sequence.tolist(), reply.table_revision.tolist()) == ([11, 2**40], [3, 41])
    assert reply[made].sequences.tolist() == [11, 2**40]
    assert reply[made].cached.tolist() == [0, 16]
    assert [reply[made].slots_of(i).tolist() for i in (0, 1)] == [[2**40, 17], [33]]
    assert np.asarray(reply[made].slots).dtype == np.uint64
    assert (reply[grown].copy_src.tolist(), reply[grown].copy_dst.tolist()) == ([1], [2])
    assert (reply[pinned].pin, reply[pinned].pinned_tokens) == (5, 32)
    assert (reply[swapped].swapped_blocks, reply[reserved].reservation) == (9, 6)
    for read in (lambda: reply[failed], reply.raise_errors):
        with pytest.raises(ResourceExhausted) as caught:
            read()
    error = caught.value
    assert (error.reason, error.message, error.code) == ("OUT_OF_BLOCKS", "7 blocks are needed", "RESOURCE_EXHAUSTED")
    assert (error.numbers, error.retry_after) == ({"needed": 7, "available": 3}, 0.25)
    service.unary["StepBatch"] = bm.StepBatchResponse(header=HEADER, results=[bm.BatchResult()])
    client.step_batch(Batch()).raise_errors()


def test_a_column_that_cannot_be_read_breaks_the_contract(service: Scripted, client: Client) -> None:
    service.unary["StepBatch"] = bm.StepBatchResponse(header=HEADER, results=[bm.BatchResult(slots=b"1234567")])
    with pytest.raises(Internal) as caught:
        client.step_batch(Batch())
    assert caught.value.reason == "REPLY_INVALID"


def test_a_request_id_that_was_used_has_an_error_of_its_own(service: Scripted, client: Client) -> None:
    def reused(request: object, context: grpc.ServicerContext) -> object:
        return refuse(context, code_pb2.ALREADY_EXISTS, "used", reason="REQUEST_ID_REUSED", age_ms=5)

    service.unary["StepBatch"] = reused
    with pytest.raises(AlreadyExists) as caught:
        client.step_batch(Batch(), request_id="a")
    assert (caught.value.reason, caught.value.numbers) == ("REQUEST_ID_REUSED", {"age_ms": 5})


async def test_the_asyncio_client_has_the_same_call(service: Scripted) -> None:
    service.unary["StepBatch"] = bm.StepBatchResponse(header=HEADER, results=[bm.BatchResult(sequences=u64(9))])
    batch = Batch()
    made = batch.create([[1]])
    async with AsyncClient(service.address) as client:
        reply = await client.step_batch(batch, request_id="a")
    assert reply[made].sequences.tolist() == [9]
    assert sent(service).request_id == "a"
    assert not sent(service).no_wait
