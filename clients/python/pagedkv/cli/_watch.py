"""`kvctl watch`: what happens in the pool, as it happens."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from pagedkv import Event
from pagedkv.cli._app import Address, Format, Timeout, session
from pagedkv.cli._output import Output, write_json, write_text


def watch(
    context: typer.Context,
    blocks: Annotated[bool, typer.Option("--blocks", help="Only what becomes of cached blocks.")] = False,
    sequences: Annotated[bool, typer.Option("--sequences", help="Only what becomes of sequences.")] = False,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """A snapshot of what is cached and which sequences there are, then every change; until Ctrl-C."""
    both = blocks == sequences
    with (
        session(context, address, output, timeout) as (client, fmt),
        client.watch(blocks=blocks or both, sequences=sequences or both, timeout=timeout) as updates,
    ):
        for update in updates:
            if fmt is Output.JSON:
                events = [{"event": type(event).__name__, **_facts(event)} for event in update.events]
                write_json({"header": update.header, "phase": update.phase.value, "events": events})
            elif update.events:
                lines = (
                    f"{update.header.revision:>10,}  {update.phase.value:<12}  {_line(event)}\n"
                    for event in update.events
                )
                write_text("".join(lines))


def _facts(event: Event) -> dict[str, object]:
    facts = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in facts.items() if value != ()}


def _line(event: Event) -> str:
    facts = {name: value[:16] if isinstance(value, str) else value for name, value in _facts(event).items()}
    return f"{type(event).__name__:<18}" + "  ".join(f"{name} {value}" for name, value in facts.items())
