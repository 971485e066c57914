"""The scenarios of clients/conformance, against real processes over real sockets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from conformance_runner import Mismatch, Scenario

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / "clients" / "conformance"
FILES = sorted(FOLDER.glob("*.yaml"))


def scenarios() -> list[Any]:
    return [
        pytest.param(scenario, id=f"{path.stem}: {scenario['title']}")
        for path in FILES
        for scenario in yaml.safe_load(path.read_text())
    ]


class Pools:
    """The program that any language's runner uses."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "conformance_serve.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def bring_up(self, pool: dict[str, Any]) -> str:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps({"pool": pool}), file=self._process.stdin, flush=True)
        return str(json.loads(self._process.stdout.readline())["address"])

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_as_the_schema_says(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads((FOLDER / "schema.json").read_text()))


@pytest.mark.parametrize("scenario", scenarios())
def test_scenario(pools: Pools, scenario: dict[str, Any]) -> None:
    Scenario(scenario, pools.bring_up(scenario["pool"])).run()


CREATE = {"call": "StepBatch", "send": {"items": [{"create": {"counts": [5], "tokens": [1, 2, 3, 4, 5]}}]}}


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([CREATE | {"expect": {"results": [{"cached": [4]}]}}], "step 0: results.0.cached.0 is 0, 4 is expected"),
        ([CREATE | {"expect": {"results": []}}], "results is"),
        ([CREATE | {"error": {"code": "NOT_FOUND", "reason": "X"}}], "was to be refused"),
        ([{"call": "Resize", "send": {"limit": 99}}], "step 0: refused: .*LIMIT_OUT_OF_RANGE"),
        ([{"call": "Resize", "error": {"code": "NOT_FOUND", "reason": "LIMIT_OUT_OF_RANGE"}}], "error.code is"),
        ([CREATE | {"save": {"a": "results.0.sequences.0"}}, {"tables": {"$a": [1, 3]}}], r"step 1: .*\[1, 2\]"),
        ([CREATE, {"watch": "w", "expect": []}], "step 1: snapshot is"),
        ([{"watch": "w"}, CREATE, {"of": "w", "events": [{"kind": "SEQUENCE_ENDED"}]}], "step 2: events.0.kind is"),
        ([{"call": "StepBatch", "send": {"items": [{"free": {"sequences": [77]}}]}}], "results.0 has an error"),
    ],
)
def test_the_runner_sees_what_is_wrong(pools: Pools, steps: list[dict[str, Any]], told: str) -> None:
    scenario = {"title": "wrong", "pool": {"blocks": 8, "block_size": 4}, "steps": steps}
    with pytest.raises(Mismatch, match=told):
        Scenario(scenario, pools.bring_up(scenario["pool"])).run()  # type: ignore[arg-type]
