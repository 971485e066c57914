"""GGUF files, converted once into a folder that transformers loads in well under a second.

    cache/gguf/<sha256>-f32-v1/     config.json, model.safetensors (f32), tokenizer.json, ...
    cache/gguf/<name>-<path hash>.json   the file's size, time of change and SHA-256, so that it is hashed once

The key is the file's content. A folder appears by rename, whole or not at all; of two processes one converts and the
other waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

FORMAT = "f32-v1"


def converted_folder(file: Path, cache_dir: Path) -> Path:
    """The folder that `file` converts to; converts it when no one has yet. Raises what transformers raises."""
    root = cache_dir / "gguf"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{_content_key(file, root)}-{FORMAT}"
    if folder.is_dir():
        return folder
    with _locked(root / f"{folder.name}.lock"):
        if not folder.is_dir():
            for abandoned in root.glob(f"{folder.name}.tmp-*"):  # the lock is ours, so its maker is dead
                shutil.rmtree(abandoned)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=root))
            try:
                _convert(file, unfinished)
                unfinished.rename(folder)
            except BaseException:
                shutil.rmtree(unfinished)
                raise
    return folder


def _content_key(file: Path, root: Path) -> str:
    """SHA-256 of the file, remembered for as long as its size and time of change stay."""
    path = file.resolve()
    stat = path.stat()
    seen = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    note = root / f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.json"
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        known = json.loads(note.read_text())
        if {**seen, "sha256": known.get("sha256")} == known:
            return str(known["sha256"])
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    unfinished = note.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({**seen, "sha256": digest}))
    unfinished.rename(note)
    return digest


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file; the kernel lets go of it when the process dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _header_parsed_once():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    # The weights are plain f32 now: what is saved is no longer a quantized model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _header_parsed_once() -> Iterator[None]:
    """transformers parses the header three times and builds the map of tensor names once a module: most of its time."""
    import gguf

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map
