"""kvctl: the service from the command line."""

from __future__ import annotations

import io
import sys

from pagedkv.cli._app import app
from pagedkv.cli._generate import chat, generate
from pagedkv.cli._inspect import audit, models, sequences, status, tables

__all__ = ["app", "main"]

for command in (generate, chat, status, sequences, tables, models, audit):
    app.command()(command)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where the locale lacks a character, ? is shown
    app()
