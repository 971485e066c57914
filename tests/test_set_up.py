from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


class PipWasRun(Exception):
    pass


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """.ci/set_up.py over a checkout of its own whose environment is there already, and pip forbidden."""
    spec = importlib.util.spec_from_file_location("set_up", ROOT / ".ci" / "set_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def pip(*arguments: str) -> None:
        raise PipWasRun(arguments)

    module.ROOT, module.VENV, module.PYTHON, module.pip = tmp_path, tmp_path / ".venv", Path(sys.executable), pip
    module.VENV.mkdir()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    stamp = tmp_path / "stamp"
    stamp.write_text(module.wanted())
    monkeypatch.setattr(sys, "argv", ["set_up.py", str(stamp)])
    monkeypatch.setattr(module.subprocess, "run", lambda *arguments, **options: None)
    return module


def edit(set_up: ModuleType, old: str, new: str) -> None:
    path = set_up.ROOT / "pyproject.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_environment_that_is_up_to_date_is_left_alone(set_up: ModuleType) -> None:
    set_up.main()


def test_a_tools_settings_do_not_call_for_an_installation(set_up: ModuleType) -> None:
    edit(set_up, "line-length = 120", "line-length = 100")
    set_up.main()


def test_a_changed_dependency_does(set_up: ModuleType) -> None:
    edit(set_up, '"grpcio>=', '"grpcio!=1.0,>=')
    with pytest.raises(PipWasRun):
        set_up.main()


def test_so_does_an_interpreter_that_is_gone(set_up: ModuleType) -> None:
    set_up.PYTHON = set_up.ROOT / "gone"
    with pytest.raises(PipWasRun):
        set_up.main()
