"""A slice of the random walk; `make walk` goes on for as long as it is told."""

from __future__ import annotations

from collections import Counter

import pytest
from core_model import Device
from core_walk import walk


def test_random_walks_keep_every_invariant_and_every_sequence_reads_its_own() -> None:
    counts = sum((walk(seed, 3000, check_every=100) for seed in (*range(1000, 1008), 1018)), Counter[str]())
    commands = {"create", "grow", "extend", "commit", "fork", "truncate", "drop", "free", "pin", "swap", "reserve"}
    commands |= {"resize", "compact", "begin", "quota", "admitted LATER", "admitted NEVER"}
    moved = {"copies", "evicted", "swapped_out", "swapped_in", "exchange", "compacted"}
    assert counts.keys() >= commands | moved | {"refused", "tokens found"}
    assert min(counts.values()) > 0


def test_the_plain_model_walks_along() -> None:
    counts = sum((walk(seed, 300, beside_model=True) for seed in range(2000, 2012)), Counter[str]())
    assert counts["swapped_in"] > 0


def test_the_same_seed_takes_the_same_walk() -> None:
    assert walk(7, 1000) == walk(7, 1000)


def test_a_copy_that_is_not_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "apply", lambda self, ops: None)
    with pytest.raises(AssertionError, match=r"seed 2, step \d+: \(\d+, \d+, \d+\)"):
        walk(2, 5_000)
