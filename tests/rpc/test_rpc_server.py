from __future__ import annotations

import asyncio
import contextlib
import re
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_scripted import DEADLINE_S, Service, refusal_of, request, running_service, until

from block_manager_svc.manager import Limits, Manager
from block_manager_svc.rpc.convert import step_body
from block_manager_svc.rpc.server import BLOCK_MANAGER, EXECUTOR_LINK, GENERATION, CannotListen, Server
from pagedkv.v1 import block_manager_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(service: Service, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def becomes(service: Service, name: str, status: int) -> None:
    """Waits until a watcher of this health is told so."""
    watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest(service=name))
    async with asyncio.timeout(DEADLINE_S):
        while (await watch.read()).status != status:
            pass
    watch.cancel()


async def test_health_follows_the_executor() -> None:
    async with running_service(attached=False) as service:
        for name in ("", GENERATION):
            assert await health(service, name) == NOT_SERVING
        for name in (BLOCK_MANAGER, EXECUTOR_LINK):
            assert await health(service, name) == SERVING

        service.executor.attach()
        for name in ("", GENERATION, BLOCK_MANAGER, EXECUTOR_LINK):
            await becomes(service, name, SERVING)

        service.executor.detach()
        for name in ("", GENERATION):
            await becomes(service, name, NOT_SERVING)
        for name in (BLOCK_MANAGER, EXECUTOR_LINK):
            assert await health(service, name) == SERVING


async def test_a_watcher_of_health_is_told_of_changes() -> None:
    async with running_service(attached=False) as service:
        watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest(service=GENERATION))
        assert (await watch.read()).status == NOT_SERVING
        service.executor.attach()
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_health_of_a_service_that_is_not_here_is_not_found() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(service, "pagedkv.v1.Nothing")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_names_every_service() -> None:
    async with running_service() as service:
        stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        (response,) = [response async for response in call]
        names = {each.name for each in response.list_services_response.service}
        assert {GENERATION, BLOCK_MANAGER, EXECUTOR_LINK, "grpc.health.v1.Health"} <= names


async def test_an_unknown_method_is_unimplemented() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.channel.unary_unary("/pagedkv.v1.GenerationService/Nothing")(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def loopbacks() -> list[str]:
    """Those of this machine; some have no IPv6."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return ["127.0.0.1", "localhost", "[::1]"]
    return ["127.0.0.1", "localhost"]


@pytest.mark.parametrize("host", loopbacks())
async def test_it_listens_where_it_is_told(host: str) -> None:
    server = Server(Manager(Limits(), step_body), f"{host}:0", write_timeout=5)
    address = await server.start()
    assert address.rpartition(":")[0] == host
    async with grpc.aio.insecure_channel(address) as channel:
        status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == NOT_SERVING
    await server.stop()


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_taken_port_is_told_by_name(reuse: bool) -> None:
    with socket.socket() as taken:
        if reuse:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match=re.escape(address)):
            await Server(Manager(Limits(), step_body), address, write_timeout=5).start()


async def test_an_address_of_another_machine_is_told_by_name() -> None:
    with pytest.raises(CannotListen, match=re.escape("192.0.2.1:0")):
        await Server(Manager(Limits(), step_body), "192.0.2.1:0", write_timeout=5).start()


async def test_draining_lets_running_calls_finish_and_takes_no_more() -> None:
    async with running_service() as service:
        service.executor.open = False
        call = service.generation.Generate(request(max_tokens=5))
        await until(lambda: service.executor.unanswered, "the call runs")

        drain = asyncio.create_task(service.server.drain(grace=DEADLINE_S))
        for name in ("", GENERATION, BLOCK_MANAGER, EXECUTOR_LINK):
            await becomes(service, name, NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in service.generation.Generate(request())]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not drain.done()

        service.executor.go_on()
        responses = [response async for response in call]
        assert sum(len(response.token_id) for response in responses) == 5
        assert responses[-1].HasField("usage")
        await drain
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.reads.Audit(block_manager_pb2.AuditRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_calls_that_outlast_the_grace_are_ended_as_draining() -> None:
    async with running_service() as service:
        service.executor.open = False
        call = service.generation.Generate(request())
        await until(lambda: service.executor.unanswered, "the call runs")
        drain = asyncio.create_task(service.server.drain(grace=0.05))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await drain
