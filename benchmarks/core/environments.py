"""Peers in environments of their own, .cache/peers/NAME, made from PyPI by the first run.

Each holds the peer, at one version and without the packages that it declares (kernels, servers: 10 GB), and beside it
what importing its block manager takes. PyTorch, transformers and numpy are this project's, through a .pth file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".cache" / "peers"
MAKE_LIMIT_S, RUN_LIMIT_S = 900, 300
MOST_DISK = 3 << 30  # bytes that must be free before an environment is made


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    beside: tuple[str, ...]


ALL = (
    Peer(
        "vllm",
        "vllm==0.33.0",
        (
            "aiohappyeyeballs==2.7.1",
            "aiohttp==3.14.5",
            "aiosignal==1.4.0",
            "apache-tvm-ffi==0.1.15.post2",
            "attrs==26.1.0",
            "cachetools==8.0.2",
            "cbor2==6.3.0",
            "cloudpickle==3.1.3",
            "fastapi==0.165.0",
            "frozenlist==1.8.0",
            "jiter==0.19.0",
            "llguidance==1.9.1",
            "msgspec==0.23.0",
            "multidict==7.2.1",
            "openai==3.57.0",
            "openai-harmony==0.0.8",
            "partial-json-parser==0.2.1.1.post7",
            "pillow==13.0.0",
            "propcache==0.5.4",
            "py-cpuinfo==9.0.0",
            "pybase64==1.5.1",
            "pyzmq==27.3.0",
            "sniffio==1.3.1",
            "starlette==1.10.0",
            "uvloop==0.23.0",
            "xgrammar==0.2.9",
            "yarl==1.25.1",
        ),
    ),
    Peer(
        "lmdeploy",
        "lmdeploy==0.18.0",
        (
            "addict==2.4.0",
            "apache-tvm-ffi==0.1.15.post2",
            "mmengine-lite==0.10.7",
            "pillow==13.0.0",
            "platformdirs==4.14.9",
            "pybase64==1.5.1",
            "pyzmq==27.3.0",
            "shortuuid==1.0.13",
            "termcolor==3.3.0",
            "xgrammar==0.2.9",
            "yapf==0.43.0",
        ),
    ),
    Peer(
        "sglang",
        "sglang==0.5.23",
        (
            "aiohappyeyeballs==2.7.1",
            "aiohttp==3.14.5",
            "aiosignal==1.4.0",
            "apache-tvm-ffi==0.1.15.post2",
            "attrs==26.1.0",
            "compressed-tensors==0.20.1",
            "dill==0.4.1",
            "frozenlist==1.8.0",
            "ipython==9.18.1",
            "loguru==0.7.3",
            "msgspec==0.23.0",
            "multidict==7.2.1",
            "orjson==3.13.0",
            "pillow==13.0.0",
            "propcache==0.5.4",
            "pybase64==1.5.1",
            "pyzmq==27.3.0",
            "sentencepiece==0.2.3",
            "starlette==1.10.0",
            "torchvision==0.29.2",
            "traitlets==5.16.1",
            "yarl==1.25.1",
        ),
    ),
)


def measure(peer: Peer) -> dict[str, Any]:
    """What the peer's driver prints: version, figures in µs by row, notes by row. RuntimeError says why there is none.

    The driver is benchmarks/core/peers/NAME.py, run by the peer's own Python.
    """
    folder = _environment(peer)
    try:
        done = subprocess.run(
            [folder / "bin" / "python", "-m", f"benchmarks.core.peers.{peer.name}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": "", "VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{peer.package} took longer than {RUN_LIMIT_S} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"{peer.package} failed: {_last_line(done.stderr)}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _environment(peer: Peer) -> Path:
    folder = PEERS / peer.name
    stamp, wanted = folder / "made-from", "\n".join((sys.version, peer.package, *peer.beside))
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    PEERS.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(PEERS).free < MOST_DISK:
        raise RuntimeError(f"{peer.package} is not installed: less than {MOST_DISK >> 30} GiB of disk are free")
    print(f"making {folder.relative_to(ROOT)} with {peer.package}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-cache-dir", "--quiet"]
    try:
        done = subprocess.run(
            [*pip, "--disable-pip-version-check", "--no-input", "--only-binary=:all:", peer.package, *peer.beside],
            capture_output=True,
            text=True,
            timeout=MAKE_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{peer.package} is not installed: it took longer than {MAKE_LIMIT_S} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"{peer.package} is not installed: {_last_line(done.stderr)}")
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.write_text(wanted)
    return folder


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it says nothing"
