"""Tokens: who a caller is, in the service's file."""

from __future__ import annotations

import hashlib
import re
import secrets
from enum import StrEnum
from typing import Annotated

import typer

from pagedkv.cli._app import Format
from pagedkv.cli._output import Output, write_json, write_text

app = typer.Typer(help="Tokens that callers show.", no_args_is_help=True)

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(StrEnum):
    """As the service's tokens file has them."""

    GATEWAY = "gateway"
    ENGINE = "engine"
    OPERATOR = "operator"
    EXECUTOR = "executor"


def _tenant(name: str) -> str:
    if not _TENANT.fullmatch(name):
        raise typer.BadParameter("1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit")
    return name


@app.command("new")
def new(
    tenant: Annotated[str, typer.Argument(help="Whom the token stands for.", callback=_tenant)],
    roles: Annotated[list[Role], typer.Argument(help="What it may do.")],
    output: Format = None,
) -> None:
    """Makes a token, shows it once, and the line for the service's tokens file, which holds its hash alone."""
    token = secrets.token_urlsafe(32)
    line = f"token {hashlib.sha256(token.encode()).hexdigest()} {tenant} {','.join(roles)}"
    if output is Output.JSON:
        write_json({"token": token, "line": line})
    else:
        write_text(f"{token}\n{line}\n")
