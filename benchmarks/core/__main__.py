"""The page table's speed beside its peers', what grows, what it weighs: `python -m benchmarks.core [--write]`."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.core import environments, growth, memory, ours, report

ROOT = environments.ROOT
RECORD = ROOT / "docs" / "records" / "core-bench.json"
PLOT = ROOT / "docs" / "img" / "core-growth.svg"
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.core", description=__doc__)
    parser.add_argument("--peers", nargs="*", default=[peer.name for peer in environments.ALL], help="default: all")
    parser.add_argument("--write", action="store_true", help="also write the record, the plot, and docs/benchmarks.md")
    options = parser.parse_args()

    record: dict[str, Any] = {"figure": "the core beside its peers", "measured on": _measured_on()}
    record["ours, µs"] = _rounded(ours.run())
    record["peers"] = {peer.name: _peer(peer) for peer in environments.ALL if peer.name in options.peers}
    curves = {
        axis: {what: [round(v, 2) for v in values] for what, values in curve.items()}
        for axis, curve in growth.measure().items()
    }
    record["growth"] = {"µs": curves, "last of each curve as a multiple of its first": growth.growth(curves)}
    record["bytes"] = _weigh()

    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, columns, rows in report.tables(record):
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(report.remarks(record))
    if options.write:
        RECORD.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        growth.plot(curves, report.where(record), PLOT)
        PAGE.write_text(report.page(record, PAGE.read_text()))


def _measured_on() -> dict[str, Any]:
    git = ["git", "rev-parse", "HEAD"]
    return {
        "date": datetime.now(UTC).date().isoformat(),
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


def _weigh() -> dict[str, float]:
    """In a process of its own: what is traced is nobody else's."""
    command = [sys.executable, "-m", memory.__name__]
    return _rounded(json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout))


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in figures.items()}


if __name__ == "__main__":
    main()
