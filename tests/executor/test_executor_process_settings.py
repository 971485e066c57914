from __future__ import annotations

from pathlib import Path

import pytest

from gpu_executor.config import SettingsInvalid, load_settings
from gpu_executor.memory import Budget


@pytest.fixture(autouse=True)
def no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("PAGEDKV_"):
            monkeypatch.delenv(name)


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "executor.yaml"
    file.write_text(text)
    return file


def test_defaults_listen_on_loopback() -> None:
    settings = load_settings({"model": "m"})
    assert (settings.service, settings.listen) == ("127.0.0.1:50061", "127.0.0.1:50062")
    assert settings.block_size == 16
    assert settings.blocks is settings.memory is settings.dtype is settings.device is None


def test_flags_win_over_environment_and_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = yaml_file(tmp_path, "model: from-file\nblocks: 10\nblock_size: 4\nmax_rows: 7\n")
    monkeypatch.setenv("PAGEDKV_EXECUTOR_BLOCKS", "20")
    monkeypatch.setenv("PAGEDKV_EXECUTOR_BLOCK_SIZE", "8")
    settings = load_settings({"block_size": "32"}, file)
    assert (settings.block_size, settings.blocks, settings.max_rows) == (32, 20, 7)
    assert settings.model == Path("from-file")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_EXECUTOR_CONFIG", str(yaml_file(tmp_path, "model: m\nmemory: 60%\n")))
    assert load_settings({}).memory == Budget(percent=60)


def test_short_names_of_dtypes() -> None:
    names = {"f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f64": "float64", "float64": "float64"}
    assert {short: load_settings({"model": "m", "dtype": short}).dtype for short in names} == names


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, "model is missing: give --model, PAGEDKV_EXECUTOR_MODEL or a line of the config file"),
        ({"block_size": "0"}, "block-size: Input should be greater than or equal to 1, got '0'"),
        ({"block_size": "many"}, "block-size: .*got 'many'"),
        ({"blocks": "1"}, "blocks: Input should be greater than or equal to 2, got '1'"),
        ({"memory": "lots"}, "memory: 'lots' is no amount of memory: write it like 8GiB, 512MiB or 60%"),
        ({"blocks": "9", "memory": "1GiB"}, "blocks and memory both say how large a pool is: give one of them"),
        ({"service": "nowhere"}, "service: 'nowhere' is no HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "listen: '127.0.0.1:99999' is no HOST:PORT"),
        ({"device": "tpu"}, "device: 'tpu' is none of cpu, cuda, cuda:N"),
        ({"dtype": "int4"}, "dtype: Input should be 'float32', 'bfloat16', 'float16' or 'float64', got 'int4'"),
        ({"log_format": "xml"}, "log-format: Input should be 'console' or 'json', got 'xml'"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(flags: dict[str, str], line: str) -> None:
    with pytest.raises(SettingsInvalid, match=line) as error:
        load_settings(({"model": "m"} if flags else {}) | flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: m\nblok_size: 4\n", "there is no setting blok-size"),
        ("model: [m\n", "executor.yaml is no YAML map of settings"),
        ("- a\n- b\n", "executor.yaml is no YAML map of settings"),
        ("model: m\nblocks: few\n", "blocks: .*got 'few'"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(SettingsInvalid, match=line) as error:
        load_settings({}, yaml_file(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="there is no file"):
        load_settings({"model": "m"}, tmp_path / "no.yaml")
