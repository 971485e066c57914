"""S3-FIFO as the paper defines it, by hand and against lists. Under the page table: the state machine and the walk."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.core import PageTable
from block_manager_svc.core.eviction import S3FIFO


class Cache:
    """The policy over blocks whose tokens are written down here: block n holds token n unless told otherwise."""

    def __init__(self, num_blocks: int) -> None:
        self.holds = {n: n for n in range(num_blocks)}
        self.policy = S3FIFO(num_blocks, lambda block: self.holds[block].to_bytes(4, "little"))

    def add(self, *blocks: int) -> None:
        self.policy.add(np.array(blocks, np.int64))

    def find(self, *blocks: int) -> None:
        """Found, used, and given back."""
        self.policy.remove(np.array(blocks, np.int64))
        self.add(*blocks)

    def evict(self, count: int) -> list[int]:
        expected = self.order()[:count]
        evicted = self.policy.evict(count).tolist()
        assert evicted == expected
        return evicted

    def order(self) -> list[int]:
        return self.policy.order().tolist()


def test_what_was_never_found_goes_in_the_order_in_which_it_came() -> None:
    cache = Cache(10)
    cache.add(4, 2)
    cache.add(9)
    assert cache.evict(2) == [4, 2]
    assert (len(cache.policy), cache.evict(0), cache.evict(1), len(cache.policy)) == (1, [], [9], 0)


def test_one_find_is_not_enough_to_stay_and_two_are() -> None:
    """Algorithm 1, EVICTS: `if t.freq > 1: insert t to M`."""
    cache = Cache(10)
    cache.add(1, 2, 3)
    cache.find(1)
    cache.find(2)
    cache.find(2)
    assert cache.evict(2) == [3, 1]
    assert cache.order() == [2]


def test_a_find_in_the_main_queue_is_worth_one_round_and_at_most_three() -> None:
    """Algorithm 1, READ: `x.freq = min(x.freq + 1, 3)`; EVICTM: reinserted with `t.freq - 1` while it is above 0."""
    cache = Cache(40)
    cache.add(1, 2)
    for _ in range(9):
        cache.find(1, 2)
    cache.add(3)
    assert cache.evict(1) == [3]  # 1 and 2 moved to the main queue, with no use left
    cache.find(1)
    cache.add(*range(10, 15))
    assert cache.evict(5) == [10, 11, 12, 13, 14]
    assert cache.evict(2) == [2, 1]

    cache.add(5, 6)
    for _ in range(2):
        cache.find(5, 6)
    cache.add(7)
    assert cache.evict(1) == [7]
    for _ in range(9):
        cache.find(5)
    for _ in range(3):
        cache.find(6)
    assert cache.order() == [5, 6]  # as often as counts, both; found nine times or three, the older goes


def test_the_small_queue_gives_while_it_has_a_tenth() -> None:
    """Algorithm 1, EVICT: `if S.size >= 0.1 * cache size: EVICTS() else: EVICTM()`."""
    cache = Cache(60)
    main = list(range(1, 10))
    cache.add(*main)
    cache.find(*main)
    cache.find(*main)
    cache.add(50)
    assert cache.evict(1) == [50]  # one of ten
    cache.add(10)
    cache.find(10)
    cache.find(10)
    cache.add(51)
    # 10 goes on to the main queue. Then 51 is one of eleven, and when 1 is gone, one of ten.
    assert cache.evict(3) == [1, 51, 2]


def test_content_that_comes_back_as_a_ghost_begins_in_the_main_queue() -> None:
    """Algorithm 1, INSERT: `if x in G: insert x to head of M`."""
    cache = Cache(10)
    cache.add(1, 2)
    assert cache.evict(1) == [1]
    cache.holds[5] = 1  # the same tokens, in another block
    cache.add(5)
    cache.add(6)
    assert cache.order() == [2, 6, 5]
    # The ghost is used up: a second block with these tokens is new.
    cache.holds[7] = 1
    cache.add(7)
    assert cache.order() == [2, 6, 7, 5]


def test_what_leaves_the_main_queue_leaves_no_ghost() -> None:
    cache = Cache(10)
    cache.add(1)
    cache.find(1)
    cache.find(1)
    assert cache.evict(1) == [1]
    cache.add(2, 1)
    assert cache.order() == [2, 1]
    cache.add(3)
    assert cache.order() == [2, 1, 3]


def test_ghosts_are_bounded_and_the_oldest_goes_first() -> None:
    cache = Cache(10)  # 9 ghosts
    for token in range(100, 110):
        cache.holds[1] = token
        cache.add(1)
        assert cache.evict(1) == [1]
    cache.holds.update({1: 100, 2: 101, 3: 50})
    cache.add(2, 1, 3)
    assert cache.order() == [1, 3, 2]


def test_a_ghost_that_is_left_again_is_young_again() -> None:
    cache = Cache(10)
    for token in (100, *range(101, 109), 100, 109):
        cache.holds[1] = token
        cache.policy.forget(np.array([1], np.int64))
        cache.add(1)
        cache.policy._place[1] = 0  # as if its ghost had not been found
        cache.evict(1)
    assert list(cache.policy._ghosts) == [t.to_bytes(4, "little") for t in (*range(102, 109), 100, 109)]


def test_a_block_with_other_content_begins_anew() -> None:
    cache = Cache(10)
    cache.add(1, 2)
    for _ in range(3):
        cache.find(1, 2)
    block = np.array([1], np.int64)
    cache.policy.remove(block)
    cache.policy.forget(block)
    cache.holds[1] = 77
    cache.add(1)
    assert cache.order() == [1, 2]


def test_a_scan_of_prompts_that_come_once_leaves_those_that_are_asked_for_often() -> None:
    table = PageTable(12, 4, eviction="s3fifo")

    def ask(first: int) -> int:
        sequence = table.create(np.arange(first, first + 9, dtype=np.int32))
        found = table.reuse(sequence)
        table.extend([sequence], [9])
        table.commit([sequence], [9])
        table.free([sequence])
        return found

    assert [ask(10), ask(10), ask(10)] == [0, 8, 8]
    for once in range(100, 300, 20):
        assert ask(once) == 0
    assert ask(10) == 8
    assert table.check() == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "find", "find", "evict", "forget"]),
            st.lists(st.integers(1, 15), unique=True, max_size=8),
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_it_agrees_with_lists(commands: list[tuple[str, list[int]]]) -> None:
    cache = Cache(16)
    cache.holds = {n: n % 5 for n in range(16)}  # some with equal tokens
    small: list[int] = []
    main: list[int] = []
    place: dict[int, list[int]] = {}
    uses = dict.fromkeys(range(16), 0)
    ghosts: list[int] = []

    for command, numbers in commands:
        held = [n for n in numbers if n in small or n in main]
        outside = [n for n in numbers if n not in held]
        if command == "add":
            cache.add(*outside)
            for n in outside:
                if n not in place:
                    place[n] = main if n % 5 in ghosts else small
                    ghosts = [token for token in ghosts if place[n] is small or token != n % 5]
                place[n].append(n)
        elif command == "find":
            cache.find(*held)
            for n in held:
                place[n].remove(n)
                place[n].append(n)
                uses[n] = min(uses[n] + 1, 3)
        elif command == "forget":
            cache.policy.forget(np.array(outside, np.int64))
            for n in outside:
                place.pop(n, None)
                uses[n] = 0
        else:
            count = min(len(numbers), len(small) + len(main))
            victims: list[int] = []
            while len(victims) < count:
                if len(small) >= 0.1 * (len(small) + len(main)):
                    t = small.pop(0)
                    if uses[t] > 1:
                        main.append(t)
                        place[t] = main
                        uses[t] = 0
                    else:
                        ghosts = [*(token for token in ghosts if token != t % 5), t % 5][-14:]
                        victims.append(t)
                else:
                    t = main.pop(0)
                    if uses[t] > 0:
                        main.append(t)
                        uses[t] -= 1
                    else:
                        victims.append(t)
            assert cache.evict(count) == victims
            for n in victims:
                del place[n]
                uses[n] = 0
        assert sorted(cache.order()) == sorted(small + main)
        assert len(cache.policy) == len(small) + len(main)
