from __future__ import annotations

from pathlib import Path

import pytest

from block_manager_svc.config import BadSettings, Settings, load


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PAGEDKV_{name.upper()}", raising=False)


def file_of(folder: Path, content: str | bytes) -> Path:
    path = folder / "settings.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = file_of(tmp_path, "token_budget: 1\nmax_running: 1\nmax_queue: 1\n")
    monkeypatch.setenv("PAGEDKV_TOKEN_BUDGET", "2")
    monkeypatch.setenv("PAGEDKV_MAX_RUNNING", "2")
    settings = load({"token_budget": 3}, config)
    assert (settings.token_budget, settings.max_running, settings.max_queue) == (3, 2, 1)
    assert settings.drain_grace == Settings.model_fields["drain_grace"].default


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    assert load({}, None).listen == "127.0.0.1:50061"


def test_every_setting_may_come_from_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "listen": "0.0.0.0:1",
        "tokens_file": Path("/tokens"),
        "tls_cert": Path("/cert.pem"),
        "tls_key": Path("/key.pem"),
        "tls_client_ca": Path("/ca.pem"),
        "token_budget": 7,
        "max_running": 8,
        "max_queue": 9,
        "eviction": "lfu",
        "watermark": 0.05,
        "zero_between_tenants": False,
        "folding": True,
        "executor_grace": 1.5,
        "heartbeat_interval": 2.5,
        "silence_limit": 12.5,
        "write_timeout": 3.5,
        "drain_grace": 4.5,
        "log_level": "debug",
        "log_format": "json",
    }
    assert values.keys() == Settings.model_fields.keys()
    file = load({}, file_of(tmp_path, "".join(f"{name}: {value}\n" for name, value in values.items())))
    assert file.model_dump() == values
    for name, value in values.items():
        monkeypatch.setenv(f"PAGEDKV_{name.upper()}", str(value))
    assert load({}, None).model_dump() == values


def test_other_variables_of_the_project_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_EXECUTOR_DEVICE", "cpu")
    assert load({}, None).max_queue == 1024


@pytest.mark.parametrize("content", ["", "---\n", "# nothing\n"])
def test_an_empty_file_leaves_the_defaults(tmp_path: Path, content: str) -> None:
    assert load({}, file_of(tmp_path, content)).model_dump() == load({}, None).model_dump()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("tokenbudget: 1\n", ["unknown setting 'tokenbudget'", "token_budget"]),
        ("token_budget: many\n", ["settings.yaml: token_budget", "'many'"]),
        ("token_budget: 0\n", ["settings.yaml: token_budget", "not 0"]),
        ("listen: 50061\n", ["settings.yaml: listen"]),
        ("listen: nowhere\n", ["host:port", "'nowhere'"]),
        ("drain_grace: .nan\n", ["settings.yaml: drain_grace"]),
        ("drain_grace: .inf\n", ["settings.yaml: drain_grace"]),
        ("log_level: loud\n", ["settings.yaml: log_level", "'loud'"]),
        ("- a\n- b\n", ["must be a map"]),
        ("just words", ["must be a map"]),
        ("a: [\n", ["not YAML"]),
        ("!!python/object/apply:os.getpid []\n", ["not YAML"]),
        (b"\xff\xfe\xfd", ["not YAML"]),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    with pytest.raises(BadSettings) as caught:
        load({}, file_of(tmp_path, content))
    (line,) = caught.value.lines
    assert "\n" not in line
    for word in words:
        assert word in line


def test_a_file_that_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=r"nothing\.yaml: No such file"):
        load({}, tmp_path / "nothing.yaml")


def test_each_bad_value_has_its_line_and_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_MAX_QUEUE", "-1")
    config = file_of(tmp_path, "max_running: none\n")
    with pytest.raises(BadSettings) as caught:
        load({"token_budget": 0}, config)
    origins = [line.partition(": ")[0] for line in caught.value.lines]
    assert set(origins) == {"--token-budget", "PAGEDKV_MAX_QUEUE", str(config)}


@pytest.mark.parametrize("address", ["", ":1", "host", "host:", "host:x", "host:65536", "host:-1"])
def test_an_address_needs_host_and_port(address: str) -> None:
    with pytest.raises(BadSettings, match="--listen: must be host:port"):
        load({"listen": address}, None)


def test_silence_must_outlast_the_heartbeat() -> None:
    with pytest.raises(BadSettings, match="at least twice the heartbeat_interval"):
        load({"heartbeat_interval": 5.0, "silence_limit": 9.0}, None)
    assert load({"heartbeat_interval": 5.0, "silence_limit": 10.0}, None).silence_limit == 10.0
