"""What kvctl writes: text for people or JSON for programs, one line for an error, and the exit code.

0    done
1    the service refused or is not there; audit found violations; status found the service unhealthy
2    the command line is wrong
130  Ctrl-C
141  the reader of stdout went away, as a shell reports it
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import sys
from collections.abc import Iterator, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedkv import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PagedKvError,
    ResourceExhausted,
    Unavailable,
)


class Output(enum.StrEnum):
    """How results are written."""

    TEXT = "text"
    JSON = "json"


# What to do next, by reason; where a reason is missing, by class.
_ADVICE = {
    "UNREACHABLE": "is block-manager running there? --address or PAGEDKV_ADDRESS names another",
    "EXECUTOR_UNAVAILABLE": "start gpu-executor unless it is about to attach",
    "DRAINING": "the service is stopping: use another instance",
    "MODEL_NOT_FOUND": "`kvctl models` names what is served",
    "SEQUENCE_NOT_FOUND": "`kvctl sequences` names what is alive",
    "PROMPT_EXCEEDS_POOL": "shorten the prompt or give the executor a larger pool",
    "PROMPT_TOO_LONG": "shorten the prompt: `kvctl models` shows the context",
    "PROMPT_EMPTY": "give at least one token",
    "TOKENIZER_UNAVAILABLE": "send --token-ids: the executor has no tokenizer",
    "CHAT_TEMPLATE_UNAVAILABLE": "use `kvctl generate`: the model has no chat template",
    "MESSAGE_TOO_LARGE": "send less at once",
    "TOO_MANY_ITEMS": "ask for fewer at once",
    "STREAM_INCOMPLETE": "service and client may be of different versions",
    "REPLY_INVALID": "service and client may be of different versions",
}
_ADVICE_BY_CLASS: tuple[tuple[type[PagedKvError], str], ...] = (
    (InvalidArgument, "mend the request: --help tells the ranges"),
    (NotFound, "check the name"),
    (FailedPrecondition, "the service cannot do this in its present state: `kvctl status` shows it"),
    (ResourceExhausted, "ask for less, or wait until others are done"),
    (Unavailable, "try again later"),
    (DeadlineExceeded, "give it more time with --timeout, or see `kvctl status`"),
    (Internal, "see the service's log"),
    (PagedKvError, "try again"),
)


def advice(error: PagedKvError) -> str:
    """What the caller does next."""
    steps = [_ADVICE[error.reason]] if error.reason in _ADVICE else []
    if error.retry_after is not None:
        steps.append(f"try again in {error.retry_after:g} s")
    return ", and ".join(steps) or next(text for kind, text in _ADVICE_BY_CLASS if isinstance(error, kind))


def write_error(error: PagedKvError, output: Output) -> None:
    """One line on stderr: `error: REASON: message (numbers) — what to do`, or one JSON object."""
    if output is Output.JSON:
        line = to_json(
            {
                "error": {
                    "reason": error.reason,
                    "message": error.message,
                    "code": error.code,
                    "numbers": error.numbers,
                    "retry_after": error.retry_after,
                    "advice": advice(error),
                }
            }
        )
    else:
        numbers = ", ".join(f"{name} {value}" for name, value in sorted(error.numbers.items()))
        line = f"error: {error.reason}: {error.message}{f' ({numbers})' if numbers else ''} — {advice(error)}"
        line = " ".join(line.split())  # a template's own words may have line ends
    typer.echo(line, err=True)


@contextlib.contextmanager
def exit_codes(output: Output) -> Iterator[None]:
    """Turns what ends a command early into its line on stderr and its exit code."""
    try:
        yield
    except PagedKvError as error:
        write_error(error, output)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("", err=True)  # the terminal shows ^C without ending the line
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # What Python still holds for stdout goes nowhere, and its exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None


def to_json(value: object) -> str:
    """One line of JSON; dataclasses are objects of their fields, with their properties left out."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_json(value: object) -> None:
    """One JSON object, on one line, at once."""
    typer.echo(to_json(value))


def write_text(text: str) -> None:
    """Text as it is, at once, without a line end: a stream is seen while it runs."""
    typer.echo(text, nl=False)


def write_tables(*tables: Table) -> None:
    """Tables, one below the other. A pipe has no width, so nothing is cut there."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
    with console.capture() as rendered:
        for each in tables:
            console.print(each)
    typer.echo(rendered.get(), nl=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A titled table whose numbers stand right. Ids are best given as text: they get no thousands separators."""
    result = Table(title=Text(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int) for row in rows)
        result.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        result.add_row(*(Text(_cell(value)) for value in row))  # Text: no markup in it
    return result


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,}" if isinstance(value, int) else str(value)
