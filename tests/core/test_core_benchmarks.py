"""The benchmarks of the core go on working with it: each row runs once, in a small pool. Nothing is measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.core import growth, ours


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ours, growth):
        monkeypatch.setattr(module, "best_median", lambda sample, samples: sample())
    monkeypatch.setattr(ours, "NUM_BLOCKS", 4096)
    begin = ours.Decode.__init__
    monkeypatch.setattr(begin, "__kwdefaults__", begin.__kwdefaults__ | {"num_blocks": 4096})


@pytest.mark.parametrize(
    "row",
    [
        lambda: ours.allocate_free(4096),
        ours.match,
        lambda: ours.fork(1),
        lambda: ours.fork(3),
        ours.swap,
        lambda: growth._allocate_last(2048),
        lambda: growth._come_and_go(10),
    ],
)
def test_a_row_runs(row: Callable[[], float]) -> None:
    assert row() > 0


@pytest.mark.parametrize(("staggered", "prefix_cache"), [(True, False), (True, True), (False, True)])
def test_decode_steps_run(staggered: bool, prefix_cache: bool) -> None:
    decode = ours.Decode(16, context=64, staggered=staggered, prefix_cache=prefix_cache)
    for step in (decode.extend, decode.grow):
        assert decode.mean(step) > 0
        assert decode.sealing(step) > 0
