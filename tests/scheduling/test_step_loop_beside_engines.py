"""The step loop and an engine of its own on one pool: each reads back what it has written, whatever the other does."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paper_executor import stamp
from test_step_loop import World, prompt_of

from block_manager_svc.core.batch import Done, execute
from block_manager_svc.core.commands import Append, Command, Commit, Create, Fork, Free, Truncate
from block_manager_svc.core.errors import Refused
from block_manager_svc.core.step import I64, StepPlan

ENGINE = -1  # below 0: not the loop's


def i64(*values: int) -> I64:
    return np.array(values, np.int64)


class PaperEngine:
    """Writes stamps as the executor on paper does, into the slots that it is given, and commits what it has written."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.written: dict[int, int] = {}  # positions of each sequence that hold its stamps

    def batch(self, *commands: Command, atomic: bool = False) -> tuple[list[Done | Refused], StepPlan]:
        """The results, and the step with the copies, which is to be executed in its turn."""
        try:
            executed = execute(self.world.loop.table, list(commands), owner=ENGINE, atomic=atomic)
        except Refused as refused:
            return [refused], StepPlan()
        for command, result in zip(commands, executed.results, strict=True):
            if isinstance(result, Done):
                self.note(command, result)
        return executed.results, StepPlan(ops=executed.ops)

    def note(self, command: Command, result: Done) -> None:
        table = self.world.loop.table
        if isinstance(command, Create):
            self.written.update(zip(result.sequences.tolist(), result.cached.tolist(), strict=True))
        elif isinstance(command, Fork):
            for child in result.sequences.tolist():
                self.written[child] = int(table.computed([child])[0])
        elif isinstance(command, Truncate):
            for sequence, length in zip(command.sequences.tolist(), command.lengths.tolist(), strict=True):
                self.written[sequence] = min(self.written[sequence], length)
        elif isinstance(command, Free):
            for sequence in command.sequences.tolist():
                del self.written[sequence]

    def slot(self, sequence: int, position: int) -> tuple[int, int]:
        size = self.world.block_size
        return int(self.world.loop.table.tables([sequence]).indices[position // size]), position % size

    def stamps(self, sequence: int) -> list[int]:
        stamps = [0]
        for token in self.world.loop.table.tokens(sequence).tolist():
            stamps.append(stamp(stamps[-1], token))
        return stamps[1:]

    def write(self, sequence: int, upto: int) -> None:
        for position, value in enumerate(self.stamps(sequence)[:upto]):
            if position >= self.written[sequence]:
                self.world.executor.slots[self.slot(sequence, position)] = value
        self.written[sequence] = max(self.written[sequence], upto)

    def assert_reads_its_own(self) -> None:
        for sequence, written in self.written.items():
            for position, value in enumerate(self.stamps(sequence)[:written]):
                assert self.world.executor.slots[self.slot(sequence, position)] == value, (sequence, position)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_calls_and_an_engine_share_a_pool_and_disturb_neither_s_tokens(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4]), "block size")
    world = World(
        num_blocks=1 + -(-44 // block_size) + data.draw(st.integers(0, 20), "spare blocks"),
        block_size=block_size,
        max_rows=data.draw(st.integers(3, 8), "rows"),
        token_budget=data.draw(st.integers(8, 40), "budget"),
    )
    engine = PaperEngine(world)
    calls: list[int] = []

    def draw_sequence() -> int:
        return data.draw(st.sampled_from(sorted(engine.written)), "sequence")

    def command() -> Command:
        kind = data.draw(st.sampled_from(["create", "append", "commit", "fork", "truncate", "free"]), "command")
        if kind == "create" or not engine.written:
            prompt = prompt_of(20, data.draw(st.integers(0, 1)))[: data.draw(st.integers(1, 20))]
            return Create(i64(len(prompt)), np.array(prompt, np.int32), i64(data.draw(st.integers(0, 3))), b"engine")
        sequence = draw_sequence()
        length = int(world.loop.table.length([sequence])[0])
        if kind == "append":
            tokens = data.draw(st.lists(st.integers(0, 2), max_size=4))
            return Append(
                i64(sequence), i64(len(tokens)), np.array(tokens, np.int32), i64(data.draw(st.integers(0, 2)))
            )
        if kind == "commit":
            return Commit(i64(sequence), i64(engine.written[sequence]))
        if kind == "fork":
            return Fork(i64(sequence), i64(data.draw(st.integers(1, 2))))
        return (
            Free(i64(sequence)) if kind == "free" else Truncate(i64(sequence), i64(data.draw(st.integers(1, length))))
        )

    for _ in range(data.draw(st.integers(1, 30), "events")):
        event = data.draw(st.sampled_from(["submit", "step", "step", "engine", "engine", "engine", "both"]))
        if event == "submit":
            prompt = prompt_of(30, data.draw(st.integers(0, 1)))[: data.draw(st.integers(1, 30))]
            calls.append(world.submit(prompt, data.draw(st.integers(1, 14)), n=data.draw(st.sampled_from([1, 1, 2]))))
        elif event == "step":
            world.step()
        else:
            plan = world.loop.plan() if event == "both" else None  # its step is on its way when the engine decides
            one = command()
            [result], copies = engine.batch(one, atomic=data.draw(st.booleans()))
            assert world.loop.table.check() + world.loop.check() == []
            if plan is not None:
                world.take(world.executor.execute(plan))
            world.executor.execute(copies)
            engine.assert_reads_its_own()
            # Only slots that an append or create has made may be written.
            if isinstance(result, Done) and isinstance(one, Append | Create):
                [sequence] = (result.sequences if isinstance(one, Create) else one.sequences).tolist()
                engine.write(sequence, int(world.loop.table.length([sequence])[0]))
        engine.assert_reads_its_own()

    if engine.written:
        engine.batch(Free(i64(*engine.written)))
    world.run()  # whatever has waited for the engine's blocks
    for call in calls:
        world.assert_undisturbed(call)
        world.loop.cancel(call)
    world.assert_all_free()


def test_calls_wait_for_an_engine_that_holds_the_pool_and_then_finish() -> None:
    world = World(num_blocks=12, block_size=4)
    engine = PaperEngine(world)
    [made], _ = engine.batch(Create(i64(36), np.zeros(36, np.int32), i64(0), b""))
    assert isinstance(made, Done)
    call = world.submit(prompt_of(9), 8)
    assert world.loop.plan() is None
    assert (world.loop.running, world.loop.waiting) == (0, 1)
    engine.batch(Truncate(made.sequences, i64(32)))  # three blocks are free: room for the prompt, not for all
    world.run()
    assert (world.loop.running, world.loop.waiting, world.loop.counters.preemptions) == (0, 1, 1)
    engine.batch(Free(made.sequences))
    world.run()
    world.assert_undisturbed(call)
