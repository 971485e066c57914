"""Wait for a condition, with a deadline; never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """Returns once `condition()` is true; AssertionError with `what` after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"after {deadline_s:g} s still not: {what}"
        time.sleep(0.005)
