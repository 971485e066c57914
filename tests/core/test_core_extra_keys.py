"""Extra keys are part of a block's identity: equal tokens of another picture are another block. 4 tokens a block."""

from __future__ import annotations

import numpy as np
import pytest
from core_model import keys_of, plain, prompt, run, snapshot

from block_manager_svc.core import PageTable
from block_manager_svc.core.batch import execute
from block_manager_svc.core.commands import Append, Create, Fork, Free, Truncate
from block_manager_svc.core.errors import InvalidArgument, NotFound, Refused
from block_manager_svc.core.events import BlockStored, chained_sha256
from block_manager_svc.core.extra_keys import ExtraKeys, by_block

IMAGE = 7
CAT, DOG = b"cat", b"dog"


def picture(key: bytes, *before: int) -> list[int | tuple[int, bytes]]:
    """Tokens before a picture of six placeholders, and three words behind."""
    return [*before, (IMAGE, key), *[IMAGE] * 5, 1, 2, 3]


@pytest.fixture
def table() -> PageTable:
    return PageTable(32, 4)


def computed(table: PageTable, tokens: list[int | tuple[int, bytes]]) -> int:
    sequence = table.create(plain(tokens), extra=keys_of(tokens))
    table.reuse(sequence)
    run(table, sequence)
    return sequence


def found(table: PageTable, tokens: list[int | tuple[int, bytes]]) -> int:
    return table.admission(plain(tokens), extra=keys_of(tokens)).cached


def test_a_prompt_finds_its_own_picture_and_no_other(table: PageTable) -> None:
    computed(table, picture(CAT, 5, 6))
    assert found(table, picture(CAT, 5, 6)) == 8
    assert found(table, picture(DOG, 5, 6)) == 0
    assert found(table, list(plain(picture(CAT, 5, 6)))) == 0


def test_what_lies_before_the_picture_is_shared_and_all_behind_is_apart(table: PageTable) -> None:
    words = list(range(10, 18))
    computed(table, picture(CAT, *words))
    assert found(table, picture(DOG, *words)) == 8
    computed(table, picture(DOG, *words))
    assert found(table, picture(DOG, *words)) == found(table, picture(CAT, *words)) == 16
    assert table.check() == []


def test_the_place_of_a_key_counts(table: PageTable) -> None:
    computed(table, [1, (2, CAT), 2, 3, 4])
    assert found(table, [1, 2, (2, CAT), 3, 4]) == 0
    assert found(table, [1, (2, CAT), 2, 3, 4]) == 4


def test_keys_that_run_together_are_told_apart(table: PageTable) -> None:
    assert by_block(((0, b"ab"), (1, b"c")), 4) != by_block(((0, b"a"), (1, b"bc")), 4)
    # Tokens and keys are apart as well: the widths of a block's tokens are fixed.
    assert by_block(((5, b"x"),), 4) == {1: by_block(((1, b"x"),), 4)[0]}


def test_keys_come_with_tokens_that_are_appended_and_go_with_those_that_are_cut(table: PageTable) -> None:
    sequence = computed(table, [1, 2, 3, 4, 5])
    tokens = [(IMAGE, CAT), IMAGE, IMAGE]
    table.grow([sequence], [3], plain(tokens), [0], extra=keys_of(tokens, first=[5]))
    table.truncate([sequence], [5])
    table.grow([sequence], [3], [IMAGE] * 3, [0])
    table.commit([sequence], [8])
    assert found(table, [1, 2, 3, 4, 5, IMAGE, IMAGE, IMAGE, 9]) == 8
    assert found(table, [1, 2, 3, 4, 5, *tokens, 9]) == 4


def test_children_have_the_keys_of_their_parent(table: PageTable) -> None:
    tokens = [*picture(CAT), 9]
    parent = table.create(plain(tokens), extra=keys_of(tokens))
    (child,) = table.fork(parent).tolist()
    table.free([parent])
    run(table, child)
    assert found(table, tokens) == 8
    assert table.check() == []


def test_begin_finds_by_keys_and_writes_them(table: PageTable) -> None:
    prompts = [picture(CAT), picture(DOG), list(plain(picture(CAT)))]
    begun = table.begin([9] * 3, plain(t for p in prompts for t in p), [0] * 3, extra=keys_of(*prompts))
    table.commit(begun.sequences, [9] * 3)
    again = table.begin([9] * 3, plain(t for p in prompts for t in p), [0] * 3, extra=keys_of(*prompts))
    assert again.cached.tolist() == [8, 8, 8]
    tables = table.tables(again.sequences)
    assert len(set(tables.indices.tolist())) == 9
    assert table.check() == []


def test_a_pin_names_the_keys_too(table: PageTable) -> None:
    table.free([computed(table, picture(CAT))])
    with pytest.raises(NotFound, match="no block"):
        table.pin(plain(picture(DOG)), 10, extra=keys_of(picture(DOG)))
    assert table.pin(plain(picture(CAT)), 10, extra=keys_of(picture(CAT))).tokens == 8


def test_the_canonical_block_is_found_again_by_its_keys_after_a_double_went_on(table: PageTable) -> None:
    """Two compute the same picture at once; the one whose block is not canonical goes on behind the canonical one."""
    tokens = picture(CAT)
    first, second = (table.create(plain(tokens), extra=keys_of(tokens)) for _ in range(2))
    for sequence in (first, second):
        run(table, sequence, 4)
    run(table, second, 8)
    table.truncate([second], [7])
    table.grow([second], [1], [2], [0])
    table.commit([second], [8])
    assert found(table, [*tokens[:8], 9]) == 8
    assert table.check() == []


def test_a_watcher_s_hash_is_over_the_keys(table: PageTable) -> None:
    log = table.watch(lambda: None)
    computed(table, [(1, CAT), 2, 3, 4, 5])
    (stored,) = (event for event in log.drain() if isinstance(event, BlockStored))
    content = np.array([1, 2, 3, 4], np.int32).tobytes()
    assert stored.tokens == content
    assert stored.hash == chained_sha256(bytes(32), b"", content, by_block(((0, CAT),), 4)[0])


@pytest.mark.parametrize(
    ("positions", "keys", "reason"),
    [
        ([5], [CAT], "EXTRA_KEY_POSITION"),
        ([-1], [CAT], "EXTRA_KEY_POSITION"),
        ([3, 3], [CAT, DOG], "EXTRA_KEY_POSITION"),
        ([3, 2], [CAT, DOG], "EXTRA_KEY_POSITION"),
        ([3], [b""], "EXTRA_KEY_LENGTH"),
        ([3], [b"x" * 257], "EXTRA_KEY_LENGTH"),
        ([3], [], "UNEQUAL_COLUMNS"),
    ],
)
def test_keys_that_cannot_be_are_refused(
    table: PageTable, positions: list[int], keys: list[bytes], reason: str
) -> None:
    before = snapshot(table)
    extra = ExtraKeys(np.zeros(len(positions), np.int64), np.array(positions, np.int64), keys)
    for command in (
        lambda: table.create(prompt(1, 2, 3, 4, 5), extra=extra),
        lambda: table.begin([5], prompt(1, 2, 3, 4, 5), [0], extra=extra),
        lambda: table.pin(prompt(1, 2, 3, 4, 5), 10, extra=extra),
    ):
        with pytest.raises(InvalidArgument) as refusal:
            command()
        assert refusal.value.reason == reason
    assert snapshot(table) == before


@pytest.mark.parametrize(("place", "position"), [(0, 4), (0, 6), (1, 5), (-1, 5)])
def test_keys_for_tokens_that_are_not_new_are_refused(table: PageTable, place: int, position: int) -> None:
    sequence = computed(table, [1, 2, 3, 4, 5])
    before = snapshot(table)
    extra = ExtraKeys(np.array([place]), np.array([position]), [CAT])
    with pytest.raises(InvalidArgument, match="extra key"):
        table.grow([sequence], [1], [6], [0], extra=extra)
    assert snapshot(table) == before


def test_an_atomic_batch_that_fails_takes_keys_back(table: PageTable) -> None:
    sequence = computed(table, picture(CAT))
    before = snapshot(table), dict(table._sequences.extra)
    tokens = [(IMAGE, DOG), IMAGE]
    with pytest.raises(Refused):
        execute(
            table,
            [
                Truncate(np.array([sequence]), np.array([1])),
                Append(np.array([sequence]), np.array([2]), plain(tokens), None, extra=keys_of(tokens, first=[1])),
                Create(np.array([2]), plain(tokens), np.array([0]), b"", extra=keys_of(tokens)),
                Fork(np.array([sequence]), np.array([1])),
                Free(np.array([sequence])),
                Free(np.array([99])),
            ],
            atomic=True,
        )
    after = snapshot(table)
    # All but the ids that were counted off.
    assert [value for i, value in enumerate(after) if i != 1] == [value for i, value in enumerate(before[0]) if i != 1]
    assert table._sequences.extra == before[1]
