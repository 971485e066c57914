"""The step loop: continuous batching over the page table, with chunked prefill under a token budget.

One step at a time, for one executor:

    submit ─► waiting ─admit─► running ─┐
                 ▲                      │  plan()      what to compute, which blocks move
                 └──── preempt ─────────┤  (executor computes)
                                        │  complete()  tokens in, blocks sealed, the finished freed
                                        └► finished

Running samples are served oldest first: decodes (Sarathi-Serve, OSDI'24, section 4: they cost one token each),
then prefill chunks with what is left of the budget, then new admissions in order of arrival. When blocks run
out, the youngest running sample gives its blocks back and recomputes later (vLLM, SOSP'23, section 4.5).

Pure: no I/O, no clock, no randomness, no threads.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass

import numpy as np

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import Aborted, FailedPrecondition, InvalidArgument, Refused, ResourceExhausted
from block_manager_svc.core.results import Moved
from block_manager_svc.core.step import I32, I64, Batch, StepOutputs, StepPlan, TableDeltas
from block_manager_svc.scheduling.columns import join, keep, share, without_idle
from block_manager_svc.scheduling.flight import NO_TOKEN, InFlight, Picked
from block_manager_svc.scheduling.request import Call, FinishReason, Sample, Sampling, SequenceState, TokenRow
from block_manager_svc.scheduling.rows import Rows


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one step and one sequence may be at most."""

    max_context: int  # tokens of one sequence, prompt and completion
    max_rows: int  # rows running at once
    token_budget: int  # tokens computed in one step; at least max_rows, so that every decode has its turn
    max_waiting: int  # calls waiting
    vocab_size: int  # tokens that an executor can answer with lie below


@dataclass(slots=True)
class LoopCounters:
    """Since the loop began; survives resets of the pool."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StepNews:
    """What a step brought, by call: new tokens, or why the call has ended without."""

    rows: dict[int, list[TokenRow]]
    failed: dict[int, Refused]


class StepLoop:
    """Decides each step. Calls are known by the ids that submit() gives."""

    def __init__(self, table: PageTable, capacity: Capacity, namespace: bytes = b"") -> None:
        self.counters = LoopCounters()
        self._calls: dict[int, Call] = {}
        self._last_call = 0
        self._waiting: list[Sample] = []  # by arrival
        self._running: list[Sample] = []  # by arrival
        self._begin(table, capacity, namespace)

    def _begin(self, table: PageTable, capacity: Capacity, namespace: bytes) -> None:
        self.table = table
        self.capacity = capacity
        self._namespace = namespace
        self._rows = Rows(capacity.max_rows)
        self._in_flight: InFlight | None = None
        self._running_rows: I32 | None = None  # rows of _running, until it changes

    # --- calls in -----------------------------------------------------------------------------------------------

    def longest(self, tenant: int = 0) -> int:
        """Tokens of a tenant's longest sequence that can ever be here, prompt and completion.

        The last token of a sequence needs no slot: nothing attends to it.
        """
        return min(self.capacity.max_context, self.table.most(tenant) * self.table.block_size + 1)

    def namespace(self, realm: bytes) -> bytes:
        """Of the prefixes of calls with this realm."""
        return realm + self._namespace

    def submit(self, prompt: I32, sampling: Sampling, *, owner: int = 0, tenant: int = 0, realm: bytes = b"") -> int:
        """Takes a call into the queue.

        tenant: who is charged for its blocks, in the page table.
        owner: of its sequences, in the page table; at least 0, which tells the loop's from those of others.
        realm: calls find the cached prefixes of calls with the same one.

        Raises InvalidArgument (PROMPT_TOO_LONG, PARAMETER_OUT_OF_RANGE) or ResourceExhausted (PROMPT_EXCEEDS_POOL,
        QUEUE_FULL); nothing has changed then.
        """
        max_tokens = self._check_fits(len(prompt), sampling, tenant)
        waiting = len(self._waiting)
        if waiting >= self.capacity.max_waiting:
            raise ResourceExhausted(
                "QUEUE_FULL",
                f"{waiting} calls wait already, the limit is {self.capacity.max_waiting}: try again in a second",
                retry_after=1.0,
                waiting=waiting,
                limit=self.capacity.max_waiting,
            )
        call = Call(
            self._last_call + 1, prompt, sampling, owner=owner, tenant=tenant, realm=realm, max_tokens=max_tokens
        )
        lead = call.samples[0]
        lead.sequence = self.table.create(call.prompt, self.namespace(realm), owner=owner, tenant=tenant)
        self._last_call = call.id
        self._calls[call.id] = call
        self._waiting.append(lead)
        self.counters.prompt_tokens += len(prompt)
        return call.id

    def _check_fits(self, prompt: int, sampling: Sampling, tenant: int, known: int = 1) -> int:
        """Tokens that can be generated, `known` at least: those that were, or one. Raises as submit does."""
        if sampling.n > self.capacity.max_rows:
            raise InvalidArgument(
                "PARAMETER_OUT_OF_RANGE",
                f"n = {sampling.n}, but at most {self.capacity.max_rows} samples run at once here: ask for fewer",
                field="sampling.n",
                value=sampling.n,
                maximum=self.capacity.max_rows,
            )
        max_tokens = sampling.max_tokens or max(known, self.longest(tenant) - prompt)
        whole, context = prompt + max_tokens, self.capacity.max_context
        if whole > context:
            raise InvalidArgument(
                "PROMPT_TOO_LONG",
                f"{prompt} prompt tokens and {max_tokens} to generate are {whole}, the model's context is {context}: "
                "shorten the prompt or lower max_tokens",
                prompt_tokens=prompt,
                max_tokens=max_tokens,
                max_context=context,
            )
        if whole > self.longest(tenant):
            usable = self.table.most(tenant)
            needed = -(-(whole - 1) // self.table.block_size)
            raise ResourceExhausted(
                "PROMPT_EXCEEDS_POOL",
                f"{prompt} prompt tokens and {max_tokens} to generate need {needed} blocks, "
                f"the pool has {usable}: it can never fit, shorten it, lower max_tokens or grow the pool",
                prompt_tokens=prompt,
                max_tokens=max_tokens,
                needed_blocks=needed,
                pool_blocks=usable,
                block_size=self.table.block_size,
            )
        return max_tokens

    def call(self, call: int) -> Call:
        return self._calls[call]

    def stop_sample(self, call: int, index: int) -> None:
        """Ends one sample now, on the caller's own judgement. Does nothing when it has ended."""
        if call in self._calls:
            self._end(self._calls[call].samples[index])

    def cancel(self, call: int) -> None:
        """Ends a call now and forgets it: its blocks are free for the next step. Does nothing when it is unknown.

        A step that is being computed may still write to them; whatever takes them next comes later in the stream.
        """
        if (gone := self._calls.pop(call, None)) is not None:
            for sample in gone.samples:
                self._end(sample)

    # --- a step out -----------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute or a step is in flight."""
        if self._in_flight is not None or not (self._running or self._waiting):
            return None
        rows, chunk, preempted = self._serve_running()
        if self._waiting and not preempted:
            rows, chunk = self._admit(rows, chunk)
        if not len(rows):
            return None
        return self._build(rows, chunk)

    def _rows_of_running(self) -> I32:
        if self._running_rows is None:
            self._running_rows = np.fromiter((sample.row for sample in self._running), np.int32, len(self._running))
        return self._running_rows

    def _serve_running(self) -> tuple[I32, I32, bool]:
        """Rows of running samples with the tokens that each computes; frees blocks by preemption until they fit."""
        preempted = False
        while True:
            rows = self._rows_of_running()
            sequences = self._rows.sequence[rows]
            chunk = self.table.length(sequences) - self.table.computed(sequences)
            chunk = share(chunk, self.capacity.token_budget)
            rows, sequences, chunk = without_idle(rows, sequences, chunk)
            upto = self.table.computed(sequences) + chunk
            crowd = self.table.crowded(sequences, upto)
            if not crowd:
                return rows, chunk, preempted
            self._preempt(next(sample for sample in reversed(self._running) if sample.call.tenant in crowd))
            preempted = True

    def _preempt(self, sample: Sample) -> None:
        self._send_back(sample)
        sample.call.preemptions += 1
        self.counters.preemptions += 1

    def _admit(self, rows: I32, chunk: I32) -> tuple[I32, I32]:
        """Lets waiting samples in, in order of arrival, while rows, budget and blocks last.

        Blocks are counted for all tokens that the running know, not only for this step's chunks, and one more for
        each of them, so that an admission does not force a preemption right away; and the table's watermark, unless
        nothing runs. A pool that is the loop's alone has room for any sample then; one that engines hold blocks of may
        have none, until they give some back. Who finds no blocks holds up its own tenant's samples only.
        """
        budget = self.capacity.token_budget - int(chunk.sum())
        places = self.capacity.max_rows - sum(sample.width for sample in self._running)
        promised = self._promised()
        blocked: set[int] = set()
        admitted: list[tuple[Sample, int, int]] = []  # with the tokens that it found, and those that it computes
        for sample in list(self._waiting):
            if budget <= 0 or sample.width > places:
                break
            tenant = sample.call.tenant
            if tenant in blocked:
                continue
            length = int(self.table.length(_one(sample.sequence))[0])
            cached = self._let_in(sample, promised, length)
            if cached is None:
                blocked.add(tenant)
                continue
            admitted.append((sample, cached, min(length - cached, budget)))
            places -= sample.width
            budget -= admitted[-1][-1]
        while admitted and self.table.crowded(*self._demand(rows, chunk, admitted)):
            self._send_back(admitted.pop()[0])
        for sample, cached, _ in admitted:
            if sample.call.cached_tokens < 0:
                sample.call.cached_tokens = cached
                self.counters.cached_tokens += cached
        return (
            np.concatenate([rows, np.array([sample.row for sample, _, _ in admitted], np.int32)]),
            np.concatenate([chunk, np.array([tokens for _, _, tokens in admitted], np.int32)]),
        )

    def _promised(self) -> Counter[int]:
        """By tenant, the blocks that are left to the running."""
        sequences = self._rows.sequence[self._rows_of_running()]
        needed = self.table.blocks_needed(sequences, self.table.length(sequences)) + 1
        promised: Counter[int] = Counter()
        for sample, blocks in zip(self._running, needed.tolist(), strict=True):
            promised[sample.call.tenant] += blocks
        return promised

    def _let_in(self, sample: Sample, promised: Counter[int], length: int) -> int | None:
        """Seats a waiting sample on what it finds cached, if its blocks are there. Returns the tokens found."""
        table, tenant = self.table, sample.call.tenant
        hits = table.match(sample.sequence)
        blocks = -(-length // table.block_size) - hits.blocks
        needed = blocks + hits.idle_blocks + (table.watermark if self._running else 0)
        if promised[tenant] + needed > table.available(tenant):
            return None
        if promised.total() + needed > table.available_above_quota(tenant):
            return None
        try:
            cached = table.reuse(sample.sequence)
        except ResourceExhausted:
            return None
        self._waiting.remove(sample)
        self._seat(sample)
        promised[tenant] += blocks + 1
        return cached

    def _demand(self, rows: I32, chunk: I32, admitted: list[tuple[Sample, int, int]]) -> tuple[I64, I64]:
        """The sequences of a step, and the positions that each computes up to."""
        sequences = np.concatenate([self._rows.sequence[rows], [sample.sequence for sample, _, _ in admitted]])
        tokens = np.concatenate([chunk, [computed for _, _, computed in admitted]])
        ids, upto = sequences.astype(np.int64), tokens.astype(np.int64)
        upto += self.table.computed(ids)
        return ids, upto

    def _send_back(self, sample: Sample) -> None:
        """A sample that is seated waits again."""
        self._unseat(sample)
        self.table.drop(_one(sample.sequence))
        bisect.insort(self._waiting, sample, key=lambda waiting: waiting.arrival)

    def _build(self, rows: I32, chunk: I32) -> StepPlan:
        sequences = self._rows.sequence[rows]
        start = self.table.computed(sequences)
        upto = start + chunk
        extended = self.table.extend(sequences, upto)
        stale = self._rows.stale[rows]
        fresh = ~stale[extended.delta_sequence]
        deltas = TableDeltas(
            rows[extended.delta_sequence], extended.delta_first, extended.delta_count, extended.delta_blocks
        )
        if not fresh.all():
            deltas = keep(deltas, fresh)
        if stale.any():
            deltas = join(self._whole_tables(rows[stale]), deltas)
            self._rows.stale[rows] = False

        sampled = np.flatnonzero(upto == self.table.length(sequences)).astype(np.int32)
        samples = self._rows.seated(rows)
        sampled_list = sampled.tolist()
        fan_out = [(i, samples[at].width) for i, at in enumerate(sampled_list) if samples[at].width > 1]
        self._in_flight = InFlight(samples, upto, sampled_list)
        return StepPlan(
            ops=extended.ops(),
            deltas=deltas,
            batch=Batch(rows, start, chunk, self.table.token_range(sequences, start, upto)),
            samples=self._rows.samples(rows[sampled], sampled, fan_out),
        )

    def _whole_tables(self, rows: I32) -> TableDeltas:
        tables = self.table.tables(self._rows.sequence[rows])
        count = np.diff(tables.indptr).astype(np.int32)
        return TableDeltas(rows, np.zeros(len(rows), np.int32), count, tables.indices)

    # --- a result in ------------------------------------------------------------------------------------------------

    def check_outputs(self, outputs: StepOutputs) -> None:
        """Raises ValueError unless these can be the outputs of the step in flight. Changes nothing."""
        if self._in_flight is None:
            raise ValueError("a result, but no step is in flight")
        self._in_flight.check(outputs, self.capacity.vocab_size)

    def complete(self, outputs: StepOutputs) -> StepNews:
        """Takes the result of the step in flight. Tokens of samples that have ended meanwhile are dropped.

        Raises ValueError as check_outputs does. The step stays in flight then, as it does when a fault ends this
        halfway; what the calls in flight were to get is lost with it.
        """
        self.check_outputs(outputs)
        step = self._in_flight
        assert step is not None
        picked = Picked(outputs)
        alive = [i for i, sample in enumerate(step.samples) if sample.row >= 0]
        sequences = np.array([step.samples[i].sequence for i in alive], np.int64)
        upto = step.upto if len(alive) == len(step.samples) else step.upto[alive]
        self.counters.computed_tokens += int((upto - self.table.computed(sequences)).sum())
        folded = set(self.table.commit(sequences, upto).tolist())
        for i in alive if folded else ():
            sample = step.samples[i]
            self._rows.stale[sample.row] |= sample.sequence in folded

        news = StepNews({}, {})
        grown: list[int] = []
        grown_tokens: list[int] = []
        for source in step.sampled:
            lead = step.samples[source]
            samples = [lead] if lead.width == 1 else lead.call.samples
            tokens = picked.take(len(samples), lead.call.sampling.logprobs)
            if lead.row < 0:
                continue  # it ended while it was computed, and with it all that it would have forked
            if len(samples) > 1:
                self._fork(lead)
            if any(token == NO_TOKEN for token, _, _ in tokens):
                news.failed[lead.call.id] = _not_finite(lead)
                continue
            rows = news.rows.setdefault(lead.call.id, [])
            for sample, (token, logprob, top) in zip(samples, tokens, strict=True):
                if sample.finished:
                    continue
                finish = self._take_token(sample, token)
                rows.append(TokenRow(sample.index, token, finish, logprob, top))
                if finish is None:
                    grown.append(sample.sequence)
                    grown_tokens.append(token)
                else:
                    self._end(sample)
        self.table.append(np.array(grown, np.int64), np.array(grown_tokens, np.int32))
        for failed in news.failed:
            for sample in self._calls[failed].samples:
                self._end(sample)
        self._in_flight = None
        return news

    def _fork(self, lead: Sample) -> None:
        call = lead.call
        call.forked = True
        children = [sample for sample in call.samples[1:] if not sample.finished]
        at = self._running.index(lead) + 1
        sequences = self.table.fork(lead.sequence, len(children)).tolist() if children else []
        for sample, sequence in zip(children, sequences, strict=True):
            sample.sequence = sequence
            self._rows.take(sample)
        self._running[at:at] = children
        self._running_rows = None
        if lead.finished:  # stopped before the fork, it lent its sequence to the others until now
            self._vacate(lead)

    def _take_token(self, sample: Sample, token: int) -> FinishReason | None:
        sampling = sample.call.sampling
        sample.generated += 1
        self.counters.sampled_tokens += 1
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if sample.generated >= sample.call.max_tokens else None

    # --- seats ------------------------------------------------------------------------------------------------------

    def _seat(self, sample: Sample) -> None:
        self._rows.take(sample)
        bisect.insort(self._running, sample, key=lambda running: running.arrival)
        self._running_rows = None

    def _unseat(self, sample: Sample) -> None:
        self._rows.release(sample)
        self._running.remove(sample)
        self._running_rows = None

    def _end(self, sample: Sample) -> None:
        if sample.finished:
            return
        sample.finished = True
        call = sample.call
        if not call.forked and not call.finished:
            return  # the lead's sequence serves the samples that are left
        self._vacate(sample if call.forked else call.samples[0])

    def _vacate(self, sample: Sample) -> None:
        """Gives up the sample's place and blocks; does nothing when it has none."""
        if sample.row >= 0:
            self._unseat(sample)
        elif sample in self._waiting:
            self._waiting.remove(sample)
        if sample.sequence:
            self.table.free(_one(sample.sequence))
            sample.sequence = 0

    # --- the pool changes ---------------------------------------------------------------------------------------------

    def compact(self, most: int) -> Moved:
        """Moves at most `most` blocks of the running as PageTable.compact does; for the ops, before the next step.

        A step may be in flight: its writes come before these copies in the stream, and whatever is planned from now on
        after them, over the tables as they are now.
        """
        own = np.array([sample.sequence for sample in self._running], np.int64)
        moved = self.table.compact(own, most)
        changed = set(moved.changed.tolist())
        for sample in self._running:
            if sample.sequence in changed:
                self._rows.stale[sample.row] = True
        return moved

    def lost_to_limit(self) -> dict[int, Refused]:
        """The calls that can't come to their end within the table's limit, with the reason; cancel() forgets them.

        Those whose `max_tokens` was the loop's to choose, end earlier instead.
        """
        lost: dict[int, Refused] = {}
        for call in self._calls.values():
            if call.finished:
                continue
            try:
                known = 1 + max(sample.generated for sample in call.samples)
                fitting = self._check_fits(len(call.prompt), call.sampling, call.tenant, known)
                call.max_tokens = min(call.max_tokens, fitting)
            except Refused as refusal:
                lost[call.id] = refusal
        return lost

    # --- the pool is lost ---------------------------------------------------------------------------------------------

    def reset(self, table: PageTable, capacity: Capacity, namespace: bytes) -> dict[int, Refused]:
        """Goes on with an empty pool: every live sample waits again and recomputes from its tokens.

        Gives the calls that can't go on there, with the reason; cancel() forgets them.
        """
        tokens = {sample: self.table.tokens(sample.sequence) for sample in [*self._running, *self._waiting]}
        other_model = namespace != self._namespace
        self._begin(table, capacity, namespace)
        self._running, self._waiting = [], []
        lost: dict[int, Refused] = {}
        for sample in sorted(tokens, key=lambda sample: sample.arrival):
            call, sample.row, sample.sequence = sample.call, -1, 0
            if call.id in lost:
                continue
            try:
                if other_model:
                    raise FailedPrecondition("MODEL_CHANGED", "the executor came back with another model: call again")
                known = 1 + max(sample.generated for sample in call.samples)
                call.max_tokens = self._check_fits(len(call.prompt), call.sampling, call.tenant, known)
            except Refused as refusal:
                lost[call.id] = refusal
                continue
            sample.sequence = table.create(tokens[sample], call.realm + namespace, owner=call.owner, tenant=call.tenant)
            self._waiting.append(sample)
        return lost

    # --- reads --------------------------------------------------------------------------------------------------------

    def calls_in_flight(self) -> set[int]:
        """Calls that have a sample in the step in flight, also when it has ended meanwhile."""
        return set() if self._in_flight is None else {sample.call.id for sample in self._in_flight.samples}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self) -> list[str]:
        """Every invariant between calls, rows and sequences: a sentence, with numbers, for each that does not hold."""
        wrong = []
        held = [sample.sequence for sample in [*self._running, *self._waiting]]
        alive = self.table.sequences()
        own = alive[self.table.owners(alive) >= 0].tolist()
        if sorted(held) != sorted(own):
            wrong.append(f"the queues hold sequences {sorted(held)}, the page table {own}")
        for sample in [*self._running, *self._waiting]:
            if sample.call.id not in self._calls:
                wrong.append(f"sequence {sample.sequence} belongs to call {sample.call.id}, which is not known")
            if sample.finished and sample.call.forked:
                wrong.append(f"sample {sample.index} of call {sample.call.id} has finished and holds a sequence")
        for queue, name in ((self._running, "running"), (self._waiting, "waiting")):
            if queue != sorted(queue, key=lambda sample: sample.arrival):
                wrong.append(f"the {name} samples are not in order of arrival")
        seated = [row for row, sample in enumerate(self._rows.occupant) if sample is not None]
        if seated != sorted(sample.row for sample in self._running):
            wrong.append(f"rows {seated} are taken, the running samples sit in {[s.row for s in self._running]}")
        return wrong

    def sequence_states(self) -> dict[int, SequenceState]:
        states = {sample.sequence: SequenceState.WAITING for sample in self._waiting}
        states.update((sample.sequence, SequenceState.RUNNING) for sample in self._running)
        return states


def _not_finite(sample: Sample) -> Refused:
    position = len(sample.call.prompt) + sample.generated
    return Aborted(
        "LOGITS_NOT_FINITE",
        f"the model's logits for position {position} are not finite: this text overflows in the executor's dtype, "
        "use a wider one",
        position=position,
    )


def _one(sequence: int) -> I64:
    return np.array([sequence], np.int64)
