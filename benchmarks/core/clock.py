"""How a figure is taken: by this project and, in their own environments, by its peers. Standard library only."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

ROUNDS = 5


def us(run: Callable[[], object]) -> float:
    """What one call takes, µs."""
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1e3


def best_median(sample: Callable[[], float], samples: int) -> float:
    """The best of ROUNDS medians of `samples` samples each; a round before them warms up, garbage is not collected.

    The median forgets what is rare, the best round what else the machine did.
    """
    gc.collect()
    gc.disable()
    try:
        rounds = [statistics.median(sample() for _ in range(samples)) for _ in range(ROUNDS + 1)]
    finally:
        gc.enable()
    return min(rounds[1:])
