"""`gpu-executor` as a process: signals, failures, exit statuses, logs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.link_service import LinkService, Steps, Stream
from support.processes import free_port
from support.waiting import wait_for

START_S = 60.0
PROMPT = [5, 6, 7, 8, 9, 10]

# What `gpu-executor` runs, with steps that say when they began and wait until they may go on, or fail.
SLOW = """
import pathlib, sys, time
from gpu_executor.engine import Engine
from gpu_executor.__main__ import main
folder, compute = pathlib.Path({folder!r}), Engine._compute
def slow(self, *arguments):
    (folder / "computing").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return compute(self, *arguments)
Engine._compute = slow
sys.argv[0] = "gpu-executor"
main()
"""
FAILING = """
import sys
from gpu_executor.engine import Engine
from gpu_executor.__main__ import main
def fail(self, *arguments):
    raise RuntimeError("an illegal memory access")
Engine._compute = fail
sys.argv[0] = "gpu-executor"
main()
"""
PLAIN = """
import sys
from gpu_executor.__main__ import main
sys.argv[0] = "gpu-executor"
main()
"""
NO_TORCH = "import sys\nsys.modules['torch'] = None\n" + PLAIN


class Started:
    def __init__(self, program: str, arguments: list[str], log: Path) -> None:
        self.log = log
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDKV_")}
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=environment,
            )

    def wait(self, deadline_s: float = START_S) -> int:
        return self.popen.wait(deadline_s)

    def stderr(self) -> str:
        return self.log.read_text()


Start = Callable[..., Started]


@pytest.fixture
def service() -> Iterator[LinkService]:
    service = LinkService()
    yield service
    service.close()


@pytest.fixture
def start(service: LinkService, tiny_llama_dir: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def start(program: str = PLAIN, *flags: str) -> Started:
        arguments = [
            *("--model", str(tiny_llama_dir), "--service", service.address, "--listen", f"127.0.0.1:{free_port()}"),
            *("--device", "cpu", "--block-size", "4", "--blocks", "32", *flags),
        ]
        started.append(Started(program, arguments, tmp_path / f"executor-{len(started)}.log"))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()


def attached(service: LinkService, epoch: int = 1) -> Stream:
    stream = service.stream(START_S)
    stream.hello()
    stream.welcome(epoch, reset=True)
    return stream


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_executor_in_good_order(service: LinkService, start: Start, number: int) -> None:
    process = start()
    stream = attached(service)
    stream.send(step=Steps().prefill(PROMPT))
    stream.result()
    process.popen.send_signal(number)
    stream.expect_end()
    assert process.wait() == 0
    assert "Traceback" not in process.stderr()


def test_the_step_in_hand_is_finished_and_its_result_sent(service: LinkService, start: Start, tmp_path: Path) -> None:
    process = start(SLOW.format(folder=str(tmp_path)))
    stream = attached(service)
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    stream.send(step=steps.make(op_kind=[2], op_src=[0], op_dst=[7]))  # behind it: not begun, not finished
    wait_for((tmp_path / "computing").exists, 60, "the step computes")
    process.popen.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert stream.result().step_id == 1
    stream.expect_end()
    assert process.wait() == 0


def test_a_second_signal_ends_the_process_at_once(service: LinkService, start: Start, tmp_path: Path) -> None:
    process = start(SLOW.format(folder=str(tmp_path)))
    stream = attached(service)
    stream.send(step=Steps().prefill(PROMPT))
    wait_for((tmp_path / "computing").exists, 60, "the step computes")
    # Two signals of one number that wait for delivery are one: take two that differ.
    process.popen.send_signal(signal.SIGTERM)
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_a_signal_ends_an_executor_that_is_not_attached(start: Start) -> None:
    process = start(PLAIN, "--service", f"127.0.0.1:{free_port()}")
    wait_for(lambda: "started" in process.stderr(), START_S, "started")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_failure_after_acceptance_ends_the_process_and_the_next_boot_is_another(
    service: LinkService, start: Start
) -> None:
    process = start(FAILING)
    stream = attached(service)
    stream.send(step=Steps().prefill(PROMPT))
    stream.expect_end()
    assert process.wait() == 70
    assert "poisoned" in process.stderr()
    assert "an illegal memory access" in process.stderr()

    start()
    second = service.stream(START_S)
    hello = second.hello()
    assert second.boot_id != stream.boot_id
    assert (hello.accepted, hello.completed, hello.digest) == (0, 0, b"")
    assert (second.messages[0].service_id, second.messages[0].epoch) == ("", 0)


def test_json_logs_are_json_on_every_line_and_hold_the_arithmetic(service: LinkService, start: Start) -> None:
    process = start(PLAIN, "--log-format", "json")
    attached(service)
    wait_for(lambda: '"attached"' in process.stderr(), 60, "attached is logged")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    events = [json.loads(line) for line in process.stderr().splitlines()]
    assert all({"event", "level", "timestamp"} <= event.keys() for event in events)
    text = "\n".join(event["event"] for event in events)
    assert "2 layers × 4 tokens × 2 KV heads × (16 + 16) × 4 bytes (float32) = 2,048 bytes" in text
    assert "31 usable blocks × 4 = 124 tokens" in text


@pytest.mark.parametrize(
    ("program", "flags", "line"),
    [
        (PLAIN, ("--block-size", "0"), "block-size: Input should be greater than or equal to 1, got '0'"),
        (PLAIN, ("--config", "no.yaml"), "config: there is no file no.yaml"),
        (PLAIN, ("--model", "/nowhere/at/all"), "no model at /nowhere/at/all"),
        (PLAIN, ("--blocks", "2000000000"), "the device pool does not fit: 2,000,000,000 blocks × 2,048 bytes"),
        (PLAIN, ("--listen", "192.0.2.1:50062"), "cannot listen on 192.0.2.1:50062"),
        (NO_TORCH, (), "torch not installed: pip install 'pagedkv[executor]'"),
    ],
)
def test_what_cannot_start_says_why_in_one_line_and_exits_with_2(
    start: Start, program: str, flags: tuple[str, ...], line: str
) -> None:
    process = start(program, *flags)
    assert process.wait() == 2
    last = process.stderr().splitlines()[-1]
    assert last.startswith("gpu-executor: ")
    assert line in last
    assert "Traceback" not in process.stderr()


def test_a_folder_that_is_no_model_is_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    process = start(PLAIN, "--model", str(tmp_path / "empty"))
    assert process.wait() == 2
    last = process.stderr().splitlines()[-1]
    assert last.startswith(f"gpu-executor: MODEL_UNREADABLE: {tmp_path / 'empty'} is not a model")
    assert "Traceback" not in process.stderr()


def test_a_port_that_is_taken_is_found_out_before_the_model_is_loaded(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        process = start(PLAIN, "--listen", address)
        assert process.wait() == 2
    assert process.stderr().splitlines()[-1].startswith(f"gpu-executor: cannot listen on {address}")
    assert "loading model" not in process.stderr()
