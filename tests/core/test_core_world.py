"""All states of worlds that are small enough for every run; `make world` goes through larger ones. A block holds 2."""

from __future__ import annotations

import pytest
from core_world import Bounds, Command, World

from block_manager_svc.core import PageTable
from block_manager_svc.core.pool import BlockPool


@pytest.mark.parametrize(
    ("bounds", "refused"),
    [
        (Bounds(sequences=2, tokens=2, num_blocks=3, num_host=0), set()),
        (Bounds(sequences=1, tokens=3, num_blocks=3, num_host=3), {"swap out refused"}),
        (Bounds(sequences=1, tokens=3, num_blocks=3, num_host=4, shared=False), set()),
        (Bounds(block_size=1, sequences=2, tokens=2, num_blocks=3, num_host=0), {"grow refused"}),
    ],
    ids=str,
)
def test_the_invariants_hold_in_every_state(bounds: Bounds, refused: set[str]) -> None:
    world = World(bounds)
    assert world.search(most=10_000)
    commands = {"create", "free", "drop", "truncate", "grow", "commit"}
    if bounds.sequences > 1:
        commands.add("fork")
    if bounds.num_host:
        commands |= {"swap out", "swap in"}
    assert world.counts.keys() == commands | refused | ({"reuse"} if bounds.tokens > bounds.block_size else set())


def test_a_search_that_is_cut_short_says_so() -> None:
    world = World(Bounds())
    assert not world.search(most=100)
    assert world.states == 100


# --- what is the same state, and what is not ------------------------------------------------------------------------


def state(*commands: Command) -> bytes:
    world = World(Bounds())
    for command in commands:
        world._give(command)
        world._read()
    return world._digest()


def filled(sequence: int, *tokens: int) -> list[Command]:
    """A sequence with these tokens, all of them computed."""
    grown: list[Command] = [("grow", (sequence, token)) for token in tokens[1:]]
    return [("create", tokens[:1]), *grown, ("grow", (sequence,)), ("commit", (sequence, len(tokens)))]


def test_names_of_tokens_sequences_and_blocks_make_no_difference() -> None:
    assert state(*filled(1, 0, 1, 1)) == state(*filled(1, 1, 0, 0))
    assert state(*filled(1, 0), *filled(2, 1, 1)) == state(*filled(1, 1, 1), *filled(2, 0))
    other_block = state(*filled(1, 0), *filled(2, 1), ("free", (1,)), ("grow", (2, 0)))
    assert other_block == state(*filled(1, 1), ("grow", (1, 0)))


@pytest.mark.parametrize(
    "different",
    [
        filled(1, 0, 1, 0),
        filled(1, 0, 1, 1)[:-1],
        [*filled(1, 0, 1, 1), ("truncate", (1, 2))],
        [*filled(1, 0, 1, 1), ("swap out", (1,))],
        [*filled(1, 0, 1, 1), ("fork", (1,))],
        [*filled(1, 0, 1, 1), *filled(2, 0)],
        [*filled(1, 0, 0), ("free", (1,)), *filled(2, 0, 1, 1)],
    ],
)
def test_whatever_else_differs_makes_another_state(different: list[Command]) -> None:
    assert state(*different) != state(*filled(1, 0, 1, 1))


def test_the_order_of_eviction_belongs_to_a_state() -> None:
    both = [*filled(1, 0, 0), *filled(2, 0, 1)]
    first, second = [*both, ("free", (1,)), ("free", (2,))], [*both, ("free", (2,)), ("free", (1,))]
    assert state(*first) != state(*second)


def test_what_nobody_can_find_any_more_is_all_the_same() -> None:
    """Sequence 2 holds a double of the first block, and goes on behind the one of sequence 1, which is evicted."""

    def orphan(*tail: int) -> bytes:
        both: list[Command] = [("create", (0,)), ("create", (0,)), ("grow", (1, 0)), ("grow", (2, 0))]
        both += [("commit", (1, 2)), ("commit", (2, 2))]
        second: list[Command] = [*(("grow", (2, token)) for token in tail), ("commit", (2, 4))]
        return state(*both, *second, ("free", (1,)), ("free", (2,)), *filled(3, 1, 1, 1, 1, 1))

    assert orphan(1, 0) == orphan(0, 1)
    assert orphan(1, 0) != state(*filled(1, 1, 1, 1, 1, 1))  # it is still there


# --- what is wrong is found -----------------------------------------------------------------------------------------


def test_a_copy_that_is_not_made_is_found_with_the_commands_that_lead_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_move", lambda self, sources, targets: None)
    with pytest.raises(AssertionError, match=r"after \[\('create', .*reads another's at position 0"):
        World(Bounds(sequences=2, tokens=2, num_blocks=4, num_host=0)).search(most=2_000)


def test_a_block_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "unseal", lambda self, blocks: None)
    with pytest.raises(AssertionError, match=r"after \[.*truncate"):
        World(Bounds(sequences=1, tokens=3, num_blocks=4, num_host=0)).search(most=2_000)


def test_a_refusal_that_changes_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = PageTable.grow

    def grow_first(self: PageTable, sequences: list[int], counts: list[int], tokens: list[int], ahead: list[int]):
        self.append(sequences, tokens) if tokens else None
        return grow(self, sequences, [0], [], ahead)

    monkeypatch.setattr(PageTable, "grow", grow_first)
    with pytest.raises(AssertionError, match="a refusal changed something"):
        World(Bounds(sequences=2, tokens=3, num_blocks=3, num_host=0)).search(most=5_000)
