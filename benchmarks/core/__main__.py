"""The page table's speed beside its peers', in one run: `python -m benchmarks.core [--record FOLDER] [--peers …]`."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.core import environments, ours
from benchmarks.core.work import BLOCK, NUM_BLOCKS, ROWS, Work


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.core", description=__doc__)
    parser.add_argument("--record", type=Path, help="folder for core-bench.json")
    parser.add_argument("--peers", nargs="*", default=[peer.name for peer in environments.ALL], help="default: all")
    options = parser.parse_args()
    record = {"figure": "the core beside its peers", "measured on": _measured_on(), "ours, µs": _rounded(ours.run())}
    record["peers"] = {peer.name: _peer(peer) for peer in environments.ALL if peer.name in options.peers}
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_title(record))
    console.print(_table(record))
    for name, peer in record["peers"].items():
        if "missing" in peer:
            console.print(f"{name} did not run: {peer['missing']}.")
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        (options.record / "core-bench.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _measured_on() -> dict[str, Any]:
    git = ["git", "rev-parse", "HEAD"]
    return {
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "revision": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
    }


def _peer(peer: environments.Peer) -> dict[str, Any]:
    """Its version, figures and notes; or why they are missing."""
    try:
        result = environments.measure(peer)
    except RuntimeError as error:
        return {"missing": str(error)}
    return {"version": result["version"], "µs": _rounded(result["figures"]), "notes": result["notes"]}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(us, 2) for name, us in figures.items()}


def _title(record: dict[str, Any]) -> str:
    on = record["measured on"]
    return (
        f"{NUM_BLOCKS:,} blocks of {BLOCK} tokens, on {on['cpu']}, {on['cores']} cores; Python {on['python']}, "
        f"numpy {on['numpy']}. µs; in brackets, times ours; ~ measured elsewhere."
    )


def _table(record: dict[str, Any]) -> Table:
    versions = [f"{name} {peer.get('version', '')}".strip() for name, peer in record["peers"].items()]
    table = Table("work", "target", "ours", *versions)
    for work in ROWS:
        mine = record["ours, µs"][work.name]
        cells = [_cell(work, name, peer, mine) for name, peer in record["peers"].items()]
        table.add_row(work.title, f"≤ {work.target:g}", _number(mine), *cells)
        if (other := record["ours, µs"].get(f"grow {work.name}")) is not None:
            table.add_row("  as grow + commit", "", _number(other))
    return table


def _cell(work: Work, name: str, peer: dict[str, Any], mine: float) -> str:
    figure = peer.get("µs", {}).get(work.name)
    if figure is not None:
        return f"{_number(figure)} ({figure / mine:.1f}×)"
    if work.name in peer.get("notes", {}):
        return "–"
    return f"~ {work.elsewhere[name]}" if name in work.elsewhere else ""


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:,.1f}"


if __name__ == "__main__":
    main()
