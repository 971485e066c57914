"""The command line's frame: what all commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pagedkv import Client, InvalidArgument, Tls
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


_HINTS = {
    "TOKEN_INVALID": "--token-file",
    "TOKEN_UNPROTECTED": "--tls, --trust-network",
    "TLS_FILE_UNREADABLE": "--tls-ca, --tls-cert, --tls-key",
    "TLS_PAIR_INCOMPLETE": "--tls-cert, --tls-key",
}


@dataclass(frozen=True, slots=True)
class _Globals:
    """What stood before the command's name."""

    address: str
    output: Output
    token: str | None
    tls: Tls | None
    trust_network: bool


@app.callback()
def kvctl(
    context: typer.Context,
    address: Annotated[
        str, typer.Option("--address", envvar="PAGEDKV_ADDRESS", help="host:port of the service.")
    ] = DEFAULT_ADDRESS,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to write results.")] = Output.TEXT,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token that says who calls; or the token in $PAGEDKV_TOKEN.", show_default=False
        ),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Talk TLS; also meant by the three files.")] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(envvar="PAGEDKV_TLS_CA", help="PEM file of authorities to trust.", show_default=False)
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="PAGEDKV_CLIENT_CERT", help="PEM file of its own certificate.", show_default=False),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="PAGEDKV_CLIENT_KEY", help="PEM file of its key.", show_default=False)
    ] = None,
    trust_network: Annotated[
        bool, typer.Option("--trust-network", envvar="PAGEDKV_TRUST_NETWORK", help="Send the token without TLS too.")
    ] = False,
) -> None:
    secure = Tls(tls_ca, tls_cert, tls_key) if tls or tls_ca or tls_cert or tls_key else None
    context.obj = _Globals(address, output, _token(token_file), secure, trust_network)


def _token(path: Path | None) -> str | None:
    """Not an option of its own: every user of a machine sees the options of its processes. None: the client's own."""
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--token-file") from None


@contextlib.contextmanager
def session(
    context: typer.Context, address: str | None, output: Output | None, timeout: float | None
) -> Iterator[tuple[Client, Output]]:
    """A client of the service and the format to write in, for one command; failures become exit codes."""
    outer: _Globals = context.obj
    output = output or outer.output
    try:
        client = Client(
            address or outer.address,
            token=outer.token,
            tls=outer.tls,
            trust_network=outer.trust_network,
            timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
        )
    except InvalidArgument as error:
        raise typer.BadParameter(error.message, param_hint=_HINTS.get(error.reason, "--address")) from None
    with exit_codes(output), client:
        yield client, output
