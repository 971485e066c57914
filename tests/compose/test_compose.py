"""The compose project on a real engine; `make test-compose` runs it, `make test` does not.

DOCKER_COMPOSE names the command (default: docker compose), DOCKER_HOST the engine.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import free_port

from pagedkv import Client

ROOT = Path(__file__).resolve().parent.parent.parent
KVCTL = Path(sys.executable).with_name("kvctl")
# Images are built and the model fetched within the first, a container is back within the second.
UP_DEADLINE_S = 1800
BACK_DEADLINE_S = 180

pytestmark = pytest.mark.timeout(UP_DEADLINE_S + 600)


class Project:
    """One compose project, of its own name and port, so that a project that is up already stays as it is."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._environment = {**os.environ, "PAGEDKV_PORT": self.address.rpartition(":")[2]}
        self._command = [*shlex.split(os.environ.get("DOCKER_COMPOSE", "docker compose")), "-p", "pagedkv-test"]

    def up(self) -> None:
        """Builds and starts everything and waits until it is healthy; shows how that goes."""
        subprocess.run(
            [
                *(*self._command, "--progress", "plain", "up", "--detach", "--build"),
                *("--wait", "--wait-timeout", str(UP_DEADLINE_S)),
            ],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            check=True,
        )

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Runs one compose command to its end, and returns its standard output."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"compose {' '.join(arguments)} ended with {done.returncode}"
        return done.stdout

    def containers(self) -> dict[str, dict[str, Any]]:
        """`compose ps` by service."""
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return {container["Service"]: container for container in map(json.loads, lines)}

    def kvctl(self, *arguments: str) -> Any:
        """Runs kvctl on the host; its JSON."""
        done = subprocess.run(
            [str(KVCTL), "--address", self.address, "-o", "json", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"kvctl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)

    def wait_until_serving(self) -> None:
        """Until the service says that an executor is attached."""
        end = time.monotonic() + BACK_DEADLINE_S
        with Client(self.address) as client:
            while not client.healthy(timeout=2.0):
                assert time.monotonic() < end, f"not SERVING after {BACK_DEADLINE_S} s"
                time.sleep(0.2)


@pytest.fixture(scope="module")
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    project = Project()
    try:
        project.up()
        yield project
    finally:
        if request.session.testsfailed:
            sys.stdout.write(project.compose("logs", "--no-color", "--tail", "60", check=False))
        project.compose("down", "--volumes", "--timeout", "10", check=False)


def completion(project: Project) -> str:
    answer = project.kvctl("generate", "The capital of France is", "--max-tokens", "8")
    return str(answer["samples"][0]["text"])


def test_generate_and_status_answer_from_the_host(project: Project) -> None:
    assert "Paris" in completion(project)
    assert project.kvctl("status")["healthy"] is True


def test_nothing_is_published_beyond_loopback(project: Project) -> None:
    published = [
        port["URL"]
        for container in project.containers().values()
        for port in container["Publishers"] or []
        if port["PublishedPort"]
    ]
    assert published
    assert set(published) == {"127.0.0.1"}


@pytest.mark.parametrize("service", ["service", "executor"])
def test_containers_are_healthy_run_as_nobody_and_cannot_write_their_root(project: Project, service: str) -> None:
    assert project.containers()[service]["Health"] == "healthy"
    found = project.compose(
        *("exec", "-T", service, "python", "-c"),
        "import os; print(os.getuid(), os.statvfs('/').f_flag & os.ST_RDONLY)",
    )
    assert found.split() == ["10001", "1"]


def test_the_image_of_the_service_has_no_torch(project: Project) -> None:
    question = "from importlib.util import find_spec as f; print(f('torch'), f('gpu_executor.engine'))"
    assert project.compose("exec", "-T", "service", "python", "-c", question).split() == ["None", "None"]


def test_generate_answers_again_after_the_executor_restarts(project: Project) -> None:
    before = completion(project)
    epoch = project.kvctl("status")["pool"]["header"]["epoch"]
    project.compose("restart", "executor")
    project.wait_until_serving()
    assert completion(project) == before
    assert project.kvctl("status")["pool"]["header"]["epoch"] > epoch


def test_the_service_comes_back_after_kill_9(project: Project) -> None:
    before = completion(project)
    service_id = project.kvctl("status")["pool"]["header"]["service_id"]
    # From inside, and all but PID 1: the engine counts `docker kill` as wanted, and restarts nothing.
    project.compose("exec", "-T", "service", "python", "-c", "import os; os.kill(-1, 9)", check=False)
    project.wait_until_serving()
    assert completion(project) == before
    assert project.kvctl("status")["pool"]["header"]["service_id"] != service_id
