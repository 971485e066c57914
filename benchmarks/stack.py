"""Both programs as real processes, for a measurement."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pagedkv import Client


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(model: Path, *, blocks: int, flags: tuple[str, ...] = ()) -> Iterator[str]:
    """Gives the service's address once an executor is attached; both processes end with the context."""
    address = f"127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        for module, arguments in (
            ("block_manager_svc", ["--listen", address]),
            (
                "gpu_executor",
                [
                    *("--model", str(model), "--service", address, "--listen", f"127.0.0.1:{_free_port()}"),
                    *("--blocks", str(blocks), *flags),
                ],
            ),
        ):
            log = stack.enter_context((Path(directory) / f"{module}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        client = stack.enter_context(Client(address))
        end = time.monotonic() + 120
        while not client.healthy():
            if time.monotonic() > end:
                raise SystemExit((Path(directory) / "gpu_executor.log").read_text())
            time.sleep(0.2)
        yield address
