"""The calls that look into the service."""

from __future__ import annotations

import dataclasses

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2
from sdk_scripted import NO_EXECUTOR, POOL, Scripted, refuse

from pagedkv import (
    Admission,
    Client,
    Header,
    Internal,
    InvalidArgument,
    Match,
    Model,
    SequenceInfo,
    SequenceState,
    Unavailable,
)
from pagedkv.v1 import block_manager_pb2 as bm
from pagedkv.v1 import generation_pb2 as gen

HEADER = Header(service_id="svc", epoch=7, revision=41)


def test_models(service: Scripted, client: Client) -> None:
    assert client.models() == (
        Model(id="tiny", vocab_size=512, max_context=128, eos_token_ids=(2, 3), accepts_text=True, accepts_chat=True),
    )
    service.unary["ListModels"] = gen.ListModelsResponse()
    assert client.models() == ()


def test_pool_has_every_number_of_the_reply(client: Client) -> None:
    pool = client.pool()
    assert (pool.header, pool.block_size, pool.block_bytes) == (HEADER, 16, 4096)
    for part in ("device", "host", "sharing", "activity", "layout"):
        message, value = getattr(POOL, part), getattr(pool, part)
        names = [field.name for field in message.DESCRIPTOR.fields]
        assert names == [field.name for field in dataclasses.fields(value)]
        assert [getattr(message, name) for name in names] == [getattr(value, name) for name in names]
    assert (pool.limit, pool.watermark, pool.fragmentation) == (100, 1, 0.25)
    assert (pool.device.total, pool.device.in_use, pool.host.total) == (111, 7, 8)


def test_sequences_are_a_sequence_with_a_header(client: Client) -> None:
    listing = client.sequences()
    assert listing.header == HEADER
    assert list(listing) == [
        SequenceInfo(sequence=11, tokens=40, computed=39, blocks=3, shared_blocks=2, state=SequenceState.RUNNING),
        SequenceInfo(sequence=2**40, tokens=7, computed=0, blocks=0, shared_blocks=0, state=SequenceState.WAITING),
    ]
    assert len(listing) == 2
    assert listing[-1].sequence == 2**40
    assert listing[:1] == (listing[0],)


def test_tables_are_cut_out_of_the_csr(service: Scripted, client: Client) -> None:
    first, empty = client.tables([11, 2**40])
    assert (first.sequence, first.blocks, first.refcounts, first.shared) == (
        11,
        (5, 9, 6),
        (2, 2, 1),
        (True, True, False),
    )
    assert (first.block_size, first.last_page_len, first.tokens) == (16, 8, 40)
    assert (empty.sequence, empty.blocks, empty.tokens) == (2**40, (), 0)
    assert service.requests("GetBlockTables") == [bm.GetBlockTablesRequest(sequence=[11, 2**40])]


@pytest.mark.parametrize("indptr", [[], [0]])
def test_no_tables_are_an_empty_listing(service: Scripted, client: Client, indptr: list[int]) -> None:
    service.unary["GetBlockTables"] = bm.GetBlockTablesResponse(block_size=16, indptr=indptr)
    assert list(client.tables()) == []


def test_replies_whose_columns_do_not_fit_are_refused(service: Scripted, client: Client) -> None:
    service.unary["GetBlockTables"] = bm.GetBlockTablesResponse(sequence=[1], indptr=[0, 2], indices=[4])
    with pytest.raises(Internal, match="REPLY_INVALID"):
        client.tables()
    service.unary["ListSequences"] = bm.ListSequencesResponse(sequence=[1, 2], tokens=[3])
    with pytest.raises(Internal, match="REPLY_INVALID"):
        client.sequences()


def test_a_sequence_id_that_cannot_be_sent_is_refused(service: Scripted, client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.tables([3, -1])
    assert caught.value.numbers == {"sequence": -1}
    assert service.calls == []


def test_audit_tells_the_violations(service: Scripted, client: Client) -> None:
    assert client.audit().ok
    service.unary["Audit"] = bm.AuditResponse(violations=["block 3: refcount 2, 1 reference"])
    audit = client.audit()
    assert not audit.ok
    assert audit.violations == ("block 3: refcount 2, 1 reference",)


def test_a_cache_reset_tells_what_became_free_and_is_sent_once(service: Scripted, client: Client) -> None:
    reset = client.reset_cache()
    assert (reset.freed_blocks, reset.header.revision) == (12, 41)
    service.unary["ResetCache"] = NO_EXECUTOR
    with pytest.raises(Unavailable):
        client.reset_cache()
    assert len(service.requests("ResetCache")) == 2


def test_healthy_is_what_the_health_service_says(service: Scripted, client: Client) -> None:
    assert client.healthy()
    service.serving(False)
    assert not client.healthy()


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("ListModels", "models"),
        ("GetPool", "pool"),
        ("ListSequences", "sequences"),
        ("GetBlockTables", "tables"),
        ("Audit", "audit"),
    ],
)
def test_a_read_is_tried_again_when_nobody_was_there(service: Scripted, client: Client, method: str, call: str) -> None:
    answer = service.unary[method]

    def flaky(request: object, context: grpc.ServicerContext) -> object:
        if len(service.requests(method)) < 3:
            refuse(context, code_pb2.UNAVAILABLE, "moment")
        return answer

    service.unary[method] = flaky
    getattr(client, call)()
    assert len(service.requests(method)) == 3


def test_a_read_is_not_tried_for_ever(service: Scripted, client: Client) -> None:
    service.unary["GetPool"] = NO_EXECUTOR
    with pytest.raises(Unavailable) as caught:
        client.pool()
    assert caught.value.reason == "EXECUTOR_UNAVAILABLE"
    assert len(service.requests("GetPool")) == 4


def test_a_sequence_s_details_are_those_of_the_reply(service: Scripted, client: Client) -> None:
    reply = bm.GetSequenceResponse(
        state=bm.SEQUENCE_STATE_ENGINE, tenant="blue", tokens=40, computed=39, writable=48, blocks=3, shared_blocks=2,
        host_blocks=1, swapped_out=True, table_revision=7, priority=0, token_ids=np.array([5, 6], "<i4").tobytes(),
    )  # fmt: skip
    service.unary["GetSequence"] = reply
    details = client.sequence(11, first=1, upto=3)
    assert service.requests("GetSequence") == [bm.GetSequenceRequest(sequence=11, first=1, upto=3)]
    assert (details.sequence, details.state, details.token_ids) == (11, SequenceState.ENGINE, (5, 6))
    same = [
        name
        for name in bm.GetSequenceResponse.DESCRIPTOR.fields_by_name
        if name not in ("header", "state", "token_ids")
    ]
    assert [getattr(details, name) for name in same] == [getattr(reply, name) for name in same]
    reply.ClearField("priority")
    assert client.sequence(11).priority is None
    reply.token_ids = b"123"
    with pytest.raises(Internal, match="REPLY_INVALID"):
        client.sequence(11)


def test_match_asks_in_columns_and_answers_for_each_prompt(service: Scripted, client: Client) -> None:
    service.unary["Match"] = bm.MatchResponse(
        cached=np.array([16, 0], "<u4").tobytes(),
        admission=[bm.ADMISSION_OK, 9],  # one of a later contract
        shortfall=np.array([0, 4], "<u4").tobytes(),
    )
    found = client.match([[1, 2], [3]], lookahead=4, adapter="a", extra_keys={1: {0: b"cat"}}, generate=True)
    assert list(found) == [Match(16, Admission.OK, 0), Match(0, Admission.UNKNOWN, 4)]
    assert service.requests("Match") == [
        bm.MatchRequest(
            counts=np.array([2, 1], "<u4").tobytes(),
            tokens=np.array([1, 2, 3], "<i4").tobytes(),
            lookahead=np.array([4, 4], "<u4").tobytes(),
            adapter="a",
            extra_keys=bm.ExtraKeys(of=b"\1\0\0\0", positions=bytes(4), keys=[b"cat"]),
            generate=True,
        )
    ]
    service.unary["Match"].shortfall = b""
    with pytest.raises(Internal, match="REPLY_INVALID"):
        client.match([[1]])


def test_slots_of_ranges(service: Scripted, client: Client) -> None:
    service.unary["GetBlockTables"] = bm.GetBlockTablesResponse(
        sequence=[11, 12], slot_indptr=[0, 2, 3], slots=[80, 81, 2**40], table_revision=[3, 4]
    )
    slots = client.slots([11, 12], [0, 5], [2, 6], table_revisions=[3, 4])
    assert (slots.indptr, slots.slots, slots.table_revisions) == ((0, 2, 3), (80, 81, 2**40), (3, 4))
    assert service.requests("GetBlockTables") == [
        bm.GetBlockTablesRequest(sequence=[11, 12], first=[0, 5], upto=[2, 6], table_revision=[3, 4])
    ]
    service.unary["GetBlockTables"].slots.append(9)
    with pytest.raises(Internal, match="REPLY_INVALID"):
        client.slots([11, 12], [0, 5], [2, 6])


@pytest.mark.parametrize("sequence", [-1, 1 << 64])
def test_a_sequence_that_cannot_be_is_refused_before_it_is_sent(client: Client, sequence: int) -> None:
    with pytest.raises(InvalidArgument, match="VALUE_OUT_OF_RANGE"):
        client.sequence(sequence)
