"""A skipped test is a claim about the machine, so the list of them is committed and compared.

With `--check-skips` a run ends with every skipped test and its reason, and fails
unless that list is the one in tests/skips/<kind of machine>.txt, line by line.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

LISTS = Path(__file__).resolve().parent.parent / "skips"


def kind_of_machine() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def committed_skips(path: Path) -> list[str]:
    """Lines of the list, without blank ones and comments; a kind without a list skips nothing."""
    if not path.exists():
        return []
    lines = (line.strip() for line in path.read_text().splitlines())
    return sorted(line for line in lines if line and not line.startswith("#"))


class SkipList:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._skipped: set[str] = set()
        self._difference: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        # pytest gives a skip's place and reason as (path, line, "Skipped: reason").
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self._skipped.add(f"{report.nodeid}: {' '.join(reason.removeprefix('Skipped: ').split())}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        name = self._path.name
        self._difference = list(
            difflib.unified_diff(committed_skips(self._path), sorted(self._skipped), name, "this run", lineterm="", n=0)
        )
        if self._difference and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section(f"{len(self._skipped)} skipped on this kind of machine ({self._path.stem})")
        for line in sorted(self._skipped):
            write(line)
        if self._difference:
            terminalreporter.section("the skipped tests are not those of the committed list", red=True)
            for line in self._difference:
                write(line)
