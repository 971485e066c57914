"""A record as tables for the terminal, and as the generated part of docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

from benchmarks.core.memory import TARGETS
from benchmarks.core.work import BLOCK, NUM_BLOCKS, ROWS, Work

BEGIN, END = "<!-- written by make bench-core: begin -->", "<!-- end -->"
_Table = tuple[str, list[str], list[list[str]]]


def where(record: dict[str, Any]) -> str:
    on = record["measured on"]
    return (
        f"{on['cpu']}, {on['cores']} cores; Python {on['python']}, numpy {on['numpy']}; revision {on['revision'][:7]}"
    )


def tables(record: dict[str, Any]) -> list[_Table]:
    """Title, columns, rows of each."""
    return [_beside_peers(record), _growth(record), _bytes(record)]


def remarks(record: dict[str, Any]) -> str:
    """What the peers' figures are of, and which are of another machine."""
    lines = ["×: times ours. ~: measured elsewhere, on 2 cores. –: the peer has no such thing."]
    titles = {work.name: work.title for work in ROWS}
    for name, peer in record["peers"].items():
        if "missing" in peer:
            lines.append(f"{name} did not run here: {peer['missing']}.")
        else:
            lines += [f"{name}, {titles[work]}: {note}." for work, note in peer["notes"].items()]
    return "\n".join(lines)


def page(record: dict[str, Any], text: str) -> str:
    """The page, with what lies between its marks written anew."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    parts = [f"On {where(record)}, {record['measured on']['date']}."]
    for title, columns, rows in tables(record):
        lines = [f"**{title}**", ""]
        lines += [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] + ["---:"] * (len(columns) - 1), *rows)]
        parts.append("\n".join(lines))
    parts.append("\n".join(f"* {line}" for line in remarks(record).splitlines()))
    return head + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + tail


def _beside_peers(record: dict[str, Any]) -> _Table:
    rows = []
    for work in ROWS:
        mine = record["ours, µs"][work.name]
        cells = [_cell(work, name, peer, mine) for name, peer in record["peers"].items()]
        rows.append([work.title, f"≤ {work.target}", _number(mine), *cells])
        if (other := record["ours, µs"].get(f"grow {work.name}")) is not None:
            rows.append(["… as grow and commit", "", _number(other), *[""] * len(cells)])
    peers = [f"{name} {peer.get('version', '')}".strip() for name, peer in record["peers"].items()]
    return f"µs, in a pool of {NUM_BLOCKS:,} blocks of {BLOCK} tokens", ["work", "target", "ours", *peers], rows


def _cell(work: Work, name: str, peer: dict[str, Any], mine: float) -> str:
    figure = peer.get("µs", {}).get(work.name)
    if figure is not None:
        return f"{_number(figure)} ({figure / mine:.1f}×)"
    if work.name in peer.get("notes", {}):
        return "–"
    return f"~ {work.elsewhere[name]}" if name in work.elsewhere else ""


def _growth(record: dict[str, Any]) -> _Table:
    rows = []
    for (axis, sizes), *lines in (curve.items() for curve in record["growth"]["µs"].values()):
        for what, values in lines:
            rows.append(
                [
                    what,
                    f"{sizes[0]:,.0f} → {sizes[-1]:,.0f} {axis}",
                    f"{_number(values[0])} → {_number(values[-1])}",
                    f"{values[-1] / values[0]:.2f}",
                ]
            )
    return "What does not grow, µs", ["work", "over", "from → to", "ratio"], rows


def _bytes(record: dict[str, Any]) -> _Table:
    rows = [
        [what, f"≤ {TARGETS[what]}" if what in TARGETS else "", f"{size:,.1f}"]
        for what, size in record["bytes"].items()
    ]
    return "Bytes", ["a", "target", "measured"], rows


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:,.1f}"
