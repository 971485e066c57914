"""The step loop with several tenants: quotas and floors hold, and nobody waits for another's quota."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_step_loop import World, prompt_of

from block_manager_svc.core.errors import ResourceExhausted
from block_manager_svc.scheduling.request import Sampling


class Tenants(World):
    def submit_for(self, tenant: int, prompt: list[int], max_tokens: int = 8) -> int:
        params = Sampling(max_tokens=max_tokens)
        call = self.loop.submit(np.array(prompt, np.int32), params, tenant=tenant, realm=b"%d" % tenant)
        self.asked[call], self.received[call] = (prompt, params), []
        return call

    def running(self) -> list[int]:
        return [sample.call.id for sample in self.loop._running]


def test_a_tenant_at_its_quota_holds_up_itself_only() -> None:
    world = Tenants(num_blocks=64)
    world.loop.table.set_quota(1, quota=8)
    first, second = world.submit_for(1, prompt_of(20, 1)), world.submit_for(1, prompt_of(20, 2))
    other = world.submit_for(2, prompt_of(40, 3))
    world.step()
    assert world.running() == [first, other]
    world.run()
    for call in (first, second, other):
        world.assert_undisturbed(call)


def test_what_never_fits_in_a_quota_is_refused_at_once() -> None:
    world = Tenants(num_blocks=64)
    world.loop.table.set_quota(1, quota=8)
    world.loop.table.set_quota(2, floor=40)
    with pytest.raises(ResourceExhausted) as refusal:
        world.submit_for(1, prompt_of(40), max_tokens=8)
    assert refusal.value.reason == "PROMPT_EXCEEDS_POOL"
    with pytest.raises(ResourceExhausted):
        world.submit_for(3, prompt_of(100), max_tokens=8)
    world.submit_for(2, prompt_of(100), max_tokens=8)
    world.run()


def test_who_borrows_gives_way_not_who_is_within_its_floor() -> None:
    world = Tenants(num_blocks=24, token_budget=100)
    world.loop.table.set_quota(1, floor=10)
    borrowers = [world.submit_for(2, prompt_of(20, salt), max_tokens=12) for salt in (1, 2)]  # 8 blocks in the end
    world.step()
    guaranteed = world.submit_for(1, prompt_of(30, 3), max_tokens=10)  # the youngest; 10 blocks in the end
    world.run()
    assert [world.loop.call(call).preemptions > 0 for call in (*borrowers, guaranteed)] == [False, True, False]
    for call in (*borrowers, guaranteed):
        world.assert_undisturbed(call)


def test_a_tenant_that_outgrows_its_quota_preempts_its_own() -> None:
    world = Tenants(num_blocks=64, token_budget=100)
    world.loop.table.set_quota(1, quota=9)
    calls = [world.submit_for(1, prompt_of(14, salt), max_tokens=16) for salt in (1, 2)]
    other = world.submit_for(2, prompt_of(14, 3), max_tokens=16)
    world.run()
    assert [world.loop.call(call).preemptions for call in (*calls, other)] == [0, 1, 0]
    for call in (*calls, other):
        world.assert_undisturbed(call)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_with_random_quotas_and_floors_every_call_gets_its_tokens(data: st.DataObject) -> None:
    world = Tenants(num_blocks=40, token_budget=data.draw(st.sampled_from([16, 40, 100])))
    floors = [data.draw(st.integers(0, 9)) for _ in range(3)]
    for tenant, floor in enumerate(floors):
        world.loop.table.set_quota(tenant, floor=floor, quota=data.draw(st.integers(12, 40)))
    calls = []
    for _ in range(data.draw(st.integers(1, 12))):
        tenant, length = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 30))
        calls.append(world.submit_for(tenant, prompt_of(length, data.draw(st.integers(0, 3))), max_tokens=10))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
    world.run()
    for call in calls:
        world.assert_undisturbed(call)
