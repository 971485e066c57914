"""Ctrl-C at any moment: the call that it strikes ends, and the client goes on to work."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
from sdk_scripted import DEADLINE, Scripted, row

from pagedkv.v1 import generation_pb2 as gen

# Reads a stream, and is interrupted at some moment of it; then the next. Says how many it has come through.
INTERRUPTED = """
import random, signal, sys
from pagedkv import Client

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
moments = random.Random(0)
with Client(sys.argv[1]) as client:
    for _ in range(int(sys.argv[2])):
        try:
            with client.generate("x") as stream:
                next(stream)
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0001, 0.003))
                for piece in stream:
                    pass
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    print(client.complete("last").text)
"""


def test_a_client_works_on_after_many_interrupts(service: Scripted) -> None:
    def ticks(request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:
        """As fast as they are read: most of the time is spent in gRPC."""
        over = threading.Event()
        context.add_callback(over.set)
        if request.text == "last":
            yield row("done", finish=gen.FINISH_REASON_STOP)
            yield gen.GenerateResponse(usage=gen.Usage())
        while request.text != "last" and not over.wait(0.0002):
            yield row("tick")

    service.generate = ticks
    client = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, service.address, "300"],
        capture_output=True,
        text=True,
        timeout=12 * DEADLINE,
        check=False,
    )
    assert client.returncode == 0, client.stderr
    assert client.stdout.splitlines() == ["interrupted"] * 300 + ["done"]
