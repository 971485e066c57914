"""kvctl: the service from the command line."""

from __future__ import annotations

import io
import os
import sys

from pagedkv.cli import _token
from pagedkv.cli._app import app
from pagedkv.cli._generate import chat, generate
from pagedkv.cli._inspect import (
    audit,
    compact,
    match,
    models,
    quota,
    reset_cache,
    resize,
    sequence,
    sequences,
    status,
    tables,
)
from pagedkv.cli._watch import watch

__all__ = ["app", "main"]

app.add_typer(_token.app, name="token")
for command in (
    watch,
    generate,
    chat,
    status,
    sequences,
    sequence,
    tables,
    match,
    models,
    audit,
    reset_cache,
    resize,
    quota,
    compact,
):
    app.command()(command)


def main() -> None:
    """The console script."""
    _keep_stderr_to_ourselves()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where the locale lacks a character, ? is shown
    app()


def _keep_stderr_to_ourselves() -> None:
    """Takes file descriptor 2 from gRPC's C++ core, whose own log would stand beside the one line of an error.

    The core asks for its log level when it is imported, too early for us to say; whoever sets GRPC_VERBOSITY sees it.
    """
    if "GRPC_VERBOSITY" in os.environ or not isinstance(sys.stderr, io.TextIOWrapper):
        return
    ours = os.dup(sys.stderr.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)
    sys.stderr = open(ours, "w", encoding=sys.stderr.encoding, buffering=1)  # noqa: SIM115 - open to the end
