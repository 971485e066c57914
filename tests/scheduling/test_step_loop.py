"""The step loop over the real page table, with an executor on paper that notices every wrong block."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paper_executor import PaperExecutor, undisturbed

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import InvalidArgument, Refused, ResourceExhausted
from block_manager_svc.core.step import StepPlan
from block_manager_svc.scheduling.loop import Capacity, StepLoop
from block_manager_svc.scheduling.request import FinishReason, Sampling, TokenRow

VOCAB = 50


@dataclass
class World:
    """A loop, an executor on paper, and what every call has received."""

    num_blocks: int = 64
    block_size: int = 4
    max_rows: int = 16
    token_budget: int = 64
    max_context: int = 200
    max_waiting: int = 100
    folding: bool = False
    received: dict[int, list[TokenRow]] = field(default_factory=dict)
    asked: dict[int, tuple[list[int], Sampling]] = field(default_factory=dict)
    failed: dict[int, Refused] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.loop = StepLoop(self.new_table(), self.capacity())
        self.executor = PaperExecutor(self.num_blocks, self.block_size, self.max_rows, VOCAB)

    def new_table(self) -> PageTable:
        return PageTable(self.num_blocks, self.block_size, folding=self.folding)

    def capacity(self) -> Capacity:
        return Capacity(self.max_context, self.max_rows, self.token_budget, self.max_waiting, VOCAB)

    def submit(self, prompt: list[int], max_tokens: int = 8, **sampling: object) -> int:
        params = Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        call = self.loop.submit(np.array(prompt, np.int32), params)
        self.asked[call] = (prompt, params)
        self.received[call] = []
        return call

    def step(self) -> bool:
        plan = self.loop.plan()
        assert self.loop.table.check() + self.loop.check() == []
        if plan is None:
            return False
        assert plan.batch.count.sum() <= self.token_budget
        self.take(self.executor.execute(plan))
        return True

    def take(self, outputs: object) -> None:
        self.steps += 1
        news = self.loop.complete(outputs)  # type: ignore[arg-type]
        for call, rows in news.rows.items():
            self.received[call] += rows
        self.failed.update(news.failed)
        assert self.loop.table.check() + self.loop.check() == []

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"not finished after {limit} steps")

    def tokens(self, call: int, sample: int = 0) -> list[int]:
        return [row.token_id for row in self.received[call] if row.sample == sample]

    def assert_undisturbed(self, call: int) -> None:
        prompt, sampling = self.asked[call]
        for sample in range(sampling.n):
            assert self.tokens(call, sample) == undisturbed(
                prompt,
                sampling.max_tokens,
                seed=sampling.seed,
                sample=sample,
                vocab=VOCAB,
                stop=sampling.stop_token_ids,
            )
            finishes = [row.finish for row in self.received[call] if row.sample == sample]
            assert finishes[-1] is not None
            assert all(finish is None for finish in finishes[:-1])

    def assert_all_free(self) -> None:
        states = self.loop.table.states()
        assert (states.active, states.sealed, states.free + states.cached) == (0, 0, self.num_blocks - 1)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + i * i) % VOCAB for i in range(length)]


@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
@pytest.mark.parametrize("token_budget", [16, 24, 64])
def test_a_batch_of_ragged_prompts_gets_the_tokens_of_the_undisturbed_run(block_size: int, token_budget: int) -> None:
    world = World(num_blocks=1200, block_size=block_size, token_budget=token_budget)
    calls = [world.submit(prompt_of(length, length), 10) for length in (1, 2, 15, 16, 17, 40, 90, 33, 5, 64)]
    world.run()
    for call in calls:
        world.assert_undisturbed(call)
        world.loop.cancel(call)
    world.assert_all_free()


def test_a_single_sequence_never_copies() -> None:
    world = World()
    call = world.submit(prompt_of(18), 60)
    world.run()
    world.assert_undisturbed(call)
    assert world.executor.copies == 0


@pytest.mark.parametrize(("prompt", "copies"), [(17, 3), (18, 3), (19, 3), (16, 0), (20, 0), (1, 3), (4, 0)])
def test_four_samples_copy_a_partly_filled_last_block_three_times_and_a_full_one_never(
    prompt: int, copies: int
) -> None:
    world = World()
    call = world.submit(prompt_of(prompt), 30, n=4, seed=9)
    world.run()
    world.assert_undisturbed(call)
    assert world.executor.copies == copies
    assert world.loop.table.counters.copies_on_write == copies


def test_parallel_samples_share_the_prompt_and_compute_it_once() -> None:
    world = World()
    world.submit(prompt_of(40), 4, n=4)
    world.run()
    assert world.loop.counters.computed_tokens == 40 + 4 * 3  # the last token of a sample is never computed


def test_identical_prompts_in_flight_do_not_read_what_is_not_written_and_survive_each_others_end() -> None:
    world = World()
    first, second = world.submit(prompt_of(24), 20), world.submit(prompt_of(24), 20)
    for _ in range(3):
        world.step()
    world.loop.cancel(first)
    third = world.submit(prompt_of(24), 20)
    world.run()
    world.assert_undisturbed(second)
    world.assert_undisturbed(third)
    assert world.loop.call(third).cached_tokens == 20  # whole blocks below the last token
    assert world.loop.call(second).cached_tokens == 0


@pytest.mark.parametrize("num_blocks", [64, 16])
def test_identical_prompts_in_flight_share_their_blocks_once_they_are_folded(num_blocks: int) -> None:
    apart, folded = World(num_blocks=num_blocks), World(num_blocks=num_blocks, folding=True)
    shared = []
    for world in (apart, folded):
        calls = [world.submit(prompt_of(24), 12) for _ in range(2)] + [world.submit(prompt_of(11), 12, n=2)]
        most = 0
        while world.step():
            most = max(most, world.loop.table.sharing().shared_blocks)
        shared.append(most)
        for call in calls:
            world.assert_undisturbed(call)
    assert shared[1] > shared[0] or num_blocks == 16  # where preemption has the second find what the first left


def test_a_cached_prompt_leaves_one_token_to_compute() -> None:
    world = World()
    first = world.submit(prompt_of(16), 1)
    world.run()
    second = world.submit(prompt_of(16), 5)
    world.run()
    world.assert_undisturbed(first)
    world.assert_undisturbed(second)
    assert world.loop.call(second).cached_tokens == 12


def test_a_pool_too_small_for_all_preempts_the_youngest_and_every_call_finishes_with_the_same_tokens() -> None:
    world = World(num_blocks=16, block_size=4)
    calls = [world.submit(prompt_of(9, salt), 30) for salt in range(6)]
    world.run()
    for call in calls:
        world.assert_undisturbed(call)
    assert world.loop.counters.preemptions > 0
    assert world.loop.call(calls[0]).preemptions == 0  # the oldest is never the victim


def test_parallel_samples_that_do_not_fit_together_finish_one_after_another() -> None:
    world = World(num_blocks=12, block_size=4)
    call = world.submit(prompt_of(10), 30, n=4, seed=3)
    world.run()
    world.assert_undisturbed(call)
    assert world.loop.call(call).preemptions > 0


def test_a_cancelled_call_frees_its_blocks_at_once_even_while_it_is_computed() -> None:
    world = World()
    running = world.submit(prompt_of(20), 50)
    other = world.submit(prompt_of(20, 1), 50)
    world.step()
    plan = world.loop.plan()
    assert plan is not None
    world.loop.cancel(running)
    assert world.loop.table.states().active + world.loop.table.states().sealed == 6  # only the other's
    world.take(world.executor.execute(plan))
    world.run()
    assert len(world.tokens(running)) == 1
    world.assert_undisturbed(other)


@pytest.mark.parametrize("n", [1, 3])
def test_a_call_cancelled_during_its_prefill_step_never_forks(n: int) -> None:
    world = World()
    call = world.submit(prompt_of(20), 5, n=n)
    plan = world.loop.plan()
    assert plan is not None
    world.loop.cancel(call)
    world.take(world.executor.execute(plan))
    assert world.received[call] == []
    world.assert_all_free()
    assert world.loop.plan() is None


def test_one_sample_can_be_stopped_while_the_others_go_on() -> None:
    world = World()
    call = world.submit(prompt_of(10), 12, n=3, seed=5)
    world.step()
    world.step()
    world.loop.stop_sample(call, 1)
    world.run()
    assert len(world.tokens(call, 1)) == 2
    assert len(world.tokens(call, 0)) == len(world.tokens(call, 2)) == 12
    world.assert_all_free()


@pytest.mark.parametrize("stopped", [{0}, {1}, {0, 2}, {0, 1}, {0, 1, 2}])
def test_samples_stopped_before_the_fork_leave_nothing_behind(stopped: set[int]) -> None:
    world = World()
    call = world.submit(prompt_of(10), 6, n=3, seed=2)
    plan = world.loop.plan()
    assert plan is not None
    for sample in stopped:
        world.loop.stop_sample(call, sample)
    world.take(world.executor.execute(plan))
    world.run()
    for sample in range(3):
        assert len(world.tokens(call, sample)) == (0 if sample in stopped else 6)
    world.assert_all_free()
    assert world.loop.plan() is None


def test_a_stop_token_ends_a_sample_and_is_delivered() -> None:
    world = World()
    free_run = undisturbed(prompt_of(10), 20, seed=0, sample=0, vocab=VOCAB, stop=frozenset())
    stop = frozenset([free_run[6]])
    call = world.submit(prompt_of(10), 20, stop_token_ids=stop)
    world.run()
    world.assert_undisturbed(call)
    assert world.received[call][-1].finish is FinishReason.STOP


def test_log_probabilities_reach_the_right_rows() -> None:
    world = World()
    plain = world.submit(prompt_of(5), 3)
    own = world.submit(prompt_of(6), 3, logprobs=0)
    best = world.submit(prompt_of(7), 3, logprobs=2, n=2)
    world.run()
    assert all(row.logprob is None for row in world.received[plain])
    assert all(row.logprob == -0.5 and row.top == () for row in world.received[own])
    assert all(row.top == ((0, -1.0), (1, -2.0)) for row in world.received[best])
    assert len(world.received[best]) == 6


def test_decodes_are_never_starved_by_a_long_prefill() -> None:
    world = World(num_blocks=400, token_budget=16)
    short = world.submit(prompt_of(3), 30)
    world.step()
    world.submit(prompt_of(150, 1), 5)
    for _ in range(8):
        before = len(world.tokens(short))
        world.step()
        assert len(world.tokens(short)) == before + 1


def test_a_short_call_behind_a_long_prefill_starts_with_its_last_chunk_and_then_never_waits() -> None:
    world = World(num_blocks=400, token_budget=16)
    older = world.submit(prompt_of(90), 20)  # 5 chunks of 16, and 10 tokens
    younger = world.submit(prompt_of(3, 1), 20)
    youngest = world.submit(prompt_of(90, 2), 5)
    for _ in range(5):
        world.step()
        assert world.received == {older: [], younger: [], youngest: []}
    for count in range(1, 7):
        world.step()
        assert [len(world.tokens(call)) for call in (older, younger, youngest)] == [count, count, 0]
    world.run()
    for call in (older, younger, youngest):
        world.assert_undisturbed(call)


def test_a_step_sends_the_tables_of_new_rows_and_after_that_only_new_blocks() -> None:
    world = World(block_size=4)
    lengths = [5, 6, 8, 12, 1]
    for salt, length in enumerate(lengths):
        world.submit(prompt_of(length, salt), 30)
    sent = []
    for _ in range(14):
        plan = world.loop.plan()
        assert plan is not None
        deltas, batch = plan.deltas, plan.batch
        sent.append(sorted(zip(deltas.row.tolist(), deltas.first.tolist(), deltas.count.tolist(), strict=True)))
        if len(sent) == 1:
            assert sent[0] == [(row, 0, -(-length // 4)) for row, length in enumerate(lengths)]
        else:
            crossed = zip(batch.row.tolist(), batch.start.tolist(), strict=True)
            assert sent[-1] == [(row, start // 4, 1) for row, start in crossed if start % 4 == 0]
        world.take(world.executor.execute(plan))
    assert [] in sent  # a step in which no sequence crosses into a new block


@pytest.mark.parametrize("again", ["preempted", "reset"])
def test_hits_are_counted_at_first_admission_only(again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reuse, hits = PageTable.reuse, []

    def spying(self: PageTable, sequence: int) -> int:
        hits.append(reuse(self, sequence))
        return hits[-1]

    monkeypatch.setattr(PageTable, "reuse", spying)
    world = World(num_blocks=16, block_size=4)
    world.submit(prompt_of(9), 1)
    world.run()  # the prompt's two whole blocks can be found from now on
    calls = [world.submit(prompt_of(9), 30) for _ in range(6)]
    while not (world.loop.counters.preemptions if again == "preempted" else len(world.tokens(calls[0])) >= 8):
        world.step()
    first = {call: world.loop.call(call).cached_tokens for call in calls}
    if again == "reset":
        world.loop.plan()
        assert world.loop.reset(world.new_table(), world.capacity(), b"") == {}
        world.executor = PaperExecutor(world.num_blocks, world.block_size, world.max_rows, VOCAB)
    world.run()
    last = {call: world.loop.call(call).cached_tokens for call in calls}
    assert first[calls[0]] == 8
    assert all(last[call] == tokens for call, tokens in first.items() if tokens >= 0)
    assert world.loop.counters.cached_tokens == sum(last.values())
    assert sum(hits) > world.loop.counters.cached_tokens  # blocks were found again, which count no more


def test_an_idle_pool_admits_a_call_that_just_fits() -> None:
    world = World(num_blocks=11, block_size=4)
    call = world.submit(prompt_of(39), 2)  # 40 slots, 10 blocks; the last token needs none
    world.run()
    world.assert_undisturbed(call)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "kind", "reason"),
    [
        (39, 3, 1, ResourceExhausted, "PROMPT_EXCEEDS_POOL"),
        (150, 1, 1, ResourceExhausted, "PROMPT_EXCEEDS_POOL"),
        (200, 1, 1, InvalidArgument, "PROMPT_TOO_LONG"),
        (3, 198, 1, InvalidArgument, "PROMPT_TOO_LONG"),
        (3, 3, 17, InvalidArgument, "PARAMETER_OUT_OF_RANGE"),
    ],
)
def test_what_can_never_fit_is_refused_at_once_with_numbers(
    prompt: int, max_tokens: int, n: int, kind: type[Refused], reason: str
) -> None:
    world = World(num_blocks=11, block_size=4)
    revision = world.loop.table.revision
    with pytest.raises(kind) as refused:
        world.submit(prompt_of(prompt), max_tokens, n=n)
    assert refused.value.reason == reason
    assert refused.value.numbers
    assert world.loop.table.revision == revision
    assert world.loop.plan() is None


def test_a_full_queue_refuses_with_advice_when_to_come_back() -> None:
    world = World(max_waiting=2)
    world.submit(prompt_of(3))
    world.submit(prompt_of(3))
    with pytest.raises(ResourceExhausted) as refused:
        world.submit(prompt_of(3))
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("at_step", [1, 4])
def test_a_call_whose_logits_are_not_finite_fails_alone(n: int, at_step: int) -> None:
    world = World()
    other = world.submit(prompt_of(9, 1), 12)
    doomed = world.submit(prompt_of(6), 12, n=n)
    for step in range(1, at_step + 1):
        plan = world.loop.plan()
        assert plan is not None
        outputs = world.executor.execute(plan)
        if step == at_step:
            outputs.token_ids[-1] = -1  # the youngest's last sample
        world.take(outputs)
    assert world.failed[doomed].reason == "LOGITS_NOT_FINITE"
    assert world.failed[doomed].numbers == {"position": 6 + at_step - 1}
    world.run()
    world.assert_undisturbed(other)
    assert len(world.tokens(doomed)) <= n * (at_step - 1) + n - 1
    world.assert_all_free()


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.zeros(2, np.int32)},
        {"token_ids": np.empty(0, np.int32)},
        {"token_ids": np.array([VOCAB], np.int32)},
        {"token_ids": np.array([-2], np.int32)},
        {"logprob": np.zeros(2, np.float32)},
        {"top_token_ids": np.array([0, VOCAB], np.int32)},
        {"top_token_ids": np.array([0, -1], np.int32)},
        {"top_logprobs": np.zeros(3, np.float32)},
    ],
    ids=str,
)
def test_outputs_that_cannot_be_the_steps_are_refused_and_the_step_stays_in_flight(change: dict[str, object]) -> None:
    world = World()
    call = world.submit(prompt_of(5), 3, logprobs=2)
    plan = world.loop.plan()
    assert plan is not None
    right = world.executor.execute(plan)
    revision = world.loop.table.revision
    with pytest.raises(ValueError, match=r"asked for|tokens from"):
        world.loop.complete(replace(right, **change))  # type: ignore[arg-type]
    assert world.loop.table.revision == revision
    world.take(right)
    world.run()
    world.assert_undisturbed(call)


def test_after_a_reset_every_call_goes_on_with_the_tokens_that_it_had() -> None:
    world = World()
    calls = [world.submit(prompt_of(12, salt), 20, n=1 + salt % 3, seed=salt) for salt in range(5)]
    for _ in range(6):
        world.step()
    assert world.loop.plan() is not None  # lost with the executor
    assert world.loop.reset(world.new_table(), world.capacity(), b"") == {}
    world.executor = PaperExecutor(world.num_blocks, world.block_size, world.max_rows, VOCAB)
    world.run()
    for call in calls:
        world.assert_undisturbed(call)


def test_a_reset_to_a_smaller_pool_or_another_model_names_the_calls_that_cannot_go_on() -> None:
    world = World()
    small, large = world.submit(prompt_of(8), 4), world.submit(prompt_of(80), 4)
    world.step()
    lost = world.loop.reset(PageTable(8, world.block_size), world.capacity(), b"")
    assert {call: why.reason for call, why in lost.items()} == {large: "PROMPT_EXCEEDS_POOL"}
    lost = world.loop.reset(world.new_table(), world.capacity(), b"another model")
    assert {call: why.reason for call, why in lost.items()} == {small: "MODEL_CHANGED"}
    assert world.loop.plan() is None


def test_a_reset_to_a_smaller_pool_clamps_an_open_ended_call_anew_unless_it_is_past_that_already() -> None:
    world = World(block_size=4)
    short, long = world.submit(prompt_of(6), 0), world.submit(prompt_of(24, 1), 0)
    for _ in range(8):
        world.step()
    assert world.loop.call(short).max_tokens == world.max_context - 6
    before = world.tokens(short)
    world.num_blocks = 8  # 7 of them usable: 28 slots, and one token that needs none
    lost = world.loop.reset(world.new_table(), world.capacity(), b"")
    assert {call: why.reason for call, why in lost.items()} == {long: "PROMPT_EXCEEDS_POOL"}
    world.loop.cancel(long)
    world.executor = PaperExecutor(world.num_blocks, world.block_size, world.max_rows, VOCAB)
    world.run()
    tokens = world.tokens(short)
    assert tokens[: len(before)] == before
    assert tokens == undisturbed(prompt_of(6), 29 - 6, seed=0, sample=0, vocab=VOCAB, stop=frozenset())
    assert world.received[short][-1].finish is FinishReason.LENGTH
    world.loop.cancel(short)
    world.assert_all_free()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_traffic_over_any_pool_gives_the_tokens_of_the_undisturbed_run(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 3, 4, 8]), "block size")
    world = World(
        num_blocks=1 + -(-44 // block_size) + data.draw(st.integers(0, 30), "spare blocks"),
        block_size=block_size,
        max_rows=data.draw(st.integers(3, 8), "rows"),
        token_budget=data.draw(st.integers(8, 40), "budget"),
    )
    alive: list[int] = []
    cancelled: set[int] = set()
    for _ in range(data.draw(st.integers(1, 25), "events")):
        event = data.draw(
            st.sampled_from(["submit", "submit", "step", "step", "step", "cancel", "mid-step cancel", "reset"])
        )
        if event == "submit":
            # Prompts share heads of a few texts, so that hits, forks and evictions meet.
            prompt = prompt_of(30, data.draw(st.integers(0, 1)))[: data.draw(st.integers(1, 30))]
            n = data.draw(st.sampled_from([1, 1, 2, 3]))
            alive.append(world.submit(prompt, data.draw(st.integers(1, 14)), n=n, seed=data.draw(st.integers(0, 3))))
        elif event == "step":
            world.step()
        elif event == "reset":
            assert world.loop.reset(world.new_table(), world.capacity(), b"") == {}
            world.executor = PaperExecutor(world.num_blocks, world.block_size, world.max_rows, VOCAB)
        elif alive:
            plan = world.loop.plan() if event == "mid-step cancel" else None
            victim = alive.pop(data.draw(st.integers(0, len(alive) - 1)))
            cancelled.add(victim)
            world.loop.cancel(victim)
            if plan is not None:
                world.take(world.executor.execute(plan))
    world.run()
    for call in alive:
        world.assert_undisturbed(call)
        world.loop.cancel(call)
    world.assert_all_free()
    assert world.loop.plan() is None


# --- the pool changes under way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_blocks_move_between_and_during_steps_and_no_token_changes(seed: int) -> None:
    world, draw, moved = World(max_rows=8), np.random.default_rng(seed), 0
    calls = [world.submit(prompt_of(9 + i, i), 30, n=1 + i % 2) for i in range(5)]
    gone = [world.submit(prompt_of(11, 9 + i), 25) for i in range(4)]
    while (plan := world.loop.plan()) is not None:
        steps = [plan]
        if draw.random() < 0.5:
            steps.append(compaction(world, int(draw.integers(1, 6))))
        if gone and draw.random() < 0.2:
            world.loop.cancel(gone.pop(0))
            world.loop.table.reset_cache()
            steps.append(compaction(world, 3))
        outputs, *_ = [world.executor.execute(step) for step in steps]
        world.take(outputs)
        between = compaction(world, 2)
        world.executor.execute(between)
        moved += sum(step.ops.kind.size for step in [*steps[1:], between])
    for call in calls:
        world.assert_undisturbed(call)
    assert moved > 5


def compaction(world: World, most: int) -> StepPlan:
    moved = world.loop.compact(most)
    assert moved.ops.kind.size <= most
    return StepPlan(ops=moved.ops)


def test_an_admission_leaves_the_watermark_to_the_running_unless_there_are_none() -> None:
    world = World(num_blocks=12)  # 11 that can be used
    world.loop.table.watermark = 4
    first = world.submit(prompt_of(30), 6)  # 8 blocks of 4, then 9
    world.step()
    second = world.submit(prompt_of(7, 1), 2)  # 2 blocks: with one more for the first they would just fit
    world.step()
    assert (world.loop.running, world.loop.waiting) == (1, 1)
    world.run()
    for call in (first, second):
        world.assert_undisturbed(call)


def test_a_lower_limit_tells_which_calls_cannot_come_to_their_end() -> None:
    world = World()
    long, short, open_end = world.submit(prompt_of(10), 60), world.submit(prompt_of(9), 10), world.submit([1], 0)
    world.step()
    world.loop.table.resize(10)
    lost = world.loop.lost_to_limit()
    assert {call: why.reason for call, why in lost.items()} == {long: "PROMPT_EXCEEDS_POOL"}
    assert lost[long].numbers["pool_blocks"] == 10
    world.loop.cancel(long)
    world.run()
    world.assert_undisturbed(short)
    assert len(world.tokens(open_end)) == 10 * 4
    with pytest.raises(ResourceExhausted, match="pool has 10"):
        world.submit(prompt_of(41), 10)
