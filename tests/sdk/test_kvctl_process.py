"""kvctl as people run it: the console script in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from sdk_scripted import DEADLINE, Scripted, endless, texts

KVCTL = str(Path(sys.executable).parent / "kvctl")


def environment(service: Scripted, **extra: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PAGEDKV_ADDRESS": service.address, **extra}


def run(service: Scripted, *arguments: str, stdin: bytes = b"", **extra: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [KVCTL, *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        env=environment(service, **extra),
        check=False,
    )


def start(service: Scripted, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [KVCTL, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(service),
    )


@pytest.fixture
def dying() -> Iterator[tuple[Scripted, grpc.Server]]:
    service = Scripted()
    server = service.serve()
    yield service, server
    server.stop(None).wait()


def test_text_reaches_the_reader_while_it_is_generated(service: Scripted) -> None:
    service.generate = endless
    with start(service, "generate", "x") as kvctl:
        assert kvctl.stdout is not None
        assert kvctl.stdout.read(10) == b"tick tick "
        kvctl.kill()
    service.wait_idle()  # a client that is killed is a call that is over


@pytest.mark.parametrize(
    "arguments", [("generate", "x"), ("generate", "x", "-o", "json", "--stream"), ("chat", "x")], ids=" ".join
)
def test_ctrl_c_cancels_the_call_and_exits_with_130(service: Scripted, arguments: tuple[str, ...]) -> None:
    service.generate = endless
    with start(service, *arguments) as kvctl:
        assert kvctl.stdout is not None
        kvctl.stdout.read(5)
        kvctl.send_signal(signal.SIGINT)
        _, err = kvctl.communicate(timeout=DEADLINE)
        assert kvctl.returncode == 130, err
        assert err.strip() == b""
    service.wait_idle()


@pytest.mark.parametrize("arguments", [("generate", "x", "-n", "2"), ("generate", "x", "-o", "json")], ids=" ".join)
def test_ctrl_c_while_waiting_for_whole_samples_exits_with_130(service: Scripted, arguments: tuple[str, ...]) -> None:
    service.generate = endless
    with start(service, *arguments) as kvctl:
        service.wait_started()
        kvctl.send_signal(signal.SIGINT)
        out, err = kvctl.communicate(timeout=DEADLINE)
        assert (kvctl.returncode, out, err.strip()) == (130, b"", b"")
    service.wait_idle()


@pytest.mark.parametrize("arguments", [("generate", "x"), ("generate", "x", "-o", "json", "--stream")], ids=" ".join)
def test_a_reader_that_goes_away_ends_the_call_in_silence(service: Scripted, arguments: tuple[str, ...]) -> None:
    service.generate = endless
    with start(service, *arguments) as kvctl:
        assert kvctl.stdout is not None
        assert kvctl.stderr is not None
        kvctl.stdout.read(5)
        kvctl.stdout.close()
        assert kvctl.wait(DEADLINE) == 141
        assert kvctl.stderr.read() == b""
    service.wait_idle()


def test_tables_into_a_closed_pipe_are_silent(service: Scripted) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    kvctl = subprocess.run(
        [KVCTL, "status"], stdout=writer, stderr=subprocess.PIPE, timeout=60, env=environment(service), check=False
    )
    os.close(writer)
    assert (kvctl.returncode, kvctl.stderr) == (141, b"")


def test_a_service_that_dies_is_one_line(dying: tuple[Scripted, grpc.Server]) -> None:
    service, server = dying
    service.generate = endless
    with start(service, "generate", "x") as kvctl:
        assert kvctl.stdout is not None
        kvctl.stdout.read(5)
        server.stop(None)
        _, err = kvctl.communicate(timeout=DEADLINE)
        assert kvctl.returncode == 1
        assert err.startswith(b"error: ")
        assert err.count(b"\n") == 1, err


def test_unicode_passes_through_prompt_and_output(service: Scripted) -> None:
    service.generate = texts("日本", " 🙂")
    kvctl = run(service, "generate", "Žltý kôň", LC_ALL="C.UTF-8")
    assert (kvctl.returncode, kvctl.stdout.decode()) == (0, "日本 🙂\n")
    assert service.requests("Generate")[0].text == "Žltý kôň"


def test_a_locale_that_lacks_a_character_is_no_crash(service: Scripted) -> None:
    service.generate = texts("日本 ok")
    kvctl = run(service, "generate", "x", PYTHONIOENCODING="latin-1")
    assert (kvctl.returncode, kvctl.stdout, kvctl.stderr) == (0, b"?? ok\n", b"")


def test_a_prompt_that_is_no_text_is_one_line(service: Scripted) -> None:
    kvctl = subprocess.run(
        [KVCTL.encode(), b"generate", b"\xff"],
        capture_output=True,
        timeout=60,
        env=environment(service, LC_ALL="C.UTF-8"),
        check=False,
    )
    assert kvctl.returncode == 1
    assert kvctl.stderr.startswith(b"error: TEXT_NOT_UNICODE: ")
    assert kvctl.stderr.count(b"\n") == 1


def test_wide_tables_are_not_cut_in_a_pipe(service: Scripted) -> None:
    service.unary["ListModels"].models[0].id = "a-model-with-a-name/" + "x" * 100  # type: ignore[attr-defined]
    kvctl = run(service, "models")
    assert "x" * 100 in kvctl.stdout.decode()


def test_json_and_stdin_in_one_pipe(service: Scripted) -> None:
    kvctl = run(service, "-o", "json", "generate", "-", stdin=b"from a pipe\n")
    assert json.loads(kvctl.stdout)["samples"][0]["text"] == "Paris."
    assert service.requests("Generate")[0].text == "from a pipe"


class Terminal:
    """kvctl on a pseudo terminal."""

    def __init__(self, service: Scripted, *arguments: str) -> None:
        self.fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [KVCTL, *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment(service, TERM="xterm", LC_ALL="C.UTF-8"),
            preexec_fn=os.setsid,
        )
        os.close(child)
        self.seen = ""

    def read_until(self, text: str) -> None:
        """Reads up to and with `text`."""
        while text not in self.seen:
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


def test_a_conversation_at_a_terminal(service: Scripted) -> None:
    kvctl = Terminal(service, "chat", "--system", "be brief")
    kvctl.read_until("> ")
    kvctl.type("hi\n")
    kvctl.read_until("Paris.")
    kvctl.read_until("> ")

    # Ctrl-C ends a running answer, not the conversation; what was said stays.
    service.generate = endless
    kvctl.type("tell me more\n")
    kvctl.read_until("tick")
    kvctl.process.send_signal(signal.SIGINT)
    kvctl.read_until("> ")
    service.wait_idle()

    service.generate = texts("done")
    kvctl.type("and?\n")
    kvctl.read_until("done")
    kvctl.read_until("> ")
    roles = [(each.role, each.content[:5]) for each in service.requests("Generate")[-1].chat.messages]
    assert roles == [
        ("system", "be br"),
        ("user", "hi"),
        ("assistant", "Paris"),
        ("user", "tell "),
        ("assistant", "tick "),
        ("user", "and?"),
    ]
    kvctl.type("\x04")  # Ctrl-D
    assert kvctl.process.wait(DEADLINE) == 0
    os.close(kvctl.fd)


def test_ctrl_c_at_the_prompt_ends_the_conversation(service: Scripted) -> None:
    kvctl = Terminal(service, "chat")
    kvctl.read_until("> ")
    kvctl.process.send_signal(signal.SIGINT)
    kvctl.type("\n")  # readline sees a signal that came just before it listened with the next key only
    assert kvctl.process.wait(DEADLINE) == 130
    os.close(kvctl.fd)
