"""The running service: one page table and step loop, one op stream, the executor at its other end.

Everything happens in one event loop and one call at a time: the core has a single writer and needs no lock.

    gateways ── submit / cancel ──► StepLoop ── plan ──► OpStream ── send ──► Link ──► executor
             ◄── rows of tokens ──         ◄── complete ──        ◄── result ──
    engines  ── batch ──► PageTable ── block ops ──►
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import structlog

from block_manager_svc.core import PageTable
from block_manager_svc.core.batch import Executed, execute
from block_manager_svc.core.commands import Command, Pin, Reserve
from block_manager_svc.core.errors import (
    Aborted,
    AlreadyExists,
    Draining,
    ExecutorUnavailable,
    InvalidArgument,
    Refused,
)
from block_manager_svc.core.eviction import EvictionName
from block_manager_svc.core.results import Moved
from block_manager_svc.core.step import I32, BlockOps, StepOutputs, StepPlan
from block_manager_svc.engine_steps import EngineSteps
from block_manager_svc.identity import Tenant
from block_manager_svc.oplog.stream import OpStream, Position, Reset, SentStep
from block_manager_svc.scheduling.loop import Capacity, StepLoop
from block_manager_svc.scheduling.request import Sampling, SequenceState, TokenRow
from block_manager_svc.text.model import TextModel
from block_manager_svc.watchers import Watchers

log = structlog.get_logger(__name__)

# A step that was lost this often in a row without a result is not tried again: its calls end.
MAX_FRUITLESS = 5
# Counters of the pool that go on when it is reset.
_LASTING = ("copies_on_write", "evicted_blocks", "swapped_out_blocks", "swapped_in_blocks")
RETRY_SOON = 1.0  # seconds; how long a restart of the other side usually takes


@dataclass(frozen=True, slots=True)
class Limits:
    token_budget: int = 2048  # tokens computed in one step
    max_running: int = 256  # samples running at once
    max_queue: int = 1024  # calls waiting
    eviction: EvictionName = "lru"  # of the prefix cache
    watermark: float = 0.01  # part of the pool that admissions leave to those who are here
    zero_between_tenants: bool = True  # what one has written is gone before another gets the block
    folding: bool = False  # equal blocks become one
    executor_grace_s: float = 30.0  # how long calls outlive their executor
    heartbeat_interval_ms: int = 1000
    silence_limit_ms: int = 10_000


@dataclass(frozen=True, slots=True)
class Quota:
    """See PageTable.set_quota; blocks, and slots of the host."""

    floor: int = 0
    quota: int | None = None
    host_floor: int = 0
    host_quota: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    id: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes = b""

    @property
    def identity(self) -> bytes:
        """What K/V and sequences belong to: models of one name may differ."""
        return self.id.encode() + b"\0" + self.fingerprint


@dataclass(frozen=True, slots=True)
class ExecutorHello:
    """What an executor says of itself when it attaches."""

    position: Position
    num_blocks: int
    num_host_blocks: int
    block_size: int
    block_bytes: int
    max_rows: int
    max_batch_tokens: int
    max_blocks_per_row: int
    model: ModelInfo
    files: Mapping[str, bytes]
    address: str


@dataclass(frozen=True, slots=True)
class Welcome:
    reset: bool
    results_durable_through: int
    resend: tuple[SentStep, ...]


@dataclass(frozen=True, slots=True)
class Activity:
    """The counters and gauges of GetPool, as block_manager.proto names them."""

    steps: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    sampled_tokens: int
    copies_on_write: int
    evicted_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    preemptions: int
    step_us: int
    executor_us: int
    running: int
    waiting: int
    steps_in_flight: int


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int


class Link(Protocol):
    """The open stream to an executor."""

    def send(self, step: SentStep, results_durable_through: int) -> None: ...

    def close(self, why: Refused) -> None: ...


@dataclass(frozen=True, slots=True)
class _Caller:
    on_rows: Callable[[list[TokenRow]], None]
    on_failed: Callable[[Refused], None]


class Manager:
    """Joins loop, stream and link. All methods are to be called in the event loop that it was made in.

    encode(plan, step_id) gives the wire form of a step; on_serving_change is called with True when an executor
    has attached and with False when it is gone.
    """

    def __init__(self, limits: Limits, encode: Callable[[StepPlan, int], bytes]) -> None:
        self.limits = limits
        self.service_id = uuid.uuid4().hex
        self.model: ModelInfo | None = None  # None: no executor is attached now
        self.text: TextModel | None = None
        self.block_bytes = 0
        self.draining = False
        self.on_serving_change: list[Callable[[bool], None]] = []
        self._encode = encode
        self._stream = OpStream(self.service_id)
        self._loop: StepLoop | None = None
        self._link: Link | None = None
        self._callers: dict[int, _Caller] = {}
        self._engine_steps = EngineSteps()
        self.watchers = Watchers()
        self._grace: asyncio.TimerHandle | None = None
        self._awake = False
        self._idle = asyncio.Event()  # no calls
        self._idle.set()
        self._began_ns = time.monotonic_ns()
        self._steps = self._step_ns = self._executor_us = 0
        self._step_began = 0
        self._fruitless = 0  # steps lost since the last result
        self._before = (0,) * len(_LASTING)  # of pools that were reset
        self._limit: int | None = None  # of the pool, as `resize` was told
        self._quotas: dict[int, Quota] = {}  # by account, as `set_quota` was told

    # --- calls ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: I32,
        sampling: Sampling,
        on_rows: Callable[[list[TokenRow]], None],
        on_failed: Callable[[Refused], None],
        tenant: Tenant,
    ) -> int:
        """Queues a call and gives its id. `on_rows` gets each step's tokens, `on_failed` ends the call instead.

        The call is known until cancel(). Raises Refused as StepLoop.submit, or EXECUTOR_UNAVAILABLE, DRAINING.
        """
        call = self._ready().submit(prompt, sampling, owner=tenant.calls, tenant=tenant.account, realm=tenant.realm)
        self._callers[call] = _Caller(on_rows, on_failed)
        self._idle.clear()
        self._wake()
        return call

    def _ready(self) -> StepLoop:
        self.served_model()
        assert self._loop is not None
        return self._loop

    def served_model(self) -> ModelInfo:
        """The model that calls get now. Raises Draining, ExecutorUnavailable."""
        if self.draining:
            raise Draining
        if self.model is None:
            raise ExecutorUnavailable("no executor is attached: start one, or try again")
        return self.model

    def stop_sample(self, call: int, sample: int) -> None:
        """Ends one sample now; nothing happens when it has ended."""
        if self._loop is not None:
            self._loop.stop_sample(call, sample)

    def usage(self, call: int) -> Usage:
        """Of a call that is known. Raises KeyError else."""
        assert self._loop is not None
        known = self._loop.call(call)
        return Usage(len(known.prompt), max(0, known.cached_tokens), known.completion_tokens, known.preemptions)

    def cancel(self, call: int) -> None:
        """Ends a call and forgets it; its blocks are free for the next step. Idempotent."""
        if self._callers.pop(call, None) is None or self._loop is None:
            return
        log.info("call ended", call=call, finished=self._loop.call(call).finished, **asdict(self.usage(call)))
        self._loop.cancel(call)
        self._wake()  # what waited for its blocks may go on
        if not self._callers:
            self._idle.set()

    def _fail(self, call: int, why: Refused) -> None:
        if caller := self._callers.get(call):
            self.cancel(call)
            caller.on_failed(why)

    async def drain(self, grace: float) -> None:
        """Takes no more calls; lets the running ones finish for `grace` seconds, then fails them."""
        self.draining = True
        self._tell(False)
        log.info("draining", calls=len(self._callers), grace_s=grace)
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            for call in list(self._callers):
                self._fail(call, Draining(f"not finished within the {grace} s of grace: call another instance"))
        self._engine_steps.give_up(
            Draining("this service is about to stop, and every sequence with it: make them anew elsewhere"),
            forget=False,
        )
        self.watchers.end(Draining())
        if self._link is not None:
            self._link.close(Draining("this service is about to stop: attach again after a pause"))

    # --- batches of engines -------------------------------------------------------------------------------------------

    def execute(self, commands: Sequence[Command | Refused], *, tenant: Tenant, atomic: bool) -> tuple[Executed, int]:
        """Executes a batch of the tenant's engine, see core.batch; and the step that carries its ops, 0 if it has none.

        Raises EXECUTOR_UNAVAILABLE, DRAINING, WINDOW_FULL; if atomic, what one of the commands is refused with; and
        BATCH_FAILED, after which the pool begins anew.
        """
        loop, link = self._ready(), self._link
        assert link is not None
        self._engine_steps.check_room()
        table = loop.table
        try:
            executed = execute(table, commands, owner=tenant.engines, tenant=tenant.account, atomic=atomic)
        except Refused:
            raise
        except Exception as fault:
            raise self._lose_batch(link, fault) from fault
        step_id = self._send_ops(executed.ops, link)
        if loop.waiting:
            self._wake()  # a call may wait for these blocks
        for command in commands:
            if isinstance(command, Pin | Reserve):
                asyncio.get_running_loop().call_later((command.until - table.now) / 1000, self._end_terms)
        return executed, step_id

    def _send_ops(self, ops: BlockOps, link: Link) -> int:
        """The step that carries them, 0 if there are none."""
        if not ops.kind.size:
            return 0
        step_id = self._send(StepPlan(ops=ops), link)
        self._engine_steps.sent(step_id)
        return step_id

    def _lose_batch(self, link: Link, fault: Exception) -> Aborted:
        """Half of it is executed: the pool begins anew. Returns what the caller is told."""
        log.error("a batch was executed halfway", exc_info=fault)
        why = Aborted("BATCH_FAILED", "a fault of the service, its log says why: every sequence is gone")
        self.distrust(link, why)
        return why

    async def wait_completed(self, step_id: int, seconds: float | None) -> None:
        """Until a step that `execute` gave is completed. Raises STEP_NOT_COMPLETED, POOL_RESET, EXECUTOR_UNAVAILABLE.

        To be called before anything else is awaited, so that the step is still of this epoch.
        """
        await self._engine_steps.wait(step_id, seconds)

    def now(self) -> int:
        """The page table's clock, ms, brought up to this moment. Raises EXECUTOR_UNAVAILABLE, DRAINING."""
        self._ready()
        return self._advance()

    def _advance(self) -> int:
        assert self._loop is not None
        now = (time.monotonic_ns() - self._began_ns) // 1_000_000
        self._loop.table.advance(now)
        return now

    def _end_terms(self) -> None:
        self._advance()
        self._wake()  # a call may wait for these blocks

    # --- steps ------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Sends the next step, if there is one to send and somebody to send it to."""
        self._awake = False
        if self._loop is None or self._link is None:
            return
        began = time.perf_counter_ns()
        try:
            self._advance()
            plan = self._loop.plan()
        except Exception as fault:
            log.error("a step could not be planned", exc_info=fault)
            self._lose_plan(self._link)
            return
        if plan is None:
            return
        self._step_began = began
        self._send(plan, self._link)

    def _send(self, plan: StepPlan, link: Link) -> int:
        """Puts a decided step into the stream, at once, so that the order of steps is that of decisions."""
        step = self._stream.push(self._encode(plan, self._stream.last_step + 1))
        link.send(step, self._stream.results_durable_through)
        return step.step_id

    def take_result(self, link: Link, step_id: int, outputs: StepOutputs, executor_us: int) -> None:
        """A result from the executor. A result that came before is ignored; one that can't be ends the link."""
        if link is not self._link or self._loop is None:
            return
        try:
            if not self._stream.is_news(step_id):
                return
            of_engine = step_id in self._engine_steps
            if of_engine:
                _check_empty(outputs)
            else:
                self._loop.check_outputs(outputs)
        except ValueError as error:
            self.distrust(link, InvalidArgument("RESULT_INVALID", f"step {step_id}: {error}", step_id=step_id))
            return
        self._stream.record()
        if of_engine:
            self._engine_steps.completed(step_id)
            return
        try:
            news = self._loop.complete(outputs)
        except Exception as fault:
            log.error("a result was lost", step_id=step_id, exc_info=fault)
            self._lose_result(link, step_id)
            return
        began = self._step_began
        self._steps += 1
        self._fruitless = 0
        # By its own clock; no more than there was.
        self._executor_us += min(executor_us, (time.perf_counter_ns() - began) // 1000)
        self._pump()  # the executor computes while the tokens are handed out
        for call, rows in news.rows.items():
            if caller := self._callers.get(call):
                caller.on_rows(rows)
        for call, why in news.failed.items():
            self._fail(call, why)
        self._step_ns += time.perf_counter_ns() - began

    def _lose_plan(self, link: Link) -> None:
        """Half of a step is decided, and which call the fault is about is not known: all end, the pool begins anew."""
        self.distrust(link, Aborted("PLAN_FAILED", "a fault of the service: the next step could not be planned"))
        for call in list(self._callers):
            self._fail(call, Aborted("PLAN_FAILED", "a fault of the service, its log says why: call again"))

    def _lose_result(self, link: Link, step_id: int) -> None:
        """Half of a result is taken. Its calls cannot be told their tokens; the others compute again from theirs."""
        assert self._loop is not None
        calls = self._loop.calls_in_flight()
        self.distrust(link, Aborted("RESULT_LOST", f"taking the result of step {step_id} failed", step_id=step_id))
        for call in calls:
            self._fail(
                call,
                Aborted(
                    "RESULT_LOST",
                    f"a fault of the service lost the tokens of step {step_id}, its log says why: call again",
                    step_id=step_id,
                ),
            )

    # --- the executor -------------------------------------------------------------------------------------------------

    def attach(self, hello: ExecutorHello, link: Link) -> Welcome:
        """Takes an executor in, to go on or to begin anew as docs/protocol.md decides. Raises Refused."""
        if self.draining and not self._callers:
            raise Draining("this service is about to stop: attach again after a pause")
        position = hello.position
        if self._link is not None:
            if position.boot_id != self._stream.boot_id:
                raise AlreadyExists(
                    "EXECUTOR_PRESENT",
                    f"executor {self._stream.boot_id} is attached and alive: stop it first",
                    retry_after=RETRY_SOON,
                    boot_id=self._stream.boot_id,
                )
            self._link.close(Aborted("ATTACH_REPLACED", "a newer stream of the same boot took over"))
            self.detach(self._link)
        decision = self._stream.reconcile(position)
        if isinstance(decision, Reset):
            text = TextModel.from_files(hello.files, hello.model.vocab_size)
            self._stream.reset(position.boot_id, above_epoch=position.epoch)
            self._restart(hello)
            self.text = text
            welcome = Welcome(True, 0, ())
            log.info("executor attached, pool reset", why=decision.reason, **_describe(hello))
        else:
            welcome = Welcome(False, self._stream.results_durable_through, decision.resend)
            log.info("executor attached, goes on", resend=len(decision.resend), **_describe(hello))
        self._link = link
        self.model = replace(hello.model, max_context=self._capacity(hello).max_context)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self._tell(not self.draining)
        self._wake()
        return welcome

    def _capacity(self, hello: ExecutorHello) -> Capacity:
        token_budget = min(self.limits.token_budget, hello.max_batch_tokens)
        return Capacity(
            max_context=min(hello.model.max_context, hello.max_blocks_per_row * hello.block_size),
            max_rows=min(self.limits.max_running, hello.max_rows, token_budget),
            token_budget=token_budget,
            max_waiting=self.limits.max_queue,
            vocab_size=hello.model.vocab_size,
        )

    def _restart(self, hello: ExecutorHello) -> None:
        """A new page table for an empty pool; the sequences of the old one recompute in it."""
        first = 1 if self._loop is None else self._loop.table.next_sequence
        table = PageTable(
            hello.num_blocks,
            hello.block_size,
            num_host=hello.num_host_blocks,
            first_sequence=first,
            eviction=self.limits.eviction,
            watermark=int(self.limits.watermark * (hello.num_blocks - 1)),
            zero_crossing=self.limits.zero_between_tenants,
            folding=self.limits.folding,
        )
        if self._limit is not None:
            table.resize(min(self._limit, table.limit))
        self._set_quotas(table)
        namespace = hello.model.identity
        self.block_bytes = hello.block_bytes
        if self._loop is None:
            self._loop = StepLoop(table, self._capacity(hello), namespace)
            return
        self._engine_steps.give_up(
            Aborted("POOL_RESET", "the pool was reset: every sequence is gone, make them anew"), forget=True
        )
        self.watchers.reset()
        self._give_up_on_fruitless_steps()
        old = self._loop.table.counters
        self._before = tuple(before + getattr(old, name) for before, name in zip(self._before, _LASTING, strict=True))
        for call, why in self._loop.reset(table, self._capacity(hello), namespace).items():
            self._fail(call, why)

    def _set_quotas(self, table: PageTable) -> None:
        """What tenants are guaranteed of a new pool: all that they were told, or nothing if it is too small for it."""
        try:
            for account, quota in self._quotas.items():
                table.set_quota(account, **asdict(quota))
        except Refused as refusal:
            log.warning("the pool is too small for all floors: nobody has one", why=refusal.message)
            for account, quota in self._quotas.items():
                table.set_quota(account, quota=quota.quota, host_quota=quota.host_quota)

    def _give_up_on_fruitless_steps(self) -> None:
        """Ends the calls of a step that executors refuse or die of, again and again: the others can go on.

        All calls of the last of these steps, since which of them is the cause is not known.
        """
        assert self._loop is not None
        suspects = sorted(self._loop.calls_in_flight())
        if not suspects:
            return
        self._fruitless += 1
        if self._fruitless < MAX_FRUITLESS:
            return
        self._fruitless = 0
        log.error("gave up on a step", calls=suspects, tries=MAX_FRUITLESS)
        for call in suspects:
            why = f"{MAX_FRUITLESS} times in a row an executor refused or died of a step with this call: see its log"
            self._fail(call, Aborted("STEP_FAILED", why, tries=MAX_FRUITLESS))

    def detach(self, link: Link) -> None:
        """The link is closed. Calls wait for an executor to come, for a while."""
        if link is not self._link:
            return
        self._link = None
        self.model = None
        self._tell(False)
        if self._callers and not self.draining:
            grace = self.limits.executor_grace_s
            log.warning("executor is gone", boot_id=self._stream.boot_id, calls=len(self._callers), grace_s=grace)
        else:
            log.info("executor is gone", boot_id=self._stream.boot_id)
        self._grace = asyncio.get_running_loop().call_later(self.limits.executor_grace_s, self._give_up)

    def _give_up(self) -> None:
        self._grace = None
        why = f"no executor came back within {self.limits.executor_grace_s} s: try again"
        for call in list(self._callers):
            self._fail(call, ExecutorUnavailable(why))
        self._engine_steps.give_up(ExecutorUnavailable(f"the batch stands, but {why}"), forget=False)

    def distrust(self, link: Link, why: Refused) -> None:
        """The two sides disagree on a step: say so, close, and begin anew when the executor attaches again."""
        log.error("the executor and the service disagree", reason=why.reason, message=why.message, **why.numbers)
        self._stream.forget_boot()
        link.close(why)
        self.detach(link)

    def _tell(self, serving: bool) -> None:
        for listener in self.on_serving_change:
            listener(serving)

    # --- reads --------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._stream.epoch

    @property
    def results_durable_through(self) -> int:
        return self._stream.results_durable_through

    @property
    def page_table(self) -> PageTable | None:
        """That of the executor attached last; None before the first."""
        return None if self._loop is None else self._loop.table

    def audit(self) -> list[str]:
        """Every invariant of the page table and its queues; raises AssertionError before the first executor."""
        assert self._loop is not None
        return self._loop.table.check() + self._loop.check()

    def reset_cache(self) -> int:
        """Returns how many cached blocks became free; raises AssertionError before the first executor."""
        assert self._loop is not None
        freed = self._loop.table.reset_cache()
        log.info("prefix cache reset", freed_blocks=freed, revision=self._loop.table.revision)
        return freed

    def resize(self, limit: int) -> int:
        """At most `limit` blocks of this and later pools are in use from now on. Returns how many were evicted for it.

        Raises as PageTable.resize does, AssertionError before the first executor. Calls that can't fit any more end.
        """
        assert self._loop is not None
        evicted = self._loop.table.resize(limit)
        self._limit = limit
        log.info("pool resized", limit=limit, evicted_blocks=evicted)
        for call, why in self._loop.lost_to_limit().items():
            self._fail(call, why)
        self._wake()  # more may fit
        return evicted

    def set_quota(self, tenant: Tenant, quota: Quota) -> None:
        """Of this and later pools. Raises as PageTable.set_quota does, AssertionError before the first executor."""
        assert self._loop is not None
        self._loop.table.set_quota(tenant.account, **asdict(quota))
        self._quotas[tenant.account] = quota
        log.info("quota set", tenant=tenant.name, **asdict(quota))
        for call, why in self._loop.lost_to_limit().items():
            self._fail(call, why)
        self._wake()  # more may fit

    def compact(self, most: int) -> tuple[Moved, int]:
        """Moves at most `most` blocks of calls; and the step that carries the copies, 0 if there are none.

        Raises EXECUTOR_UNAVAILABLE, DRAINING, WINDOW_FULL; and BATCH_FAILED, after which the pool begins anew.
        """
        loop, link = self._ready(), self._link
        assert link is not None
        self._engine_steps.check_room()
        try:
            moved = loop.compact(most)
        except Exception as fault:
            raise self._lose_batch(link, fault) from fault
        return moved, self._send_ops(moved.ops, link)

    def namespace(self, realm: bytes) -> bytes:
        """Of the prefixes of a realm's calls; raises AssertionError before the first executor."""
        assert self._loop is not None
        return self._loop.namespace(realm)

    def sequence_states(self) -> dict[int, SequenceState]:
        return {} if self._loop is None else self._loop.sequence_states()

    def activity(self) -> Activity:
        """Raises AssertionError before the first executor."""
        assert self._loop is not None
        counters, pool = self._loop.counters, self._loop.table.counters
        return Activity(
            steps=self._steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            sampled_tokens=counters.sampled_tokens,
            **{name: before + getattr(pool, name) for before, name in zip(self._before, _LASTING, strict=True)},
            preemptions=counters.preemptions,
            step_us=self._step_ns // 1000,
            executor_us=self._executor_us,
            running=self._loop.running,
            waiting=self._loop.waiting,
            steps_in_flight=self._stream.in_flight,
        )


def _check_empty(outputs: StepOutputs) -> None:
    """Raises ValueError unless these can be the outputs of a step that computes nothing."""
    if sampled := len(outputs.token_ids):
        raise ValueError(f"{sampled} tokens of a step that samples none")


def _describe(hello: ExecutorHello) -> dict[str, object]:
    return {
        "boot_id": hello.position.boot_id,
        "model": hello.model.id,
        "blocks": hello.num_blocks,
        "block_size": hello.block_size,
        "address": hello.address,
    }
