"""Mutation testing of the core: changes one thing at a time and asks whether tests/core fails. `make mutate`.

What is changed, and what is left out of the tests for their time, is in pyproject.toml. A run that was stopped goes on
where it was, as far as neither the code nor the tests have changed. The record counts what has been judged so far.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "records" / "core-mutation.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, help="stop after so long, with a record of what was judged")
    parser.add_argument("mutants", nargs="*", help="names or patterns, as mutmut has them; all without any")
    options = parser.parse_args()
    began = time.monotonic()
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *options.mutants]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
    record(time.monotonic() - began)


def record(seconds: float) -> None:
    files = {}
    for path in sorted((ROOT / "mutants" / "block_manager_svc" / "core").glob("*.py.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"].values()
        if codes:
            files[path.name.removesuffix(".meta")] = Counter(status_by_exit_code[code] for code in codes)
    total = sum(files.values(), Counter[str]())
    judged = total.total() - total["not checked"]
    found = total["killed"] + total["timeout"]
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    text = json.dumps(
        {
            "proof": "mutation testing of the core",
            "files": {name: dict(sorted(counts.items())) for name, counts in files.items()},
            "total": dict(sorted(total.items())),
            "killed of those judged": round(found / judged, 3) if judged else None,
            "seconds": round(seconds, 1),
            "mutmut": version("mutmut"),
            "python": sys.version.split()[0],
            "revision": revision.strip(),
        },
        indent=2,
    )
    print(text)
    RECORD.write_text(text + "\n")


if __name__ == "__main__":
    main()
