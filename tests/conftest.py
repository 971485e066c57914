from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import skips
from support.processes import Stack

# No test asks a model hub for anything: what is not here is built, or its test skipped.
os.environ["HF_HUB_OFFLINE"] = "1"

CACHE = Path(__file__).resolve().parent.parent / ".cache"
MODELS = CACHE / "models"
# Conversions of GGUF files, kept between runs.
MODEL_CACHE = Path(os.environ.get("PAGEDKV_EXECUTOR_MODEL_CACHE", CACHE / "converted"))
SMOLLM2 = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"

_stacks = pytest.StashKey[list[Stack]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--check-skips", action="store_true", help="fail unless exactly the committed tests are skipped")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--check-skips"):
        path = skips.LISTS / f"{skips.kind_of_machine()}.txt"
        config.pluginmanager.register(skips.SkipList(path), "skip-list")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test's report ends with the last lines of its processes' logs."""
    report = yield
    if report.failed:
        for holder in (item, item.getparent(pytest.Module)):
            for stack in holder.stash.get(_stacks, []) if holder is not None else []:
                report.sections.extend(stack.log_tails())
    return report


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1; `make test` has put it there, a bare pytest run fetches it."""
    if not SMOLLM2.exists():
        fetch = subprocess.run(
            [sys.executable, "-m", "gpu_executor", "fetch-model", str(MODELS)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if fetch.returncode != 0:
            pytest.skip("SmolLM2 is not here and could not be fetched: run `make model` with a network")
    return SMOLLM2


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where conversions of GGUF files are kept."""
    return MODEL_CACHE


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a chat template, good for float64."""
    from support.tiny_models import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """Starts block-manager and gpu-executor for one test: `stack(model=..., blocks=...)`, see Stack."""
    yield from _stack_factory(request, tmp_path_factory)


@pytest.fixture(scope="module")
def module_stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Stack]]:
    """As `stack`, for processes that the tests of a module share."""
    yield from _stack_factory(request, tmp_path_factory)


def _stack_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Stack]]:
    stacks = request.node.stash.setdefault(_stacks, [])

    def start(**parameters: object) -> Stack:
        made = Stack(tmp_path_factory.mktemp("stack"), **{"model_cache": MODEL_CACHE, **parameters})
        stacks.append(made)  # before it starts: a start that fails is reported and ended too
        made.start()
        return made

    yield start
    for each in stacks:
        each.close()
