"""Every figure that the README states: `python -m benchmarks --model FILE.gguf [-o json] [name …]`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import cpu_attention, end_to_end, machine, step_batch, step_overhead


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="step_overhead, step_batch, cpu_attention, end_to_end; default: all")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct as GGUF")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    options = parser.parse_args()
    cache = Path(os.environ.get("PAGEDKV_EXECUTOR_MODEL_CACHE", ".cache/converted"))

    figures: dict[str, tuple[Any, Callable[[], Any]]] = {
        "step_overhead": (step_overhead, step_overhead.run),
        "step_batch": (step_batch, step_batch.run),
        "cpu_attention": (cpu_attention, cpu_attention.run),
        "end_to_end": (end_to_end, lambda: end_to_end.run(options.model, cache)),
    }
    names = options.names or list(figures)
    if unknown := set(names) - set(figures):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}")
    console, results = Console(), {"machine": machine.describe()}
    if options.output == "text":
        console.print(f"On {machine.describe()}.\n")
    for name in names:
        module, run = figures[name]
        rows = run()
        results[name] = module.to_json(rows)
        if options.output == "text":
            title, columns, cells = module.table(rows)
            table = Table(*columns, title=title, title_justify="left")
            for row in cells:
                table.add_row(*row)
            console.print(table)
            console.print()
    if options.output == "json":
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
