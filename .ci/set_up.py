"""Makes .venv and installs this checkout into it, saying what it does all the while.

Only the standard library: this runs before anything is installed. A second run
with unchanged dependencies touches neither pip nor the network.

    python3 .ci/set_up.py STAMP
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# No line of output for longer than this while pip works.
QUIET_LIMIT_S = 10.0

# Of pip's many lines, those that say what takes time now.
_NEWS = ("Downloading", "Building", "Installing collected", "ERROR", "WARNING")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def wanted() -> str:
    """What the environment is made from, as a digest: settings of tools in pyproject.toml don't count."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    made_from = [
        str(ROOT),  # an editable install names the checkout's place
        sys.version_info[:2],
        project["build-system"],
        project["project"],
        project["tool"]["hatch"],
    ]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def pip(*arguments: str) -> None:
    """Runs pip in the environment; its downloads and its silences are reported every few seconds."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    began = spoke = time.monotonic()
    doing, said = "starting pip", list[str]()
    try:
        while True:
            try:
                line = lines.get(timeout=max(0.1, spoke + QUIET_LIMIT_S - time.monotonic()))
            except queue.Empty:
                line = ""
            if line is None:
                break
            now = time.monotonic()
            progress = _PROGRESS.match(line)
            if line and not progress:
                said.append(line)
            if line.lstrip().startswith(_NEWS):
                doing = line.strip()[:100]
                say(f"{now - began:4.0f} s  {doing}")
            elif now - spoke < QUIET_LIMIT_S:
                continue
            elif progress:
                done, total = (int(number) / 1e6 for number in progress.groups())
                say(f"{now - began:4.0f} s  {doing}: {done:,.0f} of {total:,.0f} MB")
            else:
                say(f"{now - began:4.0f} s  still at: {doing}")
            spoke = now
    finally:
        process.terminate()
        status = process.wait()
    if status != 0:
        print(*said[-40:], sep="\n", file=sys.stderr)
        sys.exit(f"setup: pip {arguments[0]} failed with status {status}; its last words are above")


def main() -> None:
    stamp = Path(sys.argv[1])
    digest = wanted()
    if stamp.exists() and stamp.read_text() == digest and PYTHON.exists():
        stamp.touch()
        return
    say(f"making {VENV.relative_to(ROOT)} with {sys.executable} ({sys.version.split()[0]})")
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    # The pip that a Python ships cannot report a download's progress to a pipe before 24.1.
    pip("install", "--upgrade", "pip>=24.1")
    say("installing the project and its tools; PyTorch is the large part, this takes some minutes")
    pip("install", "--progress-bar", "raw", "--editable", f"{ROOT}[dev]")
    stamp.write_text(digest)
    say("done")


if __name__ == "__main__":
    main()
