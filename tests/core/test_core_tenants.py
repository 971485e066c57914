"""Accounts of tenants: 15 blocks of 4 tokens, tenants 1 and 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_model import prompt, run, snapshot

from block_manager_svc.core import PageTable
from block_manager_svc.core.admission import Verdict
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, OutOfBlocks, Refused, ResourceExhausted
from block_manager_svc.core.results import TenantUsage
from block_manager_svc.core.step import OpKind

SHARED = b"group"


@pytest.fixture
def table() -> PageTable:
    return PageTable(16, 4, num_host=10)


def computed(table: PageTable, tenant: int, *tokens: int, namespace: bytes | None = None) -> int:
    sequence = table.create(prompt(*tokens), b"%d" % tenant if namespace is None else namespace, tenant=tenant)
    table.reuse(sequence)
    run(table, sequence)
    return sequence


def charged(table: PageTable, tenant: int) -> tuple[int, int]:
    """Blocks that a tenant is charged for, and how many of them it could lose."""
    usage = table.usage(tenant)
    return usage.charged, usage.cached


def test_a_tenant_is_charged_once_for_each_block_of_its_tables_and_for_what_it_left_in_the_cache(
    table: PageTable,
) -> None:
    a = computed(table, 1, *range(10))
    table.fork(a, 3)
    assert (charged(table, 1), charged(table, 2)) == ((3, 0), (0, 0))
    computed(table, 2, *range(4))
    assert (charged(table, 1), charged(table, 2)) == ((3, 0), (1, 0))
    table.free(table.sequences()[:4])
    assert charged(table, 1) == (2, 2)  # the half-filled block is free
    assert table.check() == []


def test_a_quota_is_never_exceeded_and_what_is_cached_makes_room_first(table: PageTable) -> None:
    table.set_quota(1, quota=4)
    table.free([computed(table, 1, *range(12))])
    assert charged(table, 1) == (3, 3)
    a = computed(table, 1, *range(50, 62))
    assert charged(table, 1) == (4, 1)
    before = snapshot(table)
    with pytest.raises(ResourceExhausted) as refusal:
        table.grow([a], [5], range(5), [0])
    assert (refusal.value.reason, refusal.value.numbers) == ("QUOTA_EXCEEDED", {"needed": 2, "over": 1, "quota": 4})
    assert snapshot(table) == before
    table.grow([a], [4], range(4), [0])
    assert charged(table, 1) == (4, 0)
    computed(table, 2, *range(40))  # the others have the rest
    assert table.check() == []


def test_a_floor_is_there_whatever_others_do(table: PageTable) -> None:
    table.set_quota(1, floor=5)
    assert (table.available(1), table.available(2)) == (15, 10)
    b = computed(table, 2, *range(40))
    with pytest.raises(OutOfBlocks) as refusal:
        table.grow([b], [1], [1], [0])
    assert refusal.value.numbers == {"needed": 1, "available": 0}
    a = computed(table, 1, *range(20))
    assert table.available(1) == 0
    table.free([a])
    # Idle it may be borrowed, but comes back: what tenant 1 has in the cache up to its floor is not evicted.
    assert (table.available(1), table.available(2)) == (5, 0)
    assert table.check() == []


def test_what_is_cached_above_a_floor_is_evicted_first_and_most_from_who_has_most(table: PageTable) -> None:
    table.set_quota(1, floor=2)
    table.free([computed(table, 1, *range(24))])  # 6, of which 2 are protected
    table.free([computed(table, 2, *range(36))])  # 9
    computed(table, 3, *range(28))
    assert (charged(table, 1), charged(table, 2), charged(table, 3)) == ((5, 5), (3, 3), (7, 0))
    computed(table, 3, *range(50, 74))
    assert (charged(table, 1), charged(table, 2), charged(table, 3)) == ((2, 2), (0, 0), (13, 0))
    assert table.check() == []


def test_a_block_of_a_share_group_is_charged_to_all_that_reference_it(table: PageTable) -> None:
    a = computed(table, 1, *range(12), namespace=SHARED)
    b = computed(table, 2, *range(13), namespace=SHARED)
    assert (charged(table, 1), charged(table, 2), table.states().sealed) == ((3, 0), (4, 0), 3)
    table.free([a])
    assert (charged(table, 1), charged(table, 2)) == ((0, 0), (4, 0))
    table.free([b])
    assert charged(table, 2) == (3, 3)  # who was the last has it in the cache
    computed(table, 1, *range(12), namespace=SHARED)
    assert (charged(table, 1), charged(table, 2)) == ((3, 0), (1, 1))  # of three, the last is computed anew
    assert table.check() == []


def test_a_joint_block_counts_towards_nobodys_floor(table: PageTable) -> None:
    """When one of its holders frees it, it does not come back."""
    table.set_quota(1, floor=5)
    a = computed(table, 1, *range(12), namespace=SHARED)
    assert table.available(2) == 10
    computed(table, 2, *range(13), namespace=SHARED)  # two blocks are found
    assert table.available(2) == 6
    b = computed(table, 2, *range(50, 74))
    assert table.available(2) == 0
    table.free([a])
    computed(table, 1, *range(80, 100))
    table.free([b])
    assert table.check() == []


def test_no_namespace_of_its_own_is_found_by_another_tenant(table: PageTable) -> None:
    computed(table, 1, *range(12))
    assert table.match(table.create(prompt(*range(12)), b"2", tenant=2)).blocks == 0


def test_admission_knows_quotas_and_floors(table: PageTable) -> None:
    table.set_quota(1, quota=4)
    table.set_quota(2, floor=6)
    judge = table.admission
    assert judge(prompt(*range(17)), tenant=1).verdict == Verdict.NEVER
    assert judge(prompt(*range(37)), tenant=3).verdict == Verdict.NEVER  # 10 blocks, 9 are nobody's
    assert judge(prompt(*range(60)), tenant=2).verdict == Verdict.OK
    computed(table, 1, *range(12))
    later = judge(prompt(*range(8)), tenant=1)
    assert (later.verdict, later.shortfall) == (Verdict.LATER, 1)
    with pytest.raises(OutOfBlocks):
        table.begin([8], range(8), [0], tenant=1)
    computed(table, 3, *range(20))
    later = judge(prompt(*range(8)), tenant=3)
    assert (later.verdict, later.shortfall) == (Verdict.LATER, 1)


def test_a_reservation_is_charged(table: PageTable) -> None:
    table.set_quota(1, quota=4)
    reservation = table.reserve(3, until=9, tenant=1)
    assert table.usage(1).reserved == 3
    with pytest.raises(ResourceExhausted) as refusal:
        table.reserve(2, until=9, tenant=1)
    assert refusal.value.reason == "QUOTA_EXCEEDED"
    with pytest.raises(Refused, match="not held"):
        table.begin([4], range(4), [0], tenant=2, reservation=reservation)
    table.begin([16], range(16), [0], tenant=1, reservation=reservation)
    assert table.usage(1) == TenantUsage(4, 0, 0, 0, 0, 4, 0, None)
    assert table.check() == []


def test_a_lower_quota_evicts_at_once_and_lets_nothing_new_come_before_enough_is_freed(table: PageTable) -> None:
    a = computed(table, 1, *range(16))
    table.free([computed(table, 1, *range(50, 66))])
    table.set_quota(1, quota=2)
    assert charged(table, 1) == (4, 0)
    with pytest.raises(ResourceExhausted):
        table.grow([a], [1], [1], [0])
    table.truncate([a], [8])
    computed(table, 2, *range(8))
    table.truncate([a], [4])
    table.grow([a], [4], range(4), [0])
    assert table.check() == []


def test_host_slots_have_quotas_and_floors_too(table: PageTable) -> None:
    table.set_quota(1, host_quota=3)
    table.set_quota(2, host_floor=4)
    a, b = computed(table, 1, *range(16)), computed(table, 3, *range(20))
    with pytest.raises(ResourceExhausted) as refusal:
        table.swap([a], [])
    assert (refusal.value.reason, refusal.value.numbers) == ("QUOTA_EXCEEDED", {"needed": 4, "over": 1, "quota": 3})
    with pytest.raises(ResourceExhausted) as refusal:
        table.swap([b], [])  # 8 slots, 4 of them are for tenant 2
    assert (refusal.value.reason, refusal.value.numbers) == ("OUT_OF_HOST_SLOTS", {"needed": 5, "available": 4})
    table.truncate([a, b], [12, 4])
    table.swap([a, b], [])
    assert (table.usage(1).host, table.usage(3).host, charged(table, 1)) == (3, 1, (1, 1))
    table.swap([], [a])
    assert (table.usage(1).host, charged(table, 1)) == (0, (4, 1))
    assert table.check() == []


@pytest.mark.parametrize(
    ("command", "kind", "reason"),
    [
        (lambda t: t.set_quota(1, floor=-1), InvalidArgument, "QUOTA_OUT_OF_RANGE"),
        (lambda t: t.set_quota(1, floor=5, quota=4), InvalidArgument, "QUOTA_OUT_OF_RANGE"),
        (lambda t: t.set_quota(1, host_floor=1, host_quota=0), InvalidArgument, "QUOTA_OUT_OF_RANGE"),
        (lambda t: t.set_quota(1, floor=16), FailedPrecondition, "FLOORS_EXCEED_POOL"),
        (lambda t: t.set_quota(1, host_floor=9), FailedPrecondition, "FLOORS_EXCEED_POOL"),
        (lambda t: t.set_quota(-1), InvalidArgument, "TENANT_OUT_OF_RANGE"),
        (lambda t: t.create(prompt(1), tenant=65536), InvalidArgument, "TENANT_OUT_OF_RANGE"),
    ],
)
def test_what_cannot_be_guaranteed_is_refused(
    table: PageTable, command: Callable[[PageTable], object], kind: type[Refused], reason: str
) -> None:
    table.set_quota(1, floor=3, quota=8)
    before, usage = snapshot(table), table.usage(1)
    with pytest.raises(kind) as refusal:
        command(table)
    assert refusal.value.reason == reason
    assert (snapshot(table), table.usage(1)) == (before, usage)


def test_the_limit_of_the_pool_leaves_floors_alone(table: PageTable) -> None:
    table.set_quota(1, floor=6)
    computed(table, 2, *range(12))
    with pytest.raises(FailedPrecondition, match="guaranteed"):
        table.resize(8)
    table.resize(9)
    assert (table.available(1), table.available(2)) == (6, 0)


def test_a_pin_may_not_keep_from_others_what_they_are_guaranteed(table: PageTable) -> None:
    table.free([computed(table, 1, *range(60))])
    table.set_quota(2, floor=3)
    with pytest.raises(OutOfBlocks):
        table.pin(prompt(*range(60)), until=9, namespace=b"1")
    table.pin(prompt(*range(48)), until=9, namespace=b"1")
    computed(table, 2, *range(12))
    assert table.check() == []


def test_what_was_there_before_the_first_tenant_is_charged_to_tenant_0(table: PageTable) -> None:
    a = table.create(prompt(*range(10)))
    run(table, a)
    table.free([table.fork(a)[0]])
    reservation = table.reserve(2, until=9)
    assert table.usage(0) == TenantUsage(3, 0, 2, 0, 0, None, 0, None)
    assert table.usage(1) == TenantUsage(0, 0, 0, 0, 0, None, 0, None)
    table.set_quota(1, floor=4)
    assert table.usage(0) == TenantUsage(3, 0, 2, 0, 0, None, 0, None)
    table.release([reservation])
    table.free([a])
    assert table.usage(0) == TenantUsage(2, 2, 0, 0, 0, None, 0, None)
    assert table.reset_cache() == 2
    assert table.usage(0) == TenantUsage(0, 0, 0, 0, 0, None, 0, None)
    assert table.check() == []


@pytest.mark.parametrize("end", ["free", "drop", "truncate"])
def test_what_is_given_back_above_the_quota_is_not_cached(table: PageTable, end: str) -> None:
    """The quota was lowered while the blocks were in use: they go as soon as nothing references them."""
    a = computed(table, 1, *range(16))
    both = [a, *table.fork(a).tolist()]
    table.set_quota(1, quota=2)
    assert charged(table, 1) == (4, 0)
    getattr(table, end)(both, *([[4, 4]] if end == "truncate" else []))
    assert charged(table, 1) == (2, 1 if end == "truncate" else 2)
    assert table.check() == []


def test_what_is_unpinned_above_the_quota_is_not_cached(table: PageTable) -> None:
    a = computed(table, 1, *range(16))
    table.pin(prompt(*range(16)), 10, b"1")
    table.set_quota(1, quota=2)
    table.free([a])
    assert charged(table, 1) == (4, 0)
    table.advance(10)
    assert charged(table, 1) == (2, 2)
    assert table.check() == []


def test_who_must_give_way_is_told_before_anything_is_taken(table: PageTable) -> None:
    a, b = computed(table, 1, *range(28)), computed(table, 2, *range(28))
    assert table.crowded([a, b], [28, 28]) == frozenset()
    for sequence in (a, b):
        table.append([sequence], [7])
    assert table.crowded([a], [29]) == frozenset()  # one block is left
    assert table.crowded([a, b], [29, 29]) == {1, 2}
    table.set_quota(1, quota=7)
    assert table.crowded([a, b], [29, 29]) == {1}
    table.set_quota(1, quota=9)
    table.set_quota(2, floor=8)
    assert table.crowded([a, b], [29, 29]) == {1}
    assert table.available_above_quota(1) == 0
    assert table.available_above_quota(2) == 1
    assert (table.most(1), table.most(2)) == (7, 15)


def test_a_pool_without_tenants_is_crowded_as_a_whole() -> None:
    table = PageTable(4, 4)
    sequence = table.create(prompt(*range(16)))
    assert table.crowded([sequence], [12]) == frozenset()
    assert table.crowded([sequence], [16]) == {0}
    assert (table.available_above_quota(), table.most()) == (3, 3)


def test_who_shares_blocks_with_another_tenant_and_finds_them_again_is_charged_once(table: PageTable) -> None:
    computed(table, 1, *range(9), namespace=SHARED)
    computed(table, 2, *range(9), namespace=SHARED)
    assert (charged(table, 1), charged(table, 2)) == ((3, 0), (3, 0))
    again = table.begin([9], range(9), [0], SHARED, tenant=2)
    assert again.cached.tolist() == [8]
    assert (charged(table, 1), charged(table, 2)) == ((3, 0), (4, 0))
    table.free(again.sequences)
    table.set_quota(2, quota=3)
    assert table.admission(range(9), namespace=SHARED, tenant=2).verdict == Verdict.LATER
    assert table.check() == []


def test_a_block_is_zeroed_when_it_comes_to_another_tenant_than_wrote_it(table: PageTable) -> None:
    a = table.begin([10], range(10), [0], tenant=1)
    assert a.ops.kind.size == 0  # nobody's before
    table.free(a.sequences)
    mine = table.begin([6], range(6), [0], tenant=1)
    assert mine.ops.kind.size == 0  # its own
    table.free(mine.sequences)
    b = table.begin([17], range(17), [0], tenant=2)
    assert (b.ops.kind.tolist(), b.ops.dst.tolist()) == ([OpKind.ZERO] * 3, [1, 2, 3])
    table.commit(b.sequences, [17])
    table.swap(b.sequences, [])
    c = table.begin([9], range(50, 59), [0], tenant=1)
    assert c.ops.dst.tolist() == [1, 2, 3]  # what was left behind
    table.swap([], b.sequences)
    assert table.tables(b.sequences).indices.tolist() == [4, 5, 6, 7, 8]
    table.free(b.sequences)
    assert table.begin([20], range(20), [0], tenant=2).ops.kind.size == 0


def test_a_copy_overwrites_what_another_tenant_left_and_needs_no_zero(table: PageTable) -> None:
    table.free(table.begin([8], range(8), [0], tenant=1).sequences)
    a = table.begin([6], range(6), [0], tenant=2)
    table.commit(a.sequences, [6])
    assert a.ops.dst.tolist() == [1, 2]
    table.free(table.begin([8], range(50, 58), [0], tenant=1).sequences)
    (child,) = table.fork(int(a.sequences[0])).tolist()
    grown = table.grow([child], [4], range(4), [0])
    assert (grown.extended.copy_dst.tolist(), grown.extended.zeroed.tolist()) == ([3], [4])
    assert grown.extended.ops().kind.tolist() == [OpKind.COPY, OpKind.ZERO]


def test_what_was_written_before_there_were_tenants_was_the_first_tenant_s(table: PageTable) -> None:
    table.free(table.begin([8], range(8), [0]).sequences)
    assert table.begin([4], range(4), [0], tenant=1).ops.dst.tolist() == [1]


def test_nothing_is_zeroed_where_that_is_not_wanted() -> None:
    table = PageTable(16, 4, zero_crossing=False)
    table.free(table.begin([8], range(8), [0], tenant=1).sequences)
    assert table.begin([8], range(8), [0], tenant=2).ops.kind.size == 0
