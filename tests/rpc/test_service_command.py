"""`block-manager` as a process: exit codes, one clear line for each error, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv.v1 import executor_link_pb2 as link
from pagedkv.v1 import executor_link_pb2_grpc, generation_pb2, generation_pb2_grpc

DEADLINE_S = 30.0
COMMAND = [sys.executable, "-m", "block_manager_svc"]


def run(*arguments: str, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
    )


class Running:
    """A service that listens; its JSON log lines as they came."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--listen", "127.0.0.1:0", "--log-format", "json", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, object]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = str(self.logged("listening")["address"])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"event": line})

    def logged(self, event: str) -> dict[str, object]:
        return self.wait_for(lambda: next((line for line in self.lines if line["event"] == event), None), event)

    def wait_for(self, condition: Callable[[], object], what: str) -> dict[str, object]:
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert time.monotonic() < end, f"never: {what}; {self.lines}"
            assert self.process.poll() is None or condition(), f"exited before: {what}; {self.lines}"
            time.sleep(0.01)
        return value  # type: ignore[return-value]

    def ends(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


class SilentExecutor:
    """Attaches over a real stream, and never answers a step."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._over = threading.Event()
        self._replies = executor_link_pb2_grpc.ExecutorLinkServiceStub(channel).Attach(self._requests())
        assert next(self._replies).HasField("welcome")

    def _requests(self) -> Iterator[link.AttachRequest]:
        yield link.AttachRequest(
            boot_id="boot",
            hello=link.Hello(
                world_size=1,
                geometry=link.Geometry(
                    num_blocks=64,
                    block_size=16,
                    num_layers=1,
                    num_kv_heads=1,
                    key_head_dim=8,
                    value_head_dim=8,
                    dtype="float32",
                    block_bytes=1024,
                    layout_hash=b"\0" * 32,
                ),
                max_rows=8,
                max_batch_tokens=256,
                max_blocks_per_row=16,
                model=link.ModelDescription(id="silent", vocab_size=100, max_context=256),
            ),
        )
        while not self._over.wait(0.2):
            yield link.AttachRequest(boot_id="boot", heartbeat=link.Heartbeat())

    def step(self) -> None:
        """Waits for a step."""
        while not next(self._replies).HasField("step"):
            pass

    def end(self) -> None:
        self._over.set()
        self._replies.cancel()


def test_help_names_every_setting_with_its_default() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    text = re.sub(r"[\s│]+", " ", shown.stdout)
    for name in ("--listen", "--token-budget", "--drain-grace", "--config", "127.0.0.1:50061", "2048"):
        assert name in text
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--token-budget", "0"], ["--token-budget", "not 0"]),
        (["--listen", "nowhere"], ["--listen", "host:port"]),
        (["--log-level", "loud"], ["--log-level", "loud"]),
        (["--config", "/nothing/here.yaml"], ["/nothing/here.yaml", "No such file"]),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(arguments: list[str], words: list[str]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    for word in words:
        assert word in ended.stderr


def test_an_unknown_flag_exits_2() -> None:
    ended = run("--token-budgets", "3")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_a_taken_port_is_one_line_and_exit_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run("--listen", address)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"block-manager: cannot listen on {address}: ")


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    hide = tmp_path / "hide.py"
    hide.write_text(
        "import sys, runpy\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'tokenizers':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "runpy.run_module('block_manager_svc', run_name='__main__')\n"
    )
    ended = run(command=[sys.executable, str(hide)])
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line == "block-manager needs tokenizers, which is not installed: pip install 'pagedkv[service]'"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_service_with_0(start: Callable[..., Running], number: signal.Signals) -> None:
    service = start()
    with grpc.insecure_channel(service.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    service.process.send_signal(number)
    assert service.ends() == 0
    assert [line["event"] for line in service.lines][-1] == "stopped"


def test_a_second_signal_ends_at_once(start: Callable[..., Running]) -> None:
    service = start("--drain-grace", "600")
    with grpc.insecure_channel(service.address) as channel:
        executor = SilentExecutor(channel)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3])))
        executor.step()
        service.process.send_signal(signal.SIGTERM)
        service.logged("draining")
        assert service.process.poll() is None  # the call holds it up
        service.process.send_signal(signal.SIGTERM)
        assert service.ends() == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError):
            list(call)
        executor.end()


def test_a_call_that_outlasts_the_grace_does_not_keep_the_process(start: Callable[..., Running]) -> None:
    service = start("--drain-grace", "0.1")
    with grpc.insecure_channel(service.address) as channel:
        executor = SilentExecutor(channel)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3])))
        executor.step()
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert service.ends() == 0
        executor.end()
