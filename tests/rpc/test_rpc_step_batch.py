"""StepBatch over the wire: columns, results, steps in the stream's order, and what ends a wait."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from rpc_batches import (
    append,
    batch,
    commit,
    create,
    fork,
    free,
    i32,
    of_u32,
    of_u64,
    pin,
    reasons,
    ref,
    truncate,
    u32,
    u64,
    unpin,
)
from rpc_scripted import Refusal, Service, refusal_of, request, running_service, until

from block_manager_svc.core import PageTable
from block_manager_svc.core.step import OpKind
from block_manager_svc.engine_steps import WINDOW
from block_manager_svc.manager import Limits
from pagedkv.v1 import block_manager_pb2 as pb

LIMITS = Limits(executor_grace_s=0.2)


async def step(service: Service, *items: pb.BatchItem, **fields: object) -> pb.StepBatchResponse:
    return await service.reads.StepBatch(batch(*items, **fields), timeout=30)


async def refused(service: Service, *items: pb.BatchItem, within: float = 30, **fields: object) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.reads.StepBatch(batch(*items, **fields), timeout=within)
    return refusal_of(caught.value)


async def audit(service: Service) -> None:
    assert list((await service.reads.Audit(pb.AuditRequest())).violations) == []


def keyed(prompt: list[int], keys: dict[int, bytes], of: tuple[int, ...] | None = None) -> pb.BatchItem:
    item = create(prompt)
    item.create.extra_keys.of = u32(*((0,) * len(keys) if of is None else of))
    item.create.extra_keys.positions = u32(*keys)
    item.create.extra_keys.keys.extend(keys.values())
    return item


# --- columns in, columns out ------------------------------------------------------------------------------------------


async def test_one_batch_makes_forks_appends_and_frees() -> None:
    async with running_service() as service:
        reply = await step(
            service,
            create([1, 2, 3], list(range(20)), lookahead=2),
            commit(ref(0), 3),
            fork(ref(0), 2),
            append([ref(2, 1), ref(0)], [4], [5, 6]),
            free(ref(0, 1)),
        )
        assert reasons(reply) == [""] * 5
        made, _, forked, grown, freed = reply.results
        assert of_u64(made.sequences) == [1, 2]
        assert of_u32(made.cached) == [0, 0]
        assert of_u32(made.slot_indptr) == [0, 5, 27]
        assert of_u64(made.slots) == [*range(16, 21), *range(32, 54)]
        assert of_u64(forked.sequences) == [3, 4]
        assert of_u32(grown.copy_src) == [1, 1]
        assert of_u32(grown.copy_dst) == [4, 5]
        assert of_u32(grown.slot_indptr) == [0, 1, 3]
        assert of_u64(grown.slots) == [4 * 16 + 3, 5 * 16 + 3, 5 * 16 + 4]
        assert freed == pb.BatchResult()
        assert of_u64(reply.table_sequence) == [1, 3, 4]
        [plan] = service.executor.plans
        assert (plan.ops.kind.tolist(), plan.ops.src.tolist(), plan.ops.dst.tolist()) == ([1, 1], [1, 1], [4, 5])
        assert (plan.batch.row.size, plan.deltas.row.size) == (0, 0)
        assert reply.step_id == 1

        tables = await service.reads.GetBlockTables(pb.GetBlockTablesRequest(sequence=[1, 3, 4]))
        assert of_u64(reply.table_revision) == list(tables.table_revision)
        assert reply.header == tables.header
        assert list(tables.indices) == [5, 1, 4]
        listed = await service.reads.ListSequences(pb.ListSequencesRequest())
        assert list(listed.state) == [pb.SEQUENCE_STATE_ENGINE] * 3
        assert list(listed.tokens) == [5, 3, 4]
        await audit(service)
        await step(service, free(1, 3, 4))


async def test_columns_that_are_left_out_mean_one_each_and_no_lookahead() -> None:
    async with running_service() as service:
        await step(service, create([1], [2]))
        tokens = pb.BatchItem(append=pb.AppendCommand(sequences=u64(1, 2), tokens=i32(7, 8)))
        one_each = pb.BatchItem(fork=pb.ForkCommand(sequences=u64(1, 2)))
        grown, forked = (await step(service, tokens, one_each)).results
        assert of_u64(grown.slots) == [17, 33]
        assert of_u64(forked.sequences) == [3, 4]
        await step(service, free(1, 2, 3, 4))


async def test_what_is_committed_and_freed_is_found_by_the_next_of_the_same_adapter() -> None:
    async with running_service() as service:
        prompt = list(range(40))
        await step(service, create(prompt, adapter="a"), commit(ref(0), 40), free(ref(0)))
        same, other, base = (await step(service, *(create(prompt, adapter=a) for a in ("a", "b", "")))).results
        assert [of_u32(made.cached) for made in (same, other, base)] == [[32], [0], [0]]
        assert len(of_u64(same.slots)) == 8
        await step(service, *(free(*of_u64(made.sequences)) for made in (same, other, base)))


async def test_what_is_committed_is_found_by_the_next_with_the_same_picture() -> None:
    prompt = list(range(100, 140))
    cat, dog = {20: b"cat"}, {20: b"dog"}
    async with running_service() as service:
        await step(service, keyed(prompt, cat), commit(ref(0), 40), free(ref(0)))
        made = await step(service, keyed(prompt, cat), keyed(prompt, dog), create(prompt), free(ref(0), ref(1), ref(2)))
        same, other, none = made.results[:3]
        assert [same.cached, other.cached, none.cached] == [u32(32), u32(16), u32(16)]
        pinned = (await step(service, pin(prompt, 1000))).results[0]
        assert pinned.pinned_tokens == 16
        await audit(service)


async def test_generate_and_engines_do_not_find_each_others_blocks() -> None:
    async with running_service() as service:
        prompt = list(range(10, 50))
        async for _ in service.generation.Generate(request(prompt, max_tokens=1)):
            pass
        await service.all_blocks_back()
        [made] = (await step(service, create(prompt))).results
        assert of_u32(made.cached) == [0]
        await step(service, commit(1 << 63, 40), free(*of_u64(made.sequences)))
        replies = [r async for r in service.generation.Generate(request(prompt, max_tokens=1))]
        assert replies[-1].usage.cached_tokens == 32


async def test_a_failing_item_has_its_error_and_the_rest_goes_on() -> None:
    async with running_service(num_blocks=5) as service:
        reply = await step(
            service,
            create([1]),
            create([1] * 64),
            append([ref(1)], [1]),
            pb.BatchItem(),
            pb.BatchItem(append=pb.AppendCommand(sequences=b"1234567", tokens=i32(1))),
            pb.BatchItem(append=pb.AppendCommand(sequences=u64(1), tokens=b"12")),
            append([99], [1]),
            append([ref(0)], [2]),
            truncate(ref(0), 3),
        )
        assert reasons(reply) == [
            "",
            "OUT_OF_BLOCKS",
            "REFERENCE_INVALID",
            "ITEM_EMPTY",
            "COLUMN_LENGTH",
            "COLUMN_LENGTH",
            "SEQUENCE_NOT_FOUND",
            "",
            "LENGTH_OUT_OF_RANGE",
        ]
        short = reply.results[1].error
        assert short.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "4 blocks are needed" in short.message
        assert dict(short.metadata) == {"needed": "4", "available": "3"}
        assert not short.HasField("retry_delay")
        assert dict(reply.results[2].error.metadata) == {"item": "1", "position": "0"}
        assert dict(reply.results[4].error.metadata) == {"field": "sequences", "bytes": "7", "width": "8"}
        assert reasons(await step(service, create([1] * 100))) == ["NEVER_FITS"]
        await audit(service)
        await step(service, free(1))


async def test_bad_input_has_its_reason_and_the_books_balance() -> None:
    async with running_service() as service:
        await step(service, create([1, 2, 3]), commit(ref(0), 2))
        largest = (1 << 63) - 1
        for item, reason in (
            (free(1, 1), "DUPLICATE_SEQUENCE"),
            (free(0), "SEQUENCE_NOT_FOUND"),
            (free(largest), "SEQUENCE_NOT_FOUND"),
            (free((1 << 64) - 1), "REFERENCE_INVALID"),
            (append([1], [-1]), "TOKEN_OUT_OF_RANGE"),
            (append([1], []), ""),
            (append([1, 1], [], []), "DUPLICATE_SEQUENCE"),
            (append([1], [4], lookahead=(1 << 32) - 1), "COUNT_OUT_OF_RANGE"),
            (append([1], [4], lookahead=(1 << 31) - 1), "TOO_MANY_SLOTS"),
            (append([1], [4], lookahead=1 << 19), "OUT_OF_BLOCKS"),
            (pb.BatchItem(append=pb.AppendCommand(sequences=u64(1), counts=u32(2**32 - 1))), "COUNT_OUT_OF_RANGE"),
            (pb.BatchItem(append=pb.AppendCommand(sequences=u64(1), counts=u32(1, 1))), "UNEQUAL_COLUMNS"),
            (create([]), "NO_TOKENS"),
            (create(), ""),
            (
                pb.BatchItem(create=pb.CreateCommand(counts=u32(1), tokens=i32(1), priority=101)),
                "PRIORITY_OUT_OF_RANGE",
            ),
            (keyed([1, 2, 3], {3: b"cat"}), "EXTRA_KEY_POSITION"),
            (keyed([1, 2, 3], {0: b""}), "EXTRA_KEY_LENGTH"),
            (keyed([1, 2, 3], {0: b"cat"}, of=(1,)), "EXTRA_KEY_POSITION"),
            (keyed([1, 2, 3], {0: b"cat"}, of=()), "UNEQUAL_COLUMNS"),
            (commit(1, 1), "UPTO_BELOW_COMPUTED"),
            (commit(1, 4), "UPTO_NOT_WRITABLE"),
            (truncate(1, 0), "LENGTH_OUT_OF_RANGE"),
            (fork(1, 0), "COUNT_OUT_OF_RANGE"),
            (fork(1, 1 << 31), "COUNT_OUT_OF_RANGE"),
            (fork(1, (1 << 16) + 1), "TOO_MANY_CHILDREN"),
            (pin([1] * 16, 1000), "PREFIX_NOT_CACHED"),
            (pin([1], 0), "UNTIL_PASSED"),
            (unpin(7), "PIN_NOT_FOUND"),
            (pb.BatchItem(reserve=pb.ReserveCommand(blocks=1)), "UNTIL_PASSED"),
            (pb.BatchItem(reserve=pb.ReserveCommand(ttl_ms=1000)), "COUNT_OUT_OF_RANGE"),
            (pb.BatchItem(release=pb.ReleaseCommand(reservations=u64(7))), "RESERVATION_NOT_FOUND"),
            (
                pb.BatchItem(append=pb.AppendCommand(sequences=u64(1), tokens=i32(1), reservation=ref(9))),
                "REFERENCE_INVALID",
            ),
            (pb.BatchItem(swap=pb.SwapCommand(out=u64(1))), "OUT_OF_HOST_SLOTS"),
        ):
            assert reasons(await step(service, item)) == [reason], item
        await step(service, free(1))
        assert reasons(await step(service, free(1))) == ["SEQUENCE_NOT_FOUND"]
        await audit(service)


async def test_too_many_items_are_refused_as_a_whole() -> None:
    async with running_service() as service:
        why = await refused(service, create([1]), *[pb.BatchItem()] * 4096)
        assert (why.code, why.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_MANY_ITEMS")
        assert why.numbers == {"asked": "4097", "limit": "4096"}
        assert reasons(await step(service, *[pb.BatchItem()] * 4096)) == ["ITEM_EMPTY"] * 4096
        large = pb.BatchItem(create=pb.CreateCommand(counts=u32(1 << 21), tokens=bytes(4 << 21)))
        assert (await refused(service, large)).reason == "MESSAGE_TOO_LARGE"


async def test_a_call_s_sequences_are_not_an_engine_s() -> None:
    async with running_service() as service:
        service.executor.open = False
        call = service.generation.Generate(request(list(range(10, 50))))
        await until(lambda: service.executor.unanswered, "a step is on its way")
        [sequence] = (await service.reads.ListSequences(pb.ListSequencesRequest())).sequence
        for item in (free(sequence), append([sequence], [1]), fork(sequence), truncate(sequence, 1)):
            assert reasons(await step(service, item)) == ["SEQUENCE_NOT_FOUND"]
        await audit(service)
        call.cancel()


async def test_what_matters_more_is_evicted_later_until_its_time_is_over() -> None:
    async with running_service(num_blocks=4, limits=Limits(eviction="priority")) as service:

        async def cache(token: int, **retention: int) -> None:
            made = pb.CreateCommand(counts=u32(16), tokens=i32(*[token] * 16), **retention)
            await step(service, pb.BatchItem(create=made), commit(ref(0), 16), free(ref(0)))

        async def cached(token: int) -> int:
            reply = await step(service, create([token] * 17), free(ref(0)))
            return of_u32(reply.results[0].cached)[0]

        await cache(1, priority=90)
        await cache(2, priority=90, priority_ttl_ms=1)
        await cache(3)
        released = service.manager.now()
        await until(lambda: service.manager.now() > released + 1, "the second has the third's priority")
        await step(service, create([4] * 17), free(ref(0)))  # takes two blocks
        assert [await cached(token) for token in (1, 2, 3)] == [16, 0, 0]


async def test_a_pinned_prefix_survives_until_its_time_is_over() -> None:
    async with running_service(num_blocks=4) as service:
        prompt = [1] * 16
        reply = await step(service, create(prompt), commit(ref(0), 16), free(ref(0)), pin(prompt, 3_600_000))
        assert reply.results[3].pinned_tokens == 16
        assert reasons(await step(service, create([2] * 48))) == ["OUT_OF_BLOCKS"]
        assert reasons(await step(service, unpin(reply.results[3].pin), create([2] * 48))) == ["", ""]
        await step(service, free(2))


async def test_a_call_that_waits_for_pinned_blocks_goes_on_when_the_pin_ends() -> None:
    async with running_service(num_blocks=4) as service:
        prompt = [1] * 16
        await step(service, create(prompt), commit(ref(0), 16), free(ref(0)), pin(prompt, 200))
        replies = [r async for r in service.generation.Generate(request([3] * 33, max_tokens=1), timeout=20)]
        assert replies[-1].usage.completion_tokens == 1


async def test_a_call_that_waits_for_reserved_blocks_goes_on_when_their_time_is_over() -> None:
    async with running_service(num_blocks=4) as service:
        reply = await step(service, pb.BatchItem(reserve=pb.ReserveCommand(blocks=3, ttl_ms=200)))
        assert reply.results[0].reservation
        replies = [r async for r in service.generation.Generate(request([3] * 33, max_tokens=1), timeout=20)]
        assert replies[-1].usage.completion_tokens == 1


# --- steps ------------------------------------------------------------------------------------------------------------


def partial_block_with_two_holders() -> tuple[pb.BatchItem, ...]:
    return create([1, 2]), commit(ref(0), 2), fork(ref(0))


async def test_a_reply_with_copies_comes_when_their_step_is_completed() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        waiting = asyncio.ensure_future(step(service, append([1], [3])))
        await until(lambda: service.executor.unanswered, "the copy is on its way")
        # What has no copies does not wait, nor does who does not want to.
        assert (await step(service, append([2], [3]))).step_id == 0
        assert (await step(service, fork(2), append([2], [4]), no_wait=True)).step_id == 2
        assert not waiting.done()
        pool = await service.reads.GetPool(pb.GetPoolRequest())
        assert pool.activity.steps_in_flight == 2
        service.executor.go_on()
        assert (await waiting).step_id == 1
        assert (await service.reads.GetPool(pb.GetPoolRequest())).activity.copies_on_write == 2
        await step(service, free(1, 2, 3))


async def test_steps_are_in_the_order_of_decisions_and_calls_go_on_between() -> None:
    """A batch may be decided while a step of the loop computes, and the loop sends its next in between."""
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        call = service.generation.Generate(request(list(range(10, 50)), max_tokens=3, ignore_eos=True))
        service.executor.open = False
        await until(lambda: service.executor.unanswered, "the prompt is being computed")
        for _ in range(3):
            await step(service, fork(2), append([2], [3]), truncate(2, 2), no_wait=True)
        kinds = ["rows" if plan.batch.row.size else "copies" for plan in service.executor.plans]
        assert kinds == ["rows", "copies", "copies", "copies"]
        assert [sent.step_id for sent, _ in service.executor.unanswered] == [1, 2, 3, 4]
        service.executor.go_on()
        replies = [r async for r in call]
        assert replies[-1].usage.completion_tokens == 3
        kinds = ["rows" if plan.batch.row.size else "copies" for plan in service.executor.plans]
        assert kinds == ["rows", "copies", "copies", "copies", "rows", "rows"]
        await audit(service)
        await step(service, free(1, 2, 4, 5, 6))


async def test_the_window_of_steps_is_bounded() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        again = fork(1), append([1], [3]), truncate(1, 2)
        for _ in range(WINDOW):
            assert (await step(service, *again, no_wait=True)).step_id
        why = await refused(service, *again, no_wait=True)
        assert (why.code, why.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WINDOW_FULL")
        assert why.retry_after
        assert why.numbers == {"limit": str(WINDOW)}
        service.executor.go_on()
        reply = await step(service, *again)
        assert reply.step_id == WINDOW + 1
        listed = await service.reads.ListSequences(pb.ListSequencesRequest())
        await step(service, free(*listed.sequence))


async def test_a_wait_ends_with_the_deadline_and_the_batch_stands() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        why = await refused(service, append([1], [3]), within=0.3)
        assert (why.code, why.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STEP_NOT_COMPLETED")
        assert why.numbers == {"step_id": "1"}
        listed = await service.reads.ListSequences(pb.ListSequencesRequest())
        assert list(listed.tokens) == [3, 2]
        service.executor.go_on()
        await step(service, free(1, 2))


async def test_a_result_with_tokens_for_a_step_of_copies_is_distrusted() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        waiting = asyncio.ensure_future(refused(service, append([1], [3])))
        await until(lambda: service.executor.unanswered, "the copy is on its way")
        outputs = service.executor._compute(service.executor.plans[0])
        outputs.token_ids = np.zeros(1, np.int32)
        service.manager.take_result(service.executor, 1, outputs, 0)
        assert service.manager.model is None
        service.executor.unanswered.clear()
        service.executor.attach()
        assert (await waiting).reason == "POOL_RESET"


async def test_an_atomic_batch_is_all_or_nothing() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        before = await service.reads.GetPool(pb.GetPoolRequest())
        items = create([5] * 20), append([1], [3]), free(2), commit(1, 99)
        why = await refused(service, *items, atomic=True, request_id="a")
        assert (why.code, why.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UPTO_NOT_WRITABLE")
        assert why.numbers == {"sequence": "1", "upto": "99", "limit": "3", "failed_item": "3"}
        after = await service.reads.GetPool(pb.GetPoolRequest())
        assert (after.device, after.sharing) == (before.device, before.sharing)
        assert service.executor.plans == []
        await audit(service)

        assert (await refused(service, create([1]), pb.BatchItem(), atomic=True)).numbers == {"failed_item": "1"}
        reply = await step(service, *items[:3], atomic=True, request_id="a")
        assert reasons(reply) == ["", "", ""]
        assert of_u64(reply.results[0].sequences) == [3]
        assert reply.step_id == 1
        await audit(service)
        await step(service, free(1, 3))


# --- sent again -------------------------------------------------------------------------------------------------------


async def test_a_request_that_is_sent_again_is_not_executed_again() -> None:
    async with running_service() as service:
        first = await step(service, create([1]), free(99), request_id="a")
        again = await step(service, create([1]), free(99), request_id="a")
        assert (first.replayed, again.replayed) == (False, True)
        again.replayed = False
        assert again == first
        assert reasons(again) == ["", "SEQUENCE_NOT_FOUND"]
        listed = await service.reads.ListSequences(pb.ListSequencesRequest())
        assert list(listed.sequence) == [1]
        why = await refused(service, create([2]), free(99), request_id="a")
        assert (why.code, why.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
        assert not (await step(service, create([1]), free(99), request_id="b")).replayed
        assert not (await step(service, free(1, 2))).replayed


async def test_a_request_id_has_a_limit() -> None:
    async with running_service() as service:
        assert (await refused(service, request_id="é" * 65)).reason == "REQUEST_ID_TOO_LONG"
        await step(service, request_id="é" * 64)


async def test_a_request_that_is_sent_again_waits_with_the_first() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        assert (await refused(service, append([1], [3]), within=0.3, request_id="a")).reason == "STEP_NOT_COMPLETED"
        waiting = asyncio.ensure_future(step(service, append([1], [3]), request_id="a"))
        assert (await refused(service, append([1], [3]), within=0.3, request_id="a")).reason == "STEP_NOT_COMPLETED"
        assert not waiting.done()
        service.executor.go_on()
        assert (await waiting).replayed
        assert (await step(service, append([1], [3]), request_id="a")).step_id == 1
        assert len(service.executor.plans) == 1
        await step(service, free(1, 2))


async def test_a_refused_call_is_not_kept_and_a_reset_forgets() -> None:
    async with running_service() as service:
        service.executor.detach()
        assert (await refused(service, create([1]), request_id="a")).reason == "EXECUTOR_UNAVAILABLE"
        service.executor.attach()
        assert not (await step(service, create([1]), request_id="a")).replayed
        assert (await step(service, create([1]), request_id="a")).replayed
        service.executor.detach()
        service.executor.attach()
        anew = await step(service, create([1]), request_id="a")
        assert not anew.replayed
        await step(service, free(*of_u64(anew.results[0].sequences)))


# --- the executor comes and goes --------------------------------------------------------------------------------------


async def test_without_an_executor_and_while_draining_there_is_no_batch() -> None:
    async with running_service(attached=False) as service:
        why = await refused(service, create([1]))
        assert (why.code, why.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        assert why.retry_after
    async with running_service() as service:
        service.executor.detach()
        assert (await refused(service, create([1]))).reason == "EXECUTOR_UNAVAILABLE"
        service.executor.attach()
        service.manager.draining = True
        assert (await refused(service, create([1]))).reason == "DRAINING"


async def test_a_wait_ends_when_the_service_does() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        waiting = asyncio.ensure_future(refused(service, append([1], [3])))
        await until(lambda: service.executor.unanswered, "the copy is on its way")
        await service.server.drain(0.1)
        why = await waiting
        assert (why.code, why.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        service.executor.unanswered.clear()
        service.manager.draining = False
        service.executor.attach()  # what is left is looked at as after every test


async def test_a_wait_outlives_its_executor_for_the_grace_only() -> None:
    async with running_service(limits=LIMITS) as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        waiting = asyncio.ensure_future(refused(service, append([1], [3])))
        await until(lambda: service.executor.unanswered, "the copy is on its way")
        service.executor.detach()
        why = await waiting
        assert (why.code, why.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        assert "stands" in why.message
        service.executor.unanswered.clear()
        service.executor.attach()


async def test_a_reset_takes_every_sequence_and_their_ids_never_come_again() -> None:
    async with running_service() as service:
        await step(service, *partial_block_with_two_holders())
        service.executor.open = False
        waiting = asyncio.ensure_future(refused(service, append([1], [3])))
        await until(lambda: service.executor.unanswered, "the copy is on its way")
        service.executor.detach()
        service.executor.unanswered.clear()
        service.executor.attach()
        why = await waiting
        assert (why.code, why.reason) == (grpc.StatusCode.ABORTED, "POOL_RESET")
        service.executor.open = True
        reply = await step(service, append([1], [3]), create([1]))
        assert reasons(reply) == ["SEQUENCE_NOT_FOUND", ""]
        assert of_u64(reply.results[1].sequences) == [3]
        await audit(service)
        await step(service, free(3))


async def test_a_fault_halfway_begins_the_pool_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_service() as service:
        await step(service, create([1]))

        def fail(*_: object) -> None:
            raise RuntimeError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(PageTable, "truncate", fail)
            why = await refused(service, append([1], [2]), truncate(1, 1))
        assert (why.code, why.reason) == (grpc.StatusCode.ABORTED, "BATCH_FAILED")
        service.executor.attach()
        assert reasons(await step(service, free(1))) == ["SEQUENCE_NOT_FOUND"]
        await audit(service)


# --- beside the step loop ---------------------------------------------------------------------------------------------


async def test_a_call_waits_while_an_engine_holds_the_pool_and_goes_on_when_it_gives_blocks_back() -> None:
    async with running_service(num_blocks=5) as service:
        await step(service, create([1] * 33))  # 3 of 4 blocks
        call = service.generation.Generate(request(list(range(10, 30)), max_tokens=1), timeout=20)
        first = asyncio.ensure_future(call.read())
        await until(lambda: service.manager.activity().waiting == 1, "the call waits")
        await audit(service)
        assert (await step(service, truncate(1, 32))).step_id == 0
        await first
        assert service.executor.plans[-1].samples.source.size == 1
        await step(service, free(1))
        call.cancel()


async def test_a_running_call_preempts_itself_when_an_engine_took_the_rest() -> None:
    async with running_service(num_blocks=5) as service:
        service.executor.open = False
        call = service.generation.Generate(request(list(range(10, 26)), max_tokens=20, ignore_eos=True), timeout=20)
        await until(lambda: service.executor.unanswered, "the prompt is being computed")
        await step(service, create([1] * 48))  # the other three blocks
        service.executor.go_on()
        await until(lambda: service.manager.activity().preemptions == 1, "the call gave its block back")
        await audit(service)
        assert service.manager.activity().waiting == 1
        await step(service, free(2))
        replies = [r async for r in call]
        assert replies[-1].usage.completion_tokens == 20
        assert OpKind.COPY not in [kind for plan in service.executor.plans for kind in plan.ops.kind.tolist()]
