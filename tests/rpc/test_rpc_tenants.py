"""Callers with tokens: who may call what, and that no tenant meets another's prefixes, sequences or replies."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_batches import append, batch, commit, create, free, i32, of_u32, of_u64, pin, reasons, ref, u32, unpin
from rpc_link_client import LinkExecutor
from rpc_scripted import Refusal, Service, refusal_of, request, running_service, until

from block_manager_svc.core.step import OpKind
from block_manager_svc.identity import Callers
from block_manager_svc.manager import Limits
from pagedkv.v1 import block_manager_pb2 as pb
from pagedkv.v1 import executor_link_pb2_grpc, generation_pb2

PROMPT = list(range(10, 60))  # three whole blocks and a tail
ROLES = ("gateway", "engine", "operator", "executor")

Metadata = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


@asynccontextmanager
async def service_with(tmp_path: Path, *shares: str, **options: object) -> AsyncIterator[Service]:
    """Tokens are named as what they stand for: `blue-gateway` is of tenant blue, in this role."""
    path = tmp_path / "tokens"
    lines = [
        f"token {hashlib.sha256(f'{tenant}-{role}'.encode()).hexdigest()} {tenant} {role}"
        for tenant in ("blue", "red", "green")
        for role in ROLES
    ]
    path.write_text("\n".join([*lines, *shares]))
    path.chmod(0o600)
    async with running_service(callers=Callers(path), **options) as service:
        yield service


async def refused(call: object) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return refusal_of(caught.value)


async def cached_tokens(service: Service, token: str) -> int:
    """Of one generation of PROMPT."""
    call = service.generation.Generate(request(PROMPT, max_tokens=2), metadata=bearer(token))
    return [message async for message in call][-1].usage.cached_tokens


async def step(service: Service, tenant: str, *items: pb.BatchItem, **fields: object) -> pb.StepBatchResponse:
    return await service.reads.StepBatch(batch(*items, **fields), metadata=bearer(f"{tenant}-engine"))


async def listed(service: Service, token: str) -> list[int]:
    reply = await service.reads.ListSequences(pb.ListSequencesRequest(), metadata=bearer(token))
    tables = await service.reads.GetBlockTables(pb.GetBlockTablesRequest(), metadata=bearer(token))
    assert list(reply.sequence) == list(tables.sequence)
    for sequence in reply.sequence:
        await service.reads.GetSequence(pb.GetSequenceRequest(sequence=sequence), metadata=bearer(token))
    return list(reply.sequence)


# --- who may call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_MISSING"),
        ((("authorization", "Basic Ymx1ZQ=="),), "TOKEN_MISSING"),
        ((("authorization", "Bearer "),), "TOKEN_MISSING"),
        (bearer("blue-nobody"), "TOKEN_UNKNOWN"),
    ],
)
async def test_a_call_of_nobody_is_refused_by_every_kind_of_rpc(
    tmp_path: Path, metadata: Metadata, reason: str
) -> None:
    async with service_with(tmp_path) as service:
        link = executor_link_pb2_grpc.ExecutorLinkServiceStub(service.channel)
        for call in (
            service.reads.GetPool(pb.GetPoolRequest(), metadata=metadata),
            service.generation.Generate(request(PROMPT), metadata=metadata).read(),
            link.Attach(metadata=metadata).read(),
        ):
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
            assert "blue-nobody" not in refusal.message


async def test_the_scheme_is_found_in_any_case(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        metadata = (("authorization", "bEARER blue-operator"),)
        assert (await service.reads.GetPool(pb.GetPoolRequest(), metadata=metadata)).block_size == 16


async def test_health_and_reflection_stay_open(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        reply = await health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


ALLOWED = {
    "Generate": {"gateway"},
    "ListModels": {"gateway", "engine", "operator"},
    "StepBatch": {"engine"},
    "GetPool": {"engine", "operator"},
    "ListSequences": {"engine", "operator"},
    "GetBlockTables": {"engine", "operator"},
    "GetSequence": {"engine", "operator"},
    "Match": {"gateway", "engine", "operator"},
    "WatchEvents": {"gateway", "engine", "operator"},
    "Audit": {"operator"},
    "ResetCache": {"operator"},
    "Resize": {"operator"},
    "SetQuota": {"operator"},
    "Compact": {"operator"},
}

FIELDS = {"Resize": {"limit": 100}, "SetQuota": {"tenant": "red"}, "GetSequence": {"sequence": 1}}


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_call_what_is_its_own(tmp_path: Path, role: str) -> None:
    async with service_with(tmp_path) as service:
        made = await step(service, "blue", create([1, 2, 3]))
        metadata = bearer(f"blue-{role}")
        for method, roles in ALLOWED.items():
            if method == "Generate":
                call = service.generation.Generate(request(PROMPT, max_tokens=1), metadata=metadata).read()
            elif method == "ListModels":
                call = service.generation.ListModels(generation_pb2.ListModelsRequest(), metadata=metadata)
            else:
                fields = FIELDS.get(method, {})
                call = getattr(service.reads, method)(getattr(pb, f"{method}Request")(**fields), metadata=metadata)
                call = call.read() if method == "WatchEvents" else call
            if role in roles:
                await call
                continue
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED")
            assert refusal.numbers == {
                "method": method,
                "needed": ",".join(sorted(roles)),
                "tenant": "blue",
                "roles": role,
            }
        await step(service, "blue", free(*of_u64(made.results[0].sequences)))


def test_every_rpc_of_the_block_manager_has_its_roles_written_down() -> None:
    methods = pb.DESCRIPTOR.services_by_name["BlockManagerService"].methods
    assert {method.name for method in methods} <= ALLOWED.keys()


async def test_only_an_executor_may_attach(tmp_path: Path) -> None:
    async with service_with(tmp_path, attached=False) as service:
        for role in ("gateway", "engine", "operator"):
            stream = LinkExecutor(service, metadata=bearer(f"blue-{role}")).dial()
            assert (await stream.refusal()).reason == "ROLE_NOT_ALLOWED"
        stream = await LinkExecutor(service, metadata=bearer("blue-executor")).attach()
        assert service.manager.model is not None
        stream.call.cancel()


async def test_a_token_taken_out_of_the_file_is_unknown_once_it_is_read_again(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        (tmp_path / "tokens").write_text("")
        assert await listed(service, "blue-operator") == []
        service.server.reload_tokens()
        refusal = await refused(service.reads.GetPool(pb.GetPoolRequest(), metadata=bearer("blue-operator")))
        assert refusal.reason == "TOKEN_UNKNOWN"


# --- prefixes ---------------------------------------------------------------------------------------------------------


async def test_no_tenant_finds_anothers_prefixes(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        assert await cached_tokens(service, "blue-gateway") == 0
        assert await cached_tokens(service, "blue-gateway") == 48
        assert await cached_tokens(service, "red-gateway") == 0
        assert await cached_tokens(service, "red-gateway") == 48


async def test_tenants_of_a_share_group_find_each_others_and_nobody_else_does(tmp_path: Path) -> None:
    async with service_with(tmp_path, "share friends blue red") as service:
        assert await cached_tokens(service, "blue-gateway") == 0
        assert await cached_tokens(service, "red-gateway") == 48
        assert await cached_tokens(service, "green-gateway") == 0


async def test_engines_find_prefixes_of_their_own_tenant_alone(tmp_path: Path) -> None:
    items = create(PROMPT), commit(ref(0), 50), free(ref(0))
    async with service_with(tmp_path, "share friends blue green") as service:
        cached = []
        for tenant in ("blue", "red", "blue", "green"):
            reply = await step(service, tenant, *items)
            assert reasons(reply) == ["", "", ""]
            cached.append(of_u32(reply.results[0].cached))
        assert cached == [[0], [0], [48], [48]]


# --- sequences --------------------------------------------------------------------------------------------------------


async def test_sequences_are_there_for_their_own_tenant_and_for_operators_alone(tmp_path: Path) -> None:
    async with service_with(tmp_path, "share friends blue red") as service:
        [blue] = of_u64((await step(service, "blue", create(PROMPT))).results[0].sequences)
        [red] = of_u64((await step(service, "red", create(PROMPT))).results[0].sequences)
        service.executor.open = False
        call = service.generation.Generate(request(PROMPT), metadata=bearer("blue-gateway"))
        table = service.manager.page_table
        assert table is not None
        await until(lambda: table.sequences().size == 3, "the call has its sequence")
        generated = max(await listed(service, "green-operator"))
        assert await listed(service, "blue-engine") == [blue, generated]
        assert await listed(service, "red-engine") == [red]
        assert await listed(service, "green-engine") == []
        assert await listed(service, "green-operator") == [blue, red, generated]
        call.cancel()
        for tenant, sequence in (("blue", blue), ("red", red)):
            assert reasons(await step(service, tenant, free(sequence))) == [""]


async def test_anothers_sequence_is_as_one_that_never_was(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        [blue] = of_u64((await step(service, "blue", create(PROMPT))).results[0].sequences)
        [red] = of_u64((await step(service, "red", create(PROMPT))).results[0].sequences)
        never = 1 << 40

        async def answers(hidden: int) -> list[object]:
            """What red is told of a sequence, alone, before and after one that never was, and named twice."""
            found: list[object] = []
            for named in ([hidden], [hidden, never], [never, hidden], [red, hidden], [hidden, hidden]):
                tables = service.reads.GetBlockTables(
                    pb.GetBlockTablesRequest(sequence=named), metadata=bearer("red-engine")
                )
                refusal = await refused(tables)
                error = (await step(service, "red", free(*named))).results[0].error
                for reason, sequence in (
                    (refusal.reason, refusal.numbers["sequence"]),
                    (error.reason, error.metadata["sequence"]),
                ):
                    found.append((reason, "hidden" if int(sequence) == hidden else int(sequence)))
            return found

        assert await answers(blue) == await answers(1 << 41)
        assert {reason for reason, _ in await answers(blue)} == {"SEQUENCE_NOT_FOUND"}  # type: ignore[misc]
        tables = await service.reads.GetBlockTables(
            pb.GetBlockTablesRequest(sequence=[red, blue]), metadata=bearer("green-operator")
        )
        assert list(tables.sequence) == [red, blue]
        assert reasons(await step(service, "blue", free(blue))) == [""]
        assert reasons(await step(service, "red", free(red))) == [""]


async def test_an_operator_sees_anothers_sequence_and_not_its_tokens(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        (blue,) = of_u64((await step(service, "blue", create(PROMPT))).results[0].sequences)
        whole = pb.GetSequenceRequest(sequence=blue, upto=50)
        mine = await service.reads.GetSequence(whole, metadata=bearer("blue-engine"))
        assert (mine.tenant, np.frombuffer(mine.token_ids, "<i4").tolist()) == ("blue", PROMPT)
        refusal = await refused(service.reads.GetSequence(whole, metadata=bearer("red-operator")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "TOKENS_PRIVATE")
        seen = await service.reads.GetSequence(pb.GetSequenceRequest(sequence=blue), metadata=bearer("red-operator"))
        assert (seen.tenant, seen.tokens, seen.token_ids) == ("blue", 50, b"")
        refusal = await refused(service.reads.GetSequence(whole, metadata=bearer("red-engine")))
        assert refusal.reason == "SEQUENCE_NOT_FOUND"
        await step(service, "blue", free(blue))


async def test_match_sees_what_a_tenants_own_create_would_find(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        await step(service, "blue", create(PROMPT), commit(ref(0), 50), free(ref(0)))
        asked = pb.MatchRequest(counts=u32(50), tokens=i32(*PROMPT))
        for tenant, cached in (("blue", 48), ("red", 0)):
            reply = await service.reads.Match(asked, metadata=bearer(f"{tenant}-engine"))
            assert of_u32(reply.cached) == [cached]
        asked.generate = True
        assert await cached_tokens(service, "red-gateway") == 0
        for tenant, cached in (("blue", 0), ("red", 48)):
            reply = await service.reads.Match(asked, metadata=bearer(f"{tenant}-gateway"))
            assert of_u32(reply.cached) == [cached]


async def test_pins_of_another_tenant_are_not_there(tmp_path: Path) -> None:
    async with service_with(tmp_path, "share friends blue red") as service:
        made = await step(service, "blue", create(PROMPT), commit(ref(0), 50), pin(PROMPT, 60_000), free(ref(0)))
        assert reasons(made) == [""] * 4
        assert reasons(await step(service, "red", unpin(made.results[2].pin))) == ["PIN_NOT_FOUND"]
        assert reasons(await step(service, "blue", unpin(made.results[2].pin))) == [""]


async def test_a_request_id_is_its_tenants_own(tmp_path: Path) -> None:
    async with service_with(tmp_path) as service:
        first = await step(service, "blue", create(PROMPT), request_id="one")
        other = await step(service, "red", create(PROMPT[:5]), request_id="one")
        again = await step(service, "blue", create(PROMPT), request_id="one")
        assert (first.replayed, other.replayed, again.replayed) == (False, False, True)
        assert first.results[0].sequences == again.results[0].sequences != other.results[0].sequences
        for tenant, reply in (("blue", first), ("red", other)):
            await step(service, tenant, free(*of_u64(reply.results[0].sequences)))


# --- what is left in the blocks ---------------------------------------------------------------------------------------


def zeroed(service: Service) -> list[int]:
    """Blocks that steps have zeroed."""
    return [b for plan in service.executor.plans for b in plan.ops.dst[plan.ops.kind == OpKind.ZERO].tolist()]


async def test_what_one_tenant_has_written_is_zeroed_before_another_gets_the_block(tmp_path: Path) -> None:
    async with service_with(tmp_path, num_blocks=8) as service:
        await step(service, "blue", create([1] * 40), free(ref(0)))
        made = await step(service, "red", create([2] * 20))
        assert made.step_id > 0
        assert zeroed(service) == [1, 2]
        grown = await step(service, "red", append(of_u64(made.table_sequence), [3] * 40))
        assert zeroed(service) == [1, 2, 3]  # the others were nobody's
        assert (grown.step_id > made.step_id, grown.results[0].swapped_blocks) == (True, 0)
        await step(service, "red", free(*of_u64(made.table_sequence)))
        assert (await step(service, "red", create([2] * 50), free(ref(0)))).step_id == 0
        assert await cached_tokens(service, "blue-gateway") == 0
        assert zeroed(service) == [1, 2, 3, 1, 2, 3, 4]
        assert (await service.reads.Audit(pb.AuditRequest(), metadata=bearer("blue-operator"))).violations == []


async def test_blocks_are_not_zeroed_where_that_is_not_wanted(tmp_path: Path) -> None:
    async with service_with(tmp_path, num_blocks=8, limits=Limits(zero_between_tenants=False)) as service:
        await step(service, "blue", create([1] * 40), free(ref(0)))
        assert (await step(service, "red", create([2] * 20), free(ref(0)))).step_id == 0


# --- what they are charged for ----------------------------------------------------------------------------------------


async def usage(service: Service, token: str) -> dict[str, pb.TenantUsage]:
    pool = await service.reads.GetPool(pb.GetPoolRequest(), metadata=bearer(token))
    return {each.tenant: each for each in pool.tenants}


async def set_quota(service: Service, tenant: str, **quota: int) -> pb.SetQuotaResponse:
    request = pb.SetQuotaRequest(tenant=tenant, **quota)
    return await service.reads.SetQuota(request, metadata=bearer("blue-operator"))


async def test_each_tenant_is_charged_for_its_own_and_an_operator_sees_all(tmp_path: Path) -> None:
    async with service_with(tmp_path, num_blocks=40) as service:
        await step(service, "blue", create([1] * 20))
        await cached_tokens(service, "red-gateway")
        seen = await usage(service, "green-operator")
        assert {name: (each.charged, each.cached) for name, each in seen.items()} == {
            "default": (0, 0),
            "blue": (2, 0),
            "green": (0, 0),
            "red": (3, 3),
        }
        assert list(await usage(service, "red-engine")) == ["red"]
        await step(service, "blue", free(*await listed(service, "blue-engine")))


async def test_a_quota_bounds_engines_and_calls_and_a_floor_is_kept_from_others(tmp_path: Path) -> None:
    async with service_with(tmp_path, num_blocks=40) as service:
        reply = await set_quota(service, "red", floor=10, quota=12)
        assert (reply.usage.tenant, reply.usage.floor, reply.usage.quota) == ("red", 10, 12)
        assert not reply.usage.HasField("host_quota")
        first = await step(service, "blue", create([1] * 16 * 29), create([2]))
        assert reasons(first) == ["", "OUT_OF_BLOCKS"]
        second = await step(service, "red", create([1] * 16 * 10), create([2] * 33), create([3] * 16 * 13))
        assert reasons(second) == ["", "OUT_OF_BLOCKS", "NEVER_FITS"]
        refusal = await refused(
            anext(
                aiter(
                    service.generation.Generate(request(list(range(200)), max_tokens=8), metadata=bearer("red-gateway"))
                )
            )
        )
        assert refusal.reason == "PROMPT_EXCEEDS_POOL"
        for tenant in ("blue", "red"):
            await step(service, tenant, free(*await listed(service, f"{tenant}-engine")))


async def test_a_quota_holds_for_later_pools_and_its_refusals_change_nothing(tmp_path: Path) -> None:
    async with service_with(tmp_path, num_blocks=40) as service:
        await set_quota(service, "red", floor=30, quota=35)
        for tenant, quota, reason in (
            ("nobody", {}, "TENANT_UNKNOWN"),
            ("red", {"floor": 5, "quota": 4}, "QUOTA_OUT_OF_RANGE"),
            ("blue", {"floor": 10}, "FLOORS_EXCEED_POOL"),
        ):
            assert (await refused(set_quota(service, tenant, **quota))).reason == reason
        assert (await refused(service.reads.SetQuota(pb.SetQuotaRequest(), metadata=bearer("red-engine")))).reason == (
            "ROLE_NOT_ALLOWED"
        )
        told = (await usage(service, "blue-operator"))["red"]
        assert (told.floor, told.quota) == (30, 35)
