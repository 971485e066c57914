"""Commands that look into the service, or administer it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from pagedkv import BlockStates, BlockTable, Header, Model, Pool, TenantUsage, Unavailable
from pagedkv.cli._app import Address, Format, Timeout, session
from pagedkv.cli._output import Output, table, write_json, write_tables, write_text


def status(context: typer.Context, address: Address = None, output: Format = None, timeout: Timeout = None) -> None:
    """Health, model, pool, sharing and activity. Exit code 1 unless the service is SERVING."""
    with session(context, address, output, timeout) as (client, fmt):
        served = client.models()  # first: it fails where nobody answers
        healthy = client.healthy()
        try:
            pool = client.pool()
        except Unavailable as error:
            if error.reason != "EXECUTOR_UNAVAILABLE":
                raise
            pool = None
        if fmt is Output.JSON:
            write_json({"address": client.address, "healthy": healthy, "models": served, "pool": pool})
        else:
            model = f"model {', '.join(each.id for each in served)}" if served else "no executor is attached"
            write_text(f"{client.address}: {'SERVING' if healthy else 'NOT SERVING'}, {model}\n")
            if pool is not None:
                _write_pool(pool)
        if not healthy:
            raise typer.Exit(1)


def _write_pool(pool: Pool) -> None:
    header, sharing, activity = pool.header, pool.sharing, pool.activity
    tiers = [pool.device, pool.host] if pool.host.total else [pool.device]
    states = [
        (state, *(getattr(tier, state) for tier in tiers))
        for state in (*(field.name for field in dataclasses.fields(BlockStates)), "total")
    ]
    columns = ["state", "device", "host"][: 1 + len(tiers)]
    write_text(
        f"service {header.service_id}, {_moment(header)}; "
        f"a block holds {pool.block_size} tokens in {pool.block_bytes:,} bytes\n\n"
    )
    blocks = table("Blocks", columns, states)
    layout = table(
        "Layout",
        ["", "blocks"],
        [
            ("limit", pool.limit),
            ("kept from admissions", pool.watermark),
            ("longest free run", pool.layout.largest_free_run),
            ("free runs", pool.layout.free_runs),
            ("highest in use", pool.layout.highest_used_block),
        ],
    )
    shared = table(
        "Sharing",
        ["", "now", "peak"],
        [
            ("block table entries", sharing.table_entries, sharing.peak_table_entries),
            ("blocks referenced", sharing.referenced_blocks, sharing.peak_referenced_blocks),
            ("blocks shared", sharing.shared_blocks, sharing.peak_shared_blocks),
        ],
    )
    counters = table(
        "Activity",
        ["", "count"],
        [(field.name.replace("_", " "), getattr(activity, field.name)) for field in dataclasses.fields(activity)],
    )
    write_tables(blocks, layout, _tenants(pool.tenants), shared, counters)


def sequences(context: typer.Context, address: Address = None, output: Format = None, timeout: Timeout = None) -> None:
    """The sequences that are alive, oldest first."""
    with session(context, address, output, timeout) as (client, fmt):
        listing = client.sequences()
        if fmt is Output.JSON:
            write_json({"header": listing.header, "sequences": listing.items})
            return
        rows = [
            (str(each.sequence), each.state.value, each.tokens, each.computed, each.blocks, each.shared_blocks)
            for each in listing
        ]
        write_tables(
            table(f"Sequences: {len(rows)}", ["sequence", "state", "tokens", "computed", "blocks", "shared"], rows)
        )


def sequence(
    context: typer.Context,
    sequence: Annotated[int, typer.Argument(help="Its id, as `kvctl sequences` lists it.")],
    first: Annotated[int, typer.Option(help="Show its tokens too, from this position on ...")] = 0,
    upto: Annotated[int, typer.Option(help="... to before this one.")] = 0,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """Everything about one sequence."""
    with session(context, address, output, timeout) as (client, fmt):
        details = client.sequence(sequence, first=first, upto=upto)
        if fmt is Output.JSON:
            write_json(details)
            return
        shown = [field.name for field in dataclasses.fields(details) if field.name not in ("header", "token_ids")]
        facts = [(name.replace("_", " "), getattr(details, name)) for name in shown]
        write_tables(table(f"Sequence {sequence}", ["", "is"], facts))
        if details.token_ids:
            write_text(" ".join(map(str, details.token_ids)) + "\n")


def match(
    context: typer.Context,
    tokens: Annotated[list[int], typer.Argument(help="Token ids of a prompt.")],
    adapter: Annotated[str, typer.Option(help="Version of model and adapter, as engines name it.")] = "",
    generate: Annotated[bool, typer.Option("--generate", help="What calls of Generate have cached.")] = False,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """What of a prompt is cached, and whether it would be let in."""
    with session(context, address, output, timeout) as (client, fmt):
        listing = client.match([tokens], adapter=adapter, generate=generate)
        if fmt is Output.JSON:
            write_json({"header": listing.header, "matches": listing.items})
            return
        rows = [(str(len(tokens)), str(each.cached_tokens), each.admission.value, each.shortfall) for each in listing]
        write_tables(table("Match", ["tokens", "cached", "admission", "blocks short"], rows))


def tables(
    context: typer.Context,
    sequence: Annotated[
        list[int] | None, typer.Argument(help="Ids, as `kvctl sequences` lists them; none: all.")
    ] = None,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """Block tables: which blocks hold a sequence's tokens, and which of them others share."""
    with session(context, address, output, timeout) as (client, fmt):
        listing = client.tables(sequence or ())
        if fmt is Output.JSON:
            write_json({"header": listing.header, "tables": [_with_shared(each) for each in listing]})
            return
        if not listing:
            write_text("no sequence is alive\n")
        write_tables(*(_block_table(each) for each in listing))


def _with_shared(block_table: BlockTable) -> dict[str, object]:
    fields = {field.name: getattr(block_table, field.name) for field in dataclasses.fields(block_table)}
    return fields | {"shared": block_table.shared, "tokens": block_table.tokens}


def _block_table(block_table: BlockTable) -> Table:
    first = range(0, block_table.tokens, block_table.block_size)
    rows = [
        (
            str(index),
            f"{start}..{min(start + block_table.block_size, block_table.tokens) - 1}",
            str(block),
            refcount,
            shared,
        )
        for index, (start, block, refcount, shared) in enumerate(
            zip(first, block_table.blocks, block_table.refcounts, block_table.shared, strict=True)
        )
    ]
    size = f"{block_table.tokens:,} tokens in {len(rows):,} blocks"
    title = f"Sequence {block_table.sequence}: {size}, {sum(block_table.shared):,} shared"
    return table(title, ["logical", "tokens", "block", "refcount", "shared"], rows)


def models(context: typer.Context, address: Address = None, output: Format = None, timeout: Timeout = None) -> None:
    """The models that the service can generate with."""
    with session(context, address, output, timeout) as (client, fmt):
        served = client.models()
        if fmt is Output.JSON:
            write_json({"models": served})
        elif served:
            write_tables(
                table(
                    "Models", ["id", "vocabulary", "context", "end tokens", "takes"], [_model(each) for each in served]
                )
            )
        else:
            write_text("none: no executor is attached\n")


def _model(model: Model) -> tuple[object, ...]:
    takes = ["token ids"] + ["text"] * model.accepts_text + ["chat"] * model.accepts_chat
    return model.id, model.vocab_size, model.max_context, " ".join(map(str, model.eos_token_ids)), ", ".join(takes)


def _moment(header: Header) -> str:
    return f"epoch {header.epoch}, revision {header.revision}"


def reset_cache(
    context: typer.Context, address: Address = None, output: Format = None, timeout: Timeout = None
) -> None:
    """Empties the prefix cache: what is cached now is not found again. Running calls go on."""
    with session(context, address, output, timeout) as (client, fmt):
        reset = client.reset_cache()
        if fmt is Output.JSON:
            write_json(reset)
        else:
            write_text(f"{reset.freed_blocks} cached blocks became free at {_moment(reset.header)}\n")


def resize(
    context: typer.Context,
    limit: Annotated[int, typer.Argument(min=1, help="Blocks that may be in use, cached or reserved at once.")],
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """Sets the limit of the pool, within its size. Cached blocks are evicted down to it."""
    with session(context, address, output, timeout) as (client, fmt):
        resized = client.resize(limit)
        if fmt is Output.JSON:
            write_json(resized)
        else:
            write_text(f"{limit:,} blocks, {resized.evicted_blocks} evicted at {_moment(resized.header)}\n")


def quota(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="Its name, as the service's tokens file has it.")],
    floor: Annotated[int, typer.Option(min=0, help="Blocks that it can have whatever others do.")] = 0,
    most: Annotated[int | None, typer.Option("--quota", min=0, help="Blocks at most; left out: no bound.")] = None,
    host_floor: Annotated[int, typer.Option(min=0, help="As --floor, of the host's slots.")] = 0,
    host_quota: Annotated[int | None, typer.Option(min=0, help="As --quota, of the host's slots.")] = None,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """Sets what a tenant is guaranteed, and the most that it may have. Cached blocks are evicted down to it."""
    with session(context, address, output, timeout) as (client, fmt):
        done = client.set_quota(tenant, floor=floor, quota=most, host_floor=host_floor, host_quota=host_quota)
        if fmt is Output.JSON:
            write_json(done)
        else:
            write_tables(_tenants([done.usage]))


def _tenants(usages: Sequence[TenantUsage]) -> Table:
    def bounds(floor: int, most: int | None) -> str:
        return f"{floor} .. {'' if most is None else most}"

    rows = [
        (
            usage.tenant,
            usage.charged,
            usage.cached,
            usage.reserved,
            bounds(usage.floor, usage.quota),
            usage.host,
            bounds(usage.host_floor, usage.host_quota),
        )
        for usage in usages
    ]
    return table("Tenants", ["tenant", "charged", "cached", "reserved", "floor .. quota", "host", "host's"], rows)


def compact(
    context: typer.Context,
    max_moves: Annotated[int, typer.Option(min=1, max=4096, help="Blocks that one step may copy.")] = 256,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """Moves blocks of running calls to the low end of the pool, in one step of copies. The calls go on."""
    with session(context, address, output, timeout) as (client, fmt):
        compacted = client.compact(max_moves)
        if fmt is Output.JSON:
            write_json(compacted)
        else:
            write_text(
                f"{compacted.moved_blocks} blocks moved, {compacted.changed_tables} tables changed "
                f"at {_moment(compacted.header)}\n"
            )


def audit(context: typer.Context, address: Address = None, output: Format = None, timeout: Timeout = None) -> None:
    """Checks every invariant of the page table. Exit code 1 when one is violated."""
    with session(context, address, output, timeout) as (client, fmt):
        found = client.audit()
        if fmt is Output.JSON:
            write_json({"header": found.header, "ok": found.ok, "violations": found.violations})
        else:
            write_text(f"{len(found.violations) or 'no'} violations at {_moment(found.header)}\n")
            for violation in found.violations:
                write_text(f"  {violation}\n")
        if not found.ok:
            raise typer.Exit(1)
