"""Tokens: who a caller is, in the service's file."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import typer

from pagedkv.cli._app import Format
from pagedkv.cli._output import Output, write_json, write_text

app = typer.Typer(help="Tokens that callers show.", no_args_is_help=True)


@app.command("new")
def new(
    tenant: Annotated[str, typer.Argument(help="Whom the token stands for.")],
    roles: Annotated[list[str], typer.Argument(help="What it may do: gateway, engine, operator, executor.")],
    output: Format = None,
) -> None:
    """Makes a token, shows it once, and the line for the service's tokens file, which holds its hash alone."""
    token = secrets.token_urlsafe(32)
    line = f"token {hashlib.sha256(token.encode()).hexdigest()} {tenant} {','.join(roles)}"
    if output is Output.JSON:
        write_json({"token": token, "line": line})
    else:
        write_text(f"{token}\n{line}\n")
