"""Results that an executor sends, right and wrong, and the time that it says it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest
import structlog
from rpc_link_calls import NEW, PROMPT, Code, expected, finished, generate, goes_on, refused_call
from rpc_link_client import LinkExecutor
from rpc_scripted import VOCAB, running_service, until

from block_manager_svc.core import PageTable
from pagedkv.v1 import block_manager_pb2
from pagedkv.v1 import executor_link_pb2 as pb


def _i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def _set(**columns: object) -> Callable[[pb.StepResult], None]:
    def change(result: pb.StepResult) -> None:
        for name, value in columns.items():
            setattr(result, name, value(getattr(result, name)) if callable(value) else value)

    return change


WRONG_RESULTS: dict[str, Callable[[pb.StepResult], None]] = {
    "no token": _set(token_ids=b""),
    "a token too many": _set(token_ids=lambda ids: ids + _i32(1)),
    "no log-probability": _set(logprob=b""),
    "an alternative too few": _set(top_token_ids=lambda ids: ids[4:], top_logprobs=lambda values: values[4:]),
    "alternatives without log-probabilities": _set(top_logprobs=b""),
    "token -3": _set(token_ids=_i32(-3)),
    "token beyond the vocabulary": _set(token_ids=_i32(VOCAB)),
    "alternative -1": _set(top_token_ids=_i32(-1, 0)),
    "alternative beyond the vocabulary": _set(top_token_ids=_i32(0, VOCAB)),
    "a column of 3 bytes": _set(token_ids=b"abc"),
    "a log-probability of 3 bytes": _set(logprob=b"abc"),
    "another rank": _set(rank=1),
    "ahead of its turn": _set(step_id=lambda step_id: step_id + 1),
}


@pytest.mark.parametrize("spoil", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
async def test_a_result_that_cannot_be_ends_the_stream_resets_and_calls_go_on(
    spoil: Callable[[pb.StepResult], None],
) -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service, logprobs=2)
        for _ in range(3):
            await stream.answer()
        result = executor.execute(await stream.step())
        spoil(result)
        await stream.send(result=result)
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "RESULT_INVALID")
        assert refusal.numbers == {"step_id": str(result.step_id)}
        await goes_on(service, executor, call)


async def test_a_result_when_nothing_was_asked_ends_the_stream() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        await stream.send(result=pb.StepResult(step_id=1))
        assert (await stream.refusal()).reason == "RESULT_INVALID"
        assert (await executor.attach()).welcome.reset


async def test_logits_that_are_not_finite_end_their_call_alone() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        doomed = generate(service, seed=1, n=2)
        step = await stream.step()
        other = generate(service, seed=2)
        await until(lambda: service.manager.activity().waiting == 1, "the other call waits")
        await stream.send(result=executor.execute(step))
        step = await stream.step()
        seeds = np.frombuffer(pb.StepBody.FromString(step.body).seed, "<u8").tolist()
        assert sorted(seeds) == [1, 1, 2]
        result = executor.execute(step)
        tokens = np.frombuffer(result.token_ids, "<i4").copy()
        tokens[seeds.index(1)] = -1
        result.token_ids = tokens.tobytes()
        await stream.send(result=result)
        async with stream.serving():
            refusal = await refused_call(doomed)
            assert (refusal.code, refusal.reason) == (Code.ABORTED, "LOGITS_NOT_FINITE")
            assert refusal.numbers == {"position": str(len(PROMPT) + 1)}
            assert await finished(other) == expected(seed=2)
            assert service.manager.epoch == stream.epoch


async def test_a_fault_in_taking_a_result_ends_the_calls_of_its_step_and_resets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append, faults = PageTable.append, [ZeroDivisionError("in the middle of it")]

    def failing(self: PageTable, sequences: object, tokens: object) -> None:
        if len(sequences) and faults:  # type: ignore[arg-type]
            raise faults.pop()
        append(self, sequences, tokens)  # type: ignore[arg-type]

    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        step = await stream.step()
        waiting = generate(service, PROMPT[::-1])
        await until(lambda: service.manager.activity().waiting == 1, "the other call waits")
        monkeypatch.setattr(PageTable, "append", failing)
        with structlog.testing.capture_logs() as logs:
            await stream.send(result=executor.execute(step))
            refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "RESULT_LOST")
        assert any(isinstance(entry.get("exc_info"), ZeroDivisionError) for entry in logs)
        refusal = await refused_call(call)
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "RESULT_LOST")
        again = await executor.attach()
        assert again.welcome.reset
        async with again.serving():
            assert await finished(waiting) == expected(PROMPT[::-1])


async def test_a_fault_in_planning_ends_all_calls_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    extend, faults = PageTable.extend, [ZeroDivisionError("in the middle of it")]

    def failing(self: PageTable, sequences: object, upto: object) -> object:
        if faults:
            raise faults.pop()
        return extend(self, sequences, upto)  # type: ignore[arg-type]

    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        running, waiting = generate(service), generate(service, PROMPT[::-1])
        await until(lambda: service.manager.activity().steps_in_flight == 1, "a step is in flight")
        step = await stream.step()
        monkeypatch.setattr(PageTable, "extend", failing)
        with structlog.testing.capture_logs() as logs:
            await stream.send(result=executor.execute(step))
            refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "PLAN_FAILED")
        assert any(isinstance(entry.get("exc_info"), ZeroDivisionError) for entry in logs)
        for call in (running, waiting):
            refusal = await refused_call(call)
            assert (refusal.code, refusal.reason) == (Code.ABORTED, "PLAN_FAILED")
        again = await executor.attach()
        assert again.welcome.reset
        async with again.serving():
            assert await finished(generate(service)) == expected()
        assert service.manager.audit() == []


async def test_a_step_takes_no_less_than_the_executor_spent_of_it() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        spent = 0
        for _ in range(NEW):
            step = await stream.step()
            began = time.perf_counter_ns()
            result = executor.execute(step)
            await asyncio.sleep(0.003)  # the executor takes its time
            result.ops_us, result.compute_us = 500, (time.perf_counter_ns() - began) // 1000 - 500
            spent += result.ops_us + result.compute_us
            await stream.send(result=result)
        await finished(call)
        activity = (await service.reads.GetPool(block_manager_pb2.GetPoolRequest())).activity
        assert (activity.steps, activity.executor_us) == (NEW, spent)
        assert activity.step_us >= spent


async def test_an_executor_that_claims_more_time_than_there_was_is_not_believed() -> None:
    async with running_service(attached=False) as service:
        executor = LinkExecutor(service)
        stream = await executor.attach()
        call = generate(service)
        for _ in range(NEW):
            result = executor.execute(await stream.step())
            result.compute_us = (1 << 64) - 1
            await stream.send(result=result)
        await finished(call)
        activity = (await service.reads.GetPool(block_manager_pb2.GetPoolRequest())).activity
        assert 0 < activity.executor_us <= activity.step_us
