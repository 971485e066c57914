"""The command line's frame: what all commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from pagedkv import Client, InvalidArgument
from pagedkv._channel import DEFAULT_ADDRESS, DEFAULT_TIMEOUT
from pagedkv.cli._output import Output, exit_codes

app = typer.Typer(
    name="kvctl",
    help="Generate with, and look into, a pagedkv service.",
    epilog="Exit codes: 0 done; 1 refused, unreachable, unhealthy or violations found; 2 wrong usage; 130 Ctrl-C. "
    "With -o json, errors are one JSON object on stderr.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# Both may stand before the command's name or after it; the one after it counts.
Address = Annotated[str | None, typer.Option("--address", help="host:port of the service.", show_default=False)]
Format = Annotated[Output | None, typer.Option("--output", "-o", help="How to write results.", show_default=False)]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds the call may take.", show_default=f"{DEFAULT_TIMEOUT:g}; generating: none"),
]


@dataclass(frozen=True, slots=True)
class _Globals:
    """What stood before the command's name."""

    address: str
    output: Output


@app.callback()
def kvctl(
    context: typer.Context,
    address: Annotated[
        str, typer.Option("--address", envvar="PAGEDKV_ADDRESS", help="host:port of the service.")
    ] = DEFAULT_ADDRESS,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to write results.")] = Output.TEXT,
) -> None:
    context.obj = _Globals(address, output)


@contextlib.contextmanager
def session(
    context: typer.Context, address: str | None, output: Output | None, timeout: float | None
) -> Iterator[tuple[Client, Output]]:
    """A client of the service and the format to write in, for one command; failures become exit codes."""
    outer: _Globals = context.obj
    output = output or outer.output
    try:
        client = Client(address or outer.address, timeout=DEFAULT_TIMEOUT if timeout is None else timeout)
    except InvalidArgument as error:
        raise typer.BadParameter(error.message, param_hint="--address") from None
    with exit_codes(output), client:
        yield client, output
