"""The command line of `block-manager`: settings in, exit code out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from block_manager_svc.config import ENV_PREFIX, BadSettings, Settings, load
from block_manager_svc.identity import BadTokensFile, Callers
from block_manager_svc.logs import configure_logs
from block_manager_svc.manager import Limits, Manager
from block_manager_svc.rpc import convert
from block_manager_svc.rpc.server import CannotListen, Server, run_until_signal
from block_manager_svc.rpc.tls import BadCertificate, Tls

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _flag(name: str) -> Any:
    """The flag of one setting; unset unless given, so that environment and file come to their turn."""
    field = Settings.model_fields[name]
    return typer.Option(
        f"--{name.replace('_', '-')}", help=f"{field.description} (default {field.default})", show_default=False
    )


@app.command()
def serve(
    config: Annotated[
        Path | None,
        typer.Option("--config", envvar=f"{ENV_PREFIX}CONFIG", help="YAML file of settings, named as the flags with _"),
    ] = None,
    listen: Annotated[str | None, _flag("listen")] = None,
    tokens_file: Annotated[Path | None, _flag("tokens_file")] = None,
    tls_cert: Annotated[Path | None, _flag("tls_cert")] = None,
    tls_key: Annotated[Path | None, _flag("tls_key")] = None,
    tls_client_ca: Annotated[Path | None, _flag("tls_client_ca")] = None,
    token_budget: Annotated[int | None, _flag("token_budget")] = None,
    max_running: Annotated[int | None, _flag("max_running")] = None,
    max_queue: Annotated[int | None, _flag("max_queue")] = None,
    eviction: Annotated[str | None, _flag("eviction")] = None,
    watermark: Annotated[float | None, _flag("watermark")] = None,
    zero_between_tenants: Annotated[bool | None, _flag("zero_between_tenants")] = None,
    folding: Annotated[bool | None, _flag("folding")] = None,
    executor_grace: Annotated[float | None, _flag("executor_grace")] = None,
    heartbeat_interval: Annotated[float | None, _flag("heartbeat_interval")] = None,
    silence_limit: Annotated[float | None, _flag("silence_limit")] = None,
    write_timeout: Annotated[float | None, _flag("write_timeout")] = None,
    drain_grace: Annotated[float | None, _flag("drain_grace")] = None,
    log_level: Annotated[str | None, _flag("log_level")] = None,
    log_format: Annotated[str | None, _flag("log_format")] = None,
) -> None:
    """Serve the block manager: gateways call it for tokens, executors dial in to compute them.

    Settings come from flags, else from the environment (PAGEDKV_LISTEN, PAGEDKV_TOKEN_BUDGET, ...), else from the
    YAML file, else they are the defaults below. SIGTERM drains and exits; a second one exits at once. SIGHUP reads
    the tokens file again.
    """
    values = dict(locals())
    del values["config"]
    try:
        settings = load({name: value for name, value in values.items() if value is not None}, config)
    except BadSettings as error:
        for line in error.lines:
            typer.echo(f"block-manager: {line}", err=True)
        raise typer.Exit(2) from None
    configure_logs(settings.log_level, settings.log_format)
    try:
        callers = Callers(settings.tokens_file)
        tls = _tls(settings)
    except (BadTokensFile, BadCertificate) as error:
        typer.echo(f"block-manager: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        code = asyncio.run(_serve(settings, callers, tls))
    except CannotListen as error:
        typer.echo(f"block-manager: {error}", err=True)
        code = 1
    raise typer.Exit(code)


def _tls(settings: Settings) -> Tls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls.from_files(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


async def _serve(settings: Settings, callers: Callers, tls: Tls | None) -> int:
    limits = Limits(
        token_budget=settings.token_budget,
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        eviction=settings.eviction,
        watermark=settings.watermark,
        zero_between_tenants=settings.zero_between_tenants,
        folding=settings.folding,
        executor_grace_s=settings.executor_grace,
        heartbeat_interval_ms=round(settings.heartbeat_interval * 1000),
        silence_limit_ms=round(settings.silence_limit * 1000),
    )
    manager = Manager(limits, convert.step_body)
    server = Server(manager, settings.listen, settings.write_timeout, callers, tls)
    return await run_until_signal(server, settings.drain_grace)
