from __future__ import annotations

import pytest
from support.skips import SkipList

pytest_plugins = "pytester"

TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.skipif(True, reason="needs  a\\nGPU")
def test_of_kernels():
    pass
"""


def run(pytester: pytest.Pytester, committed: str) -> pytest.RunResult:
    pytester.makepyfile(test_sample=TESTS)
    path = pytester.path / "cpu.txt"
    path.write_text(committed)
    return pytester.runpytest_inprocess("-p", "no:asyncio", plugins=[SkipList(path)])


def test_a_run_that_skips_what_is_committed_passes_and_lists_it(pytester: pytest.Pytester) -> None:
    result = run(pytester, "# why\n\ntest_sample.py::test_of_kernels: needs a GPU\n")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*1 skipped*(cpu)*", "test_sample.py::test_of_kernels: needs a GPU"])


@pytest.mark.parametrize(
    ("committed", "difference"),
    [
        ("", "+test_sample.py::test_of_kernels: needs a GPU"),
        ("test_sample.py::test_of_kernels: no compiler\n", "-test_sample.py::test_of_kernels: no compiler"),
        (
            "test_sample.py::test_gone: old\ntest_sample.py::test_of_kernels: needs a GPU\n",
            "-test_sample.py::test_gone: old",
        ),
    ],
    ids=["a new skip", "another reason", "a skip that is gone"],
)
def test_a_run_that_skips_otherwise_fails_and_shows_the_difference(
    pytester: pytest.Pytester, committed: str, difference: str
) -> None:
    result = run(pytester, committed)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines([difference])
