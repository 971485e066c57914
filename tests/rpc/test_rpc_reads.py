"""Match, GetSequence, slots of token ranges, and revisions that a caller expects. A block holds 16 tokens."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc
import numpy as np
import pytest
from rpc_batches import append, batch, commit, create, fork, free, i32, of_u32, of_u64, ref, truncate, u32, u64
from rpc_scripted import Refusal, Service, refusal_of, running_service

from pagedkv.v1 import block_manager_pb2 as pb

PROMPT = list(range(100, 140))


async def step(service: Service, *items: pb.BatchItem) -> list[pb.BatchResult]:
    return list((await service.reads.StepBatch(batch(*items), timeout=30)).results)


async def refused(call: Awaitable[object]) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return refusal_of(caught.value)


async def pool(service: Service) -> pb.GetPoolResponse:
    reply = await service.reads.GetPool(pb.GetPoolRequest())
    reply.activity.Clear()
    return reply


def prompts(*each: list[int], **fields: object) -> pb.MatchRequest:
    counts = u32(*(len(prompt) for prompt in each))
    return pb.MatchRequest(counts=counts, tokens=i32(*(t for prompt in each for t in prompt)), **fields)  # type: ignore[arg-type]


# --- Match ------------------------------------------------------------------------------------------------------------


async def test_match_says_what_create_would_find_and_changes_nothing() -> None:
    async with running_service() as service:
        await step(service, create(PROMPT, adapter="a"), commit(ref(0), 40), free(ref(0)))
        before = await pool(service)
        asked = prompts(PROMPT, PROMPT[:32], PROMPT[:33], [1], [*PROMPT[:16], 9, 9], adapter="a")
        reply = await service.reads.Match(asked)
        assert of_u32(reply.cached) == [32, 16, 32, 0, 16]
        assert list(reply.admission) == [pb.ADMISSION_OK] * 5
        assert of_u32((await service.reads.Match(prompts(PROMPT))).cached) == [0]
        assert await pool(service) == before
        results = await step(
            service, *(create(p, adapter="a") for p in (PROMPT, PROMPT[:32])), free(ref(0)), free(ref(1))
        )
        assert [of_u32(result.cached) for result in results[:2]] == [[32], [16]]


async def test_match_says_whether_and_by_how_much_a_prompt_does_not_fit() -> None:
    async with running_service(num_blocks=8) as service:
        await step(service, create([1] * 48))
        asked = prompts([2] * 16, [2] * 80, [2] * 16, lookahead=u32(0, 0, 100))
        reply = await service.reads.Match(asked)
        assert list(reply.admission) == [pb.ADMISSION_OK, pb.ADMISSION_LATER, pb.ADMISSION_NEVER]
        assert of_u32(reply.shortfall) == [0, 1, 1]
        await step(service, free(1))


async def test_bad_prompts_have_their_reasons() -> None:
    async with running_service() as service:
        keyed = pb.ExtraKeys(of=u32(0), positions=u32(9), keys=[b"x"])
        for asked, reason in (
            (prompts([]), "NO_TOKENS"),
            (prompts([-1]), "TOKEN_OUT_OF_RANGE"),
            (pb.MatchRequest(counts=u32(2), tokens=i32(1)), "UNEQUAL_COLUMNS"),
            (pb.MatchRequest(counts=u32(1), tokens=i32(1), lookahead=u32(1, 1)), "UNEQUAL_COLUMNS"),
            (pb.MatchRequest(counts=u32(2**32 - 1), tokens=i32(1)), "COUNT_OUT_OF_RANGE"),
            (pb.MatchRequest(counts=b"x"), "COLUMN_LENGTH"),
            (prompts(*[[1]] * 1025), "TOO_MANY_ITEMS"),
            (prompts([1], extra_keys=keyed), "EXTRA_KEY_POSITION"),
        ):
            refusal = await refused(service.reads.Match(asked))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


async def test_match_looks_at_each_prompts_own_extra_keys() -> None:
    async with running_service() as service:
        item = create(PROMPT)
        item.create.extra_keys.CopyFrom(pb.ExtraKeys(of=u32(0), positions=u32(20), keys=[b"cat"]))
        await step(service, item, commit(ref(0), 40), free(ref(0)))
        keys = pb.ExtraKeys(of=u32(1, 2), positions=u32(20, 20), keys=[b"cat", b"dog"])
        reply = await service.reads.Match(prompts(PROMPT, PROMPT, PROMPT, extra_keys=keys))
        assert of_u32(reply.cached) == [16, 32, 16]


# --- GetSequence ------------------------------------------------------------------------------------------------------


async def test_a_sequence_is_told_in_full() -> None:
    async with running_service(num_host=16) as service:
        item = create(PROMPT, lookahead=5)
        item.create.priority = 70
        await step(service, item, commit(ref(0), 35), fork(ref(0)))
        told = await service.reads.GetSequence(pb.GetSequenceRequest(sequence=1, first=2, upto=5))
        assert (told.tokens, told.computed, told.writable, told.blocks) == (40, 35, 45, 3)
        assert (told.shared_blocks, told.host_blocks, told.swapped_out, told.priority) == (3, 0, False, 70)
        assert (told.state, told.tenant) == (pb.SEQUENCE_STATE_ENGINE, "default")
        assert np.frombuffer(told.token_ids, "<i4").tolist() == [102, 103, 104]
        tables = await service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[1]))
        assert list(tables.table_revision) == [told.table_revision]
        await step(service, pb.BatchItem(swap=pb.SwapCommand(out=u64(1, 2))))
        told = await service.reads.GetSequence(pb.GetSequenceRequest(sequence=2))
        assert (told.host_blocks, told.swapped_out, told.HasField("priority"), told.token_ids) == (3, True, True, b"")
        await step(service, free(1, 2))


async def test_what_a_sequence_has_not_is_refused() -> None:
    async with running_service() as service:
        await step(service, create(PROMPT))
        for first, upto, reason in ((0, 41, "POSITION_OUT_OF_RANGE"), (5, 4, "POSITION_OUT_OF_RANGE")):
            call = service.reads.GetSequence(pb.GetSequenceRequest(sequence=1, first=first, upto=upto))
            assert (await refused(call)).reason == reason
        refusal = await refused(service.reads.GetSequence(pb.GetSequenceRequest(sequence=1, upto=2**32 - 1)))
        assert (refusal.reason, refusal.numbers["limit"]) == ("TOO_MANY_TOKENS", str(1 << 18))
        for sequence in (0, 2, 2**63, 2**64 - 1):
            refusal = await refused(service.reads.GetSequence(pb.GetSequenceRequest(sequence=sequence)))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "SEQUENCE_NOT_FOUND")
        await step(service, free(1))


# --- slots and revisions ----------------------------------------------------------------------------------------------


async def test_slots_of_ranges_are_those_that_create_and_append_gave() -> None:
    async with running_service() as service:
        first, second = await step(service, create(PROMPT, lookahead=3), create([7] * 20))
        asked = pb.GetBlockTablesRequest(sequence=[2, 1], first=[0, 38], upto=[20, 43])
        reply = await service.reads.GetBlockTables(asked)
        assert list(reply.slot_indptr) == [0, 20, 25]
        assert list(reply.slots) == [*of_u64(second.slots), *of_u64(first.slots)[38:]]
        await step(service, free(1, 2))


async def test_slots_that_are_not_there_are_refused() -> None:
    async with running_service(num_host=16) as service:
        await step(service, create(PROMPT), commit(ref(0), 40), create(PROMPT[:3]))
        ask = service.reads.GetBlockTables
        for fields, reason in (
            ({"first": [0], "upto": [41]}, "POSITION_NOT_WRITABLE"),
            ({"first": [5], "upto": [4]}, "POSITION_NOT_WRITABLE"),
            ({"first": [5]}, "UNEQUAL_COLUMNS"),
            ({"first": [5, 6], "upto": [6, 7]}, "UNEQUAL_COLUMNS"),
            ({"first": [0], "upto": [2**32 - 1]}, "TOO_MANY_SLOTS"),
            ({"table_revision": [1, 2]}, "UNEQUAL_COLUMNS"),
        ):
            assert (await refused(ask(pb.GetBlockTablesRequest(sequence=[1], **fields)))).reason == reason  # type: ignore[arg-type]
        await step(service, pb.BatchItem(swap=pb.SwapCommand(out=u64(1))))
        refusal = await refused(ask(pb.GetBlockTablesRequest(sequence=[1], first=[0], upto=[1])))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_SWAPPED_OUT")
        await step(service, free(1, 2))


async def test_a_stale_table_revision_is_told_by_reads_and_items() -> None:
    async with running_service() as service:
        made = await service.reads.StepBatch(batch(create([1] * 15), create([2] * 15)))
        known = of_u64(made.table_revision)
        ask = pb.GetBlockTablesRequest(sequence=[1, 2], table_revision=known)
        await service.reads.GetBlockTables(ask)

        def expecting(item: pb.BatchItem, *revisions: int) -> pb.BatchItem:
            item.table_revision = u64(*revisions)
            return item

        fresh, stale, unequal, none_named = await step(
            service,
            expecting(append([1, 2], [5], [6]), *known),  # within their blocks: no table changes
            expecting(append([2, 1], [5], [6]), known[1], known[0] + 1),
            expecting(append([2, 1], [5], [6]), known[1]),
            expecting(create([3]), 1),
        )
        assert not fresh.error.reason
        assert (stale.error.reason, stale.error.code) == ("TABLE_REVISION_STALE", 9)
        numbers = {"sequence": "1", "expected": str(known[0] + 1), "revision": str(known[0])}
        assert dict(stale.error.metadata) == numbers
        assert unequal.error.reason == none_named.error.reason == "UNEQUAL_COLUMNS"
        tokens = (await service.reads.ListSequences(pb.ListSequencesRequest())).tokens
        assert list(tokens) == [16, 16]

        await step(service, append([1], [5]))  # another block
        refusal = await refused(service.reads.GetBlockTables(ask))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TABLE_REVISION_STALE")
        again = await step(
            service, expecting(truncate(1, 3), known[0]), expecting(free(2), known[1]), expecting(free(9), 1), free(1)
        )
        assert [result.error.reason for result in again] == ["TABLE_REVISION_STALE", "", "SEQUENCE_NOT_FOUND", ""]


async def test_a_window_gives_up_what_it_has_passed() -> None:
    async with running_service() as service:
        item = create(list(range(80)))
        item.create.window, item.create.sinks = 20, 1
        await step(service, item, commit(ref(0), 80))
        tables = await service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[1]))
        assert [bool(block) for block in tables.indices] == [True, False, False, True, True]
        assert list(tables.refcount) == [1, 0, 0, 1, 1]
        (cut,) = await step(service, truncate(1, 64))
        assert (cut.error.reason, cut.error.code, cut.error.metadata["least"]) == ("WINDOW_PASSED", 9, "67")
        refusal = await refused(
            service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[1], first=[16], upto=[80]))
        )
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WINDOW_PASSED")
        asked = prompts(list(range(80)), window=20, sinks=1)
        assert of_u32((await service.reads.Match(asked)).cached) == [64]
        asked.window = 1 << 31
        assert (await refused(service.reads.Match(asked))).reason == "WINDOW_OUT_OF_RANGE"
        item.create.window = 1 << 31
        (bad, _) = await step(service, item, free(1))
        assert bad.error.reason == "WINDOW_OUT_OF_RANGE"
