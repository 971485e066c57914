"""Resize and Compact over the wire, beside calls that go on."""

from __future__ import annotations

import grpc
import pytest
from rpc_batches import batch, commit, create, free, of_u64, reasons, ref
from rpc_scripted import Refusal, Service, refusal_of, request, running_service, until

from block_manager_svc.core import PageTable
from block_manager_svc.core.step import OpKind
from block_manager_svc.engine_steps import WINDOW
from block_manager_svc.manager import Limits
from block_manager_svc.scheduling.loop import StepLoop
from pagedkv.v1 import block_manager_pb2 as pb


async def refused(call: grpc.aio.UnaryUnaryMultiCallable, message: object) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(message, timeout=30)
    return refusal_of(caught.value)


async def pool_of(service: Service) -> pb.GetPoolResponse:
    return await service.reads.GetPool(pb.GetPoolRequest())


async def a_call_above_an_engine(service: Service) -> tuple[grpc.aio.UnaryStreamCall, list[int]]:
    """Two sequences of an engine in blocks 1 and 2, a call's 40 prompt tokens in 3, 4 and 5; its step is on its way."""
    reply = await service.reads.StepBatch(batch(create([1], [2])))
    service.executor.open = False
    call = service.generation.Generate(request(list(range(10, 50)), max_tokens=4))
    await until(lambda: service.executor.unanswered, "a step is on its way")
    return call, of_u64(reply.results[0].sequences)


# --- Compact ----------------------------------------------------------------------------------------------------------


async def test_blocks_move_behind_the_step_in_flight_and_the_next_step_has_the_whole_table() -> None:
    async with running_service() as service:
        call, engine = await a_call_above_an_engine(service)
        await service.reads.StepBatch(batch(free(engine[0])))
        before = await pool_of(service)
        assert (before.layout.free_runs, before.layout.highest_used_block) == (2, 5)
        reply = await service.reads.Compact(pb.CompactRequest())
        assert (reply.moved_blocks, reply.changed_tables, reply.step_id) == (1, 1, 2)
        first, copies = service.executor.plans
        assert first.deltas.blocks.tolist() == [3, 4, 5]
        assert (copies.ops.kind.tolist(), copies.ops.src.tolist(), copies.ops.dst.tolist()) == ([OpKind.COPY], [5], [1])
        assert copies.batch.row.size == 0
        pool = await pool_of(service)
        assert (pool.layout.free_runs, pool.layout.largest_free_run, pool.layout.highest_used_block) == (1, 507, 4)
        assert pool.header == reply.header
        service.executor.go_on()
        replies = [r async for r in call]
        assert replies[-1].usage.completion_tokens == 4
        after = service.executor.plans[2]
        assert (after.deltas.first.tolist(), after.deltas.blocks.tolist()) == ([0], [3, 4, 1])
        assert (await service.reads.Compact(pb.CompactRequest())).step_id == 0
        assert list((await service.reads.Audit(pb.AuditRequest())).violations) == []
        await service.reads.StepBatch(batch(free(engine[1])))


async def test_an_engine_s_blocks_do_not_move_and_a_step_is_bounded() -> None:
    async with running_service() as service:
        call, engine = await a_call_above_an_engine(service)
        made = await service.reads.StepBatch(batch(create([3] * 40), free(engine[0]), free(engine[1])))
        [theirs] = of_u64(made.results[0].sequences)
        moves = [(await service.reads.Compact(pb.CompactRequest(max_moves=1))).moved_blocks for _ in range(3)]
        assert moves == [1, 1, 0]
        tables = await service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[theirs]))
        assert list(tables.indices) == [6, 7, 8]
        call.cancel()
        await service.reads.StepBatch(batch(free(theirs)))


async def test_compaction_is_refused_where_it_cannot_be_sent() -> None:
    async with running_service() as service:
        why = await refused(service.reads.Compact, pb.CompactRequest(max_moves=4097))
        assert (why.code, why.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "COUNT_OUT_OF_RANGE")
        service.executor.open = False
        for i in range(WINDOW):
            service.manager._engine_steps.sent(10_000 + i)
        assert (await refused(service.reads.Compact, pb.CompactRequest())).reason == "WINDOW_FULL"
        for i in range(WINDOW):
            service.manager._engine_steps.completed(10_000 + i)
        service.executor.detach()
        assert (await refused(service.reads.Compact, pb.CompactRequest())).reason == "EXECUTOR_UNAVAILABLE"


async def test_a_compaction_that_fails_halfway_resets_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_service() as service:
        with monkeypatch.context() as broken:
            broken.setattr(StepLoop, "compact", lambda loop, most: 1 // 0)
            why = await refused(service.reads.Compact, pb.CompactRequest())
        assert (why.code, why.reason) == (grpc.StatusCode.ABORTED, "BATCH_FAILED")
        epoch = service.manager.epoch
        service.executor.attach()
        assert service.manager.epoch > epoch


# --- Resize -----------------------------------------------------------------------------------------------------------


async def test_a_limit_evicts_what_is_cached_and_holds_for_batches_and_calls() -> None:
    async with running_service(num_blocks=21) as service:
        prompt = [1] * 64
        await service.reads.StepBatch(batch(create(prompt), commit(ref(0), 64), free(ref(0))))
        reply = await service.reads.Resize(pb.ResizeRequest(limit=3))
        assert reply.evicted_blocks == 1
        pool = await pool_of(service)
        assert (pool.limit, pool.device.cached) == (3, 3)
        assert reasons(await service.reads.StepBatch(batch(create(prompt)))) == ["NEVER_FITS"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in service.generation.Generate(request([1] * 40, max_tokens=20))]
        assert refusal_of(caught.value).reason == "PROMPT_EXCEEDS_POOL"
        await service.reads.Resize(pb.ResizeRequest(limit=20))
        replies = [r async for r in service.generation.Generate(request([1] * 40, max_tokens=20))]
        assert replies[-1].usage.completion_tokens == 20


async def test_a_call_that_cannot_fit_any_more_ends_with_the_numbers() -> None:
    async with running_service(num_blocks=21) as service:
        service.executor.open = False
        call = service.generation.Generate(request([1] * 40, max_tokens=100))
        await until(lambda: service.executor.unanswered, "a step is on its way")
        await service.reads.Resize(pb.ResizeRequest(limit=4))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in call]
        why = refusal_of(caught.value)
        assert (why.reason, why.numbers["pool_blocks"]) == ("PROMPT_EXCEEDS_POOL", "4")


async def test_limits_that_cannot_be_are_refused() -> None:
    async with running_service(num_blocks=21) as service:
        for limit in (0, 21, 2**32 - 1):
            why = await refused(service.reads.Resize, pb.ResizeRequest(limit=limit))
            assert (why.code, why.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LIMIT_OUT_OF_RANGE")
            assert why.numbers == {"limit": str(limit), "most": "20"}
        reply = await service.reads.StepBatch(batch(create([1] * 33)))
        why = await refused(service.reads.Resize, pb.ResizeRequest(limit=2))
        assert (why.code, why.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "RESIZE_BELOW_USE")
        assert why.numbers == {"limit": "2", "used": "3"}
        await service.reads.StepBatch(batch(free(*of_u64(reply.results[0].sequences))))


async def test_the_limit_outlives_the_executor() -> None:
    async with running_service(num_blocks=21) as service:
        await service.reads.Resize(pb.ResizeRequest(limit=7))
        service.executor.detach()
        service.executor.attach()
        service.manager._stream.forget_boot()
        service.executor.detach()
        service.executor.attach()
        assert (await pool_of(service)).limit == 7


async def test_the_watermark_is_a_part_of_the_pool_that_creates_leave_to_the_others() -> None:
    async with running_service(num_blocks=21, limits=Limits(watermark=0.2)) as service:
        assert (await pool_of(service)).watermark == 4
        first = await service.reads.StepBatch(batch(create([1] * 16 * 10)))
        assert reasons(await service.reads.StepBatch(batch(create([2] * 16 * 7)))) == ["OUT_OF_BLOCKS"]
        second = await service.reads.StepBatch(batch(create([2] * 16 * 6)))
        ids = [*of_u64(first.results[0].sequences), *of_u64(second.results[0].sequences)]
        await service.reads.StepBatch(batch(free(*ids)))


def test_the_layout_of_a_full_pool_and_of_an_empty_one() -> None:
    table = PageTable(9, 4)
    layout = table.layout()
    assert (layout.free_runs, layout.largest_free_run, layout.highest_used_block) == (1, 8, 0)
    table.begin([32], [1] * 32, [0])
    layout = table.layout()
    assert (layout.free_runs, layout.largest_free_run, layout.highest_used_block) == (0, 0, 8)
