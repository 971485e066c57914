from __future__ import annotations

from itertools import pairwise

from gpu_executor.link.client import Backoff


def test_pauses_double_to_the_cap_each_shortened_by_up_to_a_half() -> None:
    backoff = Backoff(first=0.1, cap=5.0)
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    pauses = [backoff.next() for _ in bounds]
    assert all(bound / 2 <= pause <= bound for bound, pause in zip(bounds, pauses, strict=True))
    backoff.reset()
    assert backoff.next() <= 0.1


def test_pauses_at_the_cap_differ() -> None:
    """Executors that lost their service together do not dial it together."""
    backoff = Backoff(first=5.0, cap=5.0)
    assert all(a != b for a, b in pairwise([backoff.next() for _ in range(10)]))
