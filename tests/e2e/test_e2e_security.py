"""Tokens and TLS through real processes: service, executor and kvctl that show who they are, and those that do not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme
from support.processes import Process, Stack, free_port

from block_manager_svc.config import Settings as ServiceSettings
from block_manager_svc.identity import Role
from pagedkv import AsyncClient, Client, InvalidArgument, PagedKvError, Tls, Unavailable
from pagedkv.v1 import executor_pb2, executor_pb2_grpc

TOKENS = {"blue-gateway": "blue gateway", "blue-operator": "blue operator", "blue-executor": "blue executor"}
READ = "for-reading-kv"
KVCTL = str(Path(sys.executable).parent / "kvctl")


@dataclass
class Secured:
    stack: Stack
    folder: Path

    def tls(self, *, own: bool = True) -> Tls:
        mine = (self.folder / "client.pem", self.folder / "client.key") if own else (None, None)
        return Tls(self.folder / "ca.pem", *mine)

    def client(self, token: str | None) -> Client:
        return Client(self.stack.address, token=token, tls=self.tls(), timeout=20)

    def kvctl(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDKV_")}
        return subprocess.run(
            [KVCTL, "--address", self.stack.address, *arguments],
            env=own | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def write_tokens(folder: Path, tokens: dict[str, str]) -> None:
    lines = [f"token {hashlib.sha256(token.encode()).hexdigest()} {stands}" for token, stands in tokens.items()]
    (folder / "tokens").write_text("\n".join(lines))
    (folder / "tokens").chmod(0o600)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other-ca.pem")
    for name in ("server", "client"):
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    write_tokens(folder, TOKENS)
    (folder / "executor-token").write_text("blue-executor\n")
    (folder / "read-token").write_text(READ)
    stack = Stack(
        folder,
        model=tiny_llama_dir,
        model_cache=folder / "cache",
        blocks=64,
        tls=True,
        service_flags=(
            *("--tokens-file", str(folder / "tokens"), "--tls-client-ca", str(folder / "ca.pem")),
            *("--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")),
        ),
        executor_flags=(
            *("--token-file", str(folder / "executor-token"), "--listen-token-file", str(folder / "read-token")),
            *("--tls-ca", str(folder / "ca.pem"), "--tls-cert", str(folder / "client.pem")),
            *("--tls-key", str(folder / "client.key")),
        ),
    )
    try:
        stack.start()
        yield Secured(stack, folder)
    finally:
        stack.close()


def test_who_shows_a_token_and_a_certificate_is_served(secured: Secured) -> None:
    with secured.client("blue-gateway") as client:
        assert client.healthy()
        assert len(client.complete(token_ids=[10, 11, 12], max_tokens=3, ignore_eos=True).token_ids) == 3

    async def generate() -> int:
        async with AsyncClient(secured.stack.address, token="blue-gateway", tls=secured.tls()) as client:
            return len((await client.complete(token_ids=[10, 11], max_tokens=2, ignore_eos=True)).token_ids)

    assert asyncio.run(generate()) == 2


@pytest.mark.parametrize(
    ("token", "reason"), [(None, "TOKEN_MISSING"), ("red", "TOKEN_UNKNOWN"), ("blue-operator", "ROLE_NOT_ALLOWED")]
)
def test_who_shows_no_token_or_another_is_refused(secured: Secured, token: str | None, reason: str) -> None:
    with secured.client(token) as client, pytest.raises(PagedKvError) as caught:
        client.complete(token_ids=[10], max_tokens=1)
    assert caught.value.reason == reason


def test_without_the_right_certificates_there_is_no_connection(secured: Secured) -> None:
    for tls in (secured.tls(own=False), Tls(secured.folder / "other-ca.pem"), Tls(), None):
        with (
            Client(secured.stack.address, token="blue-operator", tls=tls, timeout=5) as client,
            pytest.raises(Unavailable),
        ):
            client.pool()


def environment_of(secured: Secured) -> dict[str, str]:
    names = {"PAGEDKV_TLS_CA": "ca.pem", "PAGEDKV_CLIENT_CERT": "client.pem", "PAGEDKV_CLIENT_KEY": "client.key"}
    return {name: str(secured.folder / file) for name, file in names.items()}


def test_clients_take_token_and_certificates_from_the_environment(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(secured).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PAGEDKV_TOKEN", "blue-operator")
    with Client(secured.stack.address, timeout=20) as client:
        assert outcome(client) == ""

    async def blocks() -> int:
        async with AsyncClient(secured.stack.address, timeout=20) as client:
            return (await client.pool()).block_size

    assert asyncio.run(blocks()) > 0
    with Client(secured.stack.address, token="blue-gateway", timeout=20) as client:
        assert outcome(client) == "ROLE_NOT_ALLOWED", "what is given counts, not the environment"


def test_the_environment_of_callers_and_of_the_service_have_no_name_in_common(secured: Secured) -> None:
    settings = {f"PAGEDKV_{name.upper()}" for name in ServiceSettings.model_fields}
    assert settings.isdisjoint({"PAGEDKV_TOKEN", "PAGEDKV_ADDRESS", "PAGEDKV_TRUST_NETWORK", *environment_of(secured)})


def test_kvctl_takes_token_and_certificates_from_options_and_environment(secured: Secured) -> None:
    names = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
    files = {name: str(secured.folder / file) for name, file in names.items()}
    environment = environment_of(secured)
    done = secured.kvctl("-o", "json", "status", PAGEDKV_TOKEN="blue-operator", **environment)
    assert (done.returncode, json.loads(done.stdout)["healthy"]) == (0, True)
    options = [word for name, file in files.items() for word in (f"--tls-{name.lower()}", file)]
    token_file = str(secured.folder / "executor-token")
    refused = secured.kvctl(*options, "--token-file", token_file, "audit")
    assert refused.returncode == 1
    assert "ROLE_NOT_ALLOWED" in refused.stderr
    assert secured.kvctl("--tls-cert", files["CERT"], "status").returncode == 2
    assert secured.kvctl("--token-file", "/nowhere", "status").returncode == 2


def test_a_new_token_works_once_its_line_is_in_the_file_and_the_file_is_read_again(secured: Secured) -> None:
    made = json.loads(secured.kvctl("token", "new", "red", "gateway", "operator", "-o", "json").stdout)
    with (secured.folder / "tokens").open("a") as file:
        file.write(f"\n{made['line']}\n")
    with secured.client(made["token"]) as client:
        assert outcome(client) == "TOKEN_UNKNOWN"
        read_again(secured, client, "")
        write_tokens(secured.folder, TOKENS)
        read_again(secured, client, "TOKEN_UNKNOWN")


def test_a_new_token_is_for_a_tenant_and_roles_that_the_service_would_take(secured: Secured) -> None:
    assert secured.kvctl("token", "new", "red", *Role).returncode == 0
    assert secured.kvctl("token", "new", "red", "king").returncode == 2
    assert secured.kvctl("token", "new", "two words", "gateway").returncode == 2


def read_again(secured: Secured, client: Client, reason: str) -> None:
    """SIGHUP, and waits until the client is served (""), or refused with this reason."""
    assert secured.stack.service_process
    secured.stack.service_process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 20
    while (seen := outcome(client)) != reason:
        assert time.monotonic() < end, f"still {seen!r}, not {reason!r}"
        time.sleep(0.05)


def outcome(client: Client) -> str:
    try:
        client.pool()
    except PagedKvError as error:
        return error.reason
    return ""


def test_k_and_v_are_read_with_the_executors_own_token_alone(secured: Secured) -> None:
    request = executor_pb2.ReadKvRequest(service_id="x", epoch=1)
    with grpc.insecure_channel(secured.stack.executor_address) as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)

        def code(*metadata: tuple[str, str]) -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.ReadKv(request, metadata=metadata, timeout=20))
            return caught.value.code()

        assert code() == code(("authorization", "Bearer blue-operator")) == grpc.StatusCode.UNAUTHENTICATED
        # Past the token: it is the epoch that is wrong.
        assert code(("authorization", f"Bearer {READ}")) == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--token-file", "/nowhere"), "no file with a token"),
        (("--tls-cert", "cert.pem"), "belong together"),
        (("--tls-ca", "/nowhere"), "/nowhere"),
        (("--token-file", "TOKEN", "--service", "gpu.example:1"), "unencrypted"),
    ],
)
def test_an_executor_that_cannot_show_who_it_is_ends_with_one_line(
    secured: Secured, tmp_path: Path, tiny_llama_dir: Path, flags: tuple[str, ...], line: str
) -> None:
    flags = tuple(str(secured.folder / "executor-token") if flag == "TOKEN" else flag for flag in flags)
    arguments = ["--model", str(tiny_llama_dir), "--blocks", "8", "--listen", f"127.0.0.1:{free_port()}", *flags]
    process = Process("gpu_executor", arguments, tmp_path / "log", dict(os.environ))
    assert process.wait(60) == 2
    assert line in process.log_tail()


@pytest.mark.parametrize(
    ("address", "trusted"),
    [
        *((address, True) for address in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/x", "ipv4:127.0.0.1:1")),
        *((address, False) for address in ("10.0.0.1:1", "gpu.example:1", "dns:gpu.example:1", "dns:///gpu.example:1")),
    ],
)
def test_a_token_is_not_sent_in_the_clear_beyond_this_machine(address: str, trusted: bool) -> None:
    if trusted:
        Client(address, token="secret").close()
        return
    with pytest.raises(InvalidArgument) as caught:
        Client(address, token="secret")
    assert caught.value.reason == "TOKEN_UNPROTECTED"
    Client(address, token="secret", trust_network=True).close()
    Client(address, token="secret", tls=Tls()).close()


@pytest.mark.parametrize("token", ["", "two words", "línea", "a\nb"])
def test_what_is_no_token_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client("127.0.0.1:1", token=token)
    assert caught.value.reason == "TOKEN_INVALID"
