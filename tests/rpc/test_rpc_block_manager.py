from __future__ import annotations

import grpc
import numpy as np
import pytest
from rpc_scripted import Service, refusal_of, request, running_service, until

from block_manager_svc.core import PageTable
from pagedkv.v1 import block_manager_pb2 as pb

NUM_BLOCKS = 512


async def three_samples_of_a_long_prompt(service: Service) -> grpc.aio.UnaryStreamCall:
    """40 prompt tokens in three blocks of 16, four tokens sampled for each of three samples; a step is on its way."""
    service.executor.open = False
    call = service.generation.Generate(request(list(range(10, 50)), n=3, temperature=1))
    for _ in range(4):
        await until(lambda: service.executor.unanswered, "a step is on its way")
        service.executor.answer()
    await until(lambda: service.executor.unanswered, "a step is on its way")
    return call


async def test_the_pools_blocks_add_up_and_show_what_is_shared() -> None:
    async with running_service(num_blocks=NUM_BLOCKS) as service:
        idle = await service.reads.GetPool(pb.GetPoolRequest())
        assert (idle.block_size, idle.block_bytes) == (16, 1024)
        assert (idle.device.null, idle.device.free) == (1, NUM_BLOCKS - 1)

        call = await three_samples_of_a_long_prompt(service)
        pool = await service.reads.GetPool(pb.GetPoolRequest())
        assert sum(value for _, value in pool.device.ListFields()) == NUM_BLOCKS
        assert pool.sharing.table_entries - pool.sharing.referenced_blocks == 2 * 2  # two full blocks, three tables
        assert pool.sharing.shared_blocks == 2
        assert pool.sharing.peak_table_entries >= pool.sharing.table_entries
        assert pool.activity.copies_on_write == 2  # of the third block, which is partly filled
        assert (pool.activity.running, pool.activity.waiting, pool.activity.steps_in_flight) == (3, 0, 1)
        assert pool.activity.prompt_tokens == 40
        assert pool.header.service_id == service.manager.service_id
        assert pool.header.epoch == service.manager.epoch
        assert pool.header.revision > idle.header.revision
        call.cancel()


async def test_sequences_are_listed_in_columns_that_agree_with_their_tables() -> None:
    async with running_service() as service:
        call = await three_samples_of_a_long_prompt(service)
        listed = await service.reads.ListSequences(pb.ListSequencesRequest())
        tables = await service.reads.GetBlockTables(pb.GetBlockTablesRequest())
        assert listed.header == tables.header
        assert len(listed.sequence) == 3
        assert list(listed.sequence) == sorted(listed.sequence) == list(tables.sequence)
        assert list(listed.blocks) == np.diff(tables.indptr).tolist()
        assert list(listed.shared_blocks) == [2, 2, 2]
        assert list(listed.tokens) == [44] * 3
        assert list(listed.computed) == [43] * 3
        assert list(listed.state) == [pb.SEQUENCE_STATE_RUNNING] * 3
        call.cancel()


async def test_block_tables_are_csr_with_refcounts() -> None:
    async with running_service() as service:
        call = await three_samples_of_a_long_prompt(service)
        everything = await service.reads.GetBlockTables(pb.GetBlockTablesRequest())
        assert everything.indptr[0] == 0
        assert everything.indptr[-1] == len(everything.indices) == len(everything.refcount)
        spans = [
            list(everything.indices[start:end])
            for start, end in zip(everything.indptr[:-1], everything.indptr[1:], strict=True)
        ]
        assert spans[0][:2] == spans[1][:2] == spans[2][:2]
        assert len({span[2] for span in spans}) == 3
        assert list(everything.refcount) == [3, 3, 1] * 3
        assert 0 not in everything.indices
        assert list(everything.last_page_len) == [12] * 3

        last, first = everything.sequence[2], everything.sequence[0]
        some = await service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[last, first]))
        assert list(some.sequence) == [last, first]
        assert list(some.indices) == spans[2] + spans[0]
        call.cancel()


async def test_a_waiting_sequence_has_an_empty_table() -> None:
    async with running_service(num_blocks=4) as service:
        service.executor.open = False
        calls = [service.generation.Generate(request([10 + i] * 40, max_tokens=1)) for i in range(2)]
        await until(lambda: service.manager.activity().waiting == 1, "one waits")
        listed = await service.reads.ListSequences(pb.ListSequencesRequest())
        assert list(listed.state) == [pb.SEQUENCE_STATE_RUNNING, pb.SEQUENCE_STATE_WAITING]
        assert list(listed.blocks) == [3, 0]
        tables = await service.reads.GetBlockTables(pb.GetBlockTablesRequest())
        assert list(tables.indptr) == [0, 3, 3]
        assert tables.last_page_len[1] == 0
        service.executor.go_on()
        for call in calls:
            assert [_ async for _ in call]


@pytest.mark.parametrize("sequence", [0, 999, 2**31, 2**63, 2**64 - 1])
async def test_a_sequence_that_is_not_alive_is_not_found(sequence: int) -> None:
    async with running_service() as service:
        call = await three_samples_of_a_long_prompt(service)
        alive = (await service.reads.ListSequences(pb.ListSequencesRequest())).sequence[0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[alive, sequence]))
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "SEQUENCE_NOT_FOUND")
        assert refusal.numbers == {"sequence": str(sequence)}
        call.cancel()


async def test_too_many_sequences_at_once_are_refused_with_the_limit() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[1] * 4097))
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_MANY_ITEMS")
        assert refusal.numbers == {"asked": "4097", "limit": "4096"}


async def test_an_audit_tells_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_service() as service:
        assert list((await service.reads.Audit(pb.AuditRequest())).violations) == []
        with monkeypatch.context() as broken:
            broken.setattr(PageTable, "check", lambda table: ["block 7 is in two lists"])
            audit = await service.reads.Audit(pb.AuditRequest())
        assert list(audit.violations) == ["block 7 is in two lists"]


async def test_a_reset_cache_is_not_found_by_later_prompts_and_disturbs_no_running_one() -> None:
    async with running_service() as service:
        prompt = list(range(10, 50))

        async def cached_tokens() -> int:
            replies = [r async for r in service.generation.Generate(request(prompt, max_tokens=1))]
            return replies[-1].usage.cached_tokens

        assert (await cached_tokens(), await cached_tokens()) == (0, 32)
        service.executor.open = False
        running = service.generation.Generate(request(prompt, max_tokens=3))
        await until(lambda: service.manager.activity().running == 1, "it runs over the cached blocks")
        before = await service.reads.GetPool(pb.GetPoolRequest())
        reset = await service.reads.ResetCache(pb.ResetCacheRequest())
        assert reset.freed_blocks == before.device.cached
        assert reset.header.revision == before.header.revision + 1
        assert (await service.reads.GetPool(pb.GetPoolRequest())).device.cached == 0
        assert list((await service.reads.Audit(pb.AuditRequest())).violations) == []
        service.executor.go_on()
        replies = [r async for r in running]
        assert (replies[-1].usage.cached_tokens, replies[-1].usage.completion_tokens) == (32, 3)
        assert (await cached_tokens(), await cached_tokens()) == (0, 32)
        assert list((await service.reads.Audit(pb.AuditRequest())).violations) == []


async def test_without_an_executor_yet_every_read_says_so() -> None:
    async with running_service(attached=False) as service:
        for read, message in (
            (service.reads.GetPool, pb.GetPoolRequest()),
            (service.reads.ListSequences, pb.ListSequencesRequest()),
            (service.reads.GetBlockTables, pb.GetBlockTablesRequest()),
            (service.reads.Audit, pb.AuditRequest()),
            (service.reads.ResetCache, pb.ResetCacheRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(message)
            refusal = refusal_of(caught.value)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
            assert refusal.retry_after


async def test_reads_go_on_while_the_executor_is_away() -> None:
    async with running_service() as service:
        service.executor.detach()
        assert (await service.reads.GetPool(pb.GetPoolRequest())).block_size == 16
