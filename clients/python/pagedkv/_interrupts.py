"""Keeps Ctrl-C out of gRPC.

KeyboardInterrupt strikes the main thread between any two bytecodes: also right after gRPC took a lock of the channel,
which nobody gives back then, and every later call on that channel hangs. So the main thread lets another thread run
gRPC's code, and waits for it at a queue whose get is a single C call: interrupted, it leaves nothing half done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

R = TypeVar("R")

_WAIT = 0.2  # seconds


class Apart(Generic[R]):
    """Runs functions one after another: in a thread of its own for the main thread, else where it is called."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Callable[[], R] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[R | None, BaseException | None]] = SimpleQueue()
        self._needed = threading.current_thread() is threading.main_thread()
        if self._needed:
            threading.Thread(target=_serve, args=(self._asked, self._answers), daemon=True).start()

    def run(self, function: Callable[[], R]) -> R:
        """What `function` returns or raises. After it has raised, or was interrupted, nothing more is run."""
        if not self._needed:
            return function()
        self._asked.put(function)
        try:
            while True:
                # Not for ever: an interrupt that another thread raised is seen between two waits.
                with contextlib.suppress(Empty):
                    answer, error = self._answers.get(timeout=_WAIT)
                    break
            if error is not None:
                raise error
        except BaseException:
            self.close()
            raise
        return answer  # type: ignore[return-value]  # None only where the function returns it

    def close(self) -> None:
        """Ends the thread once what it runs is over; may come twice, and from any thread."""
        self._asked.put(None)


def _serve(
    asked: SimpleQueue[Callable[[], R] | None], answers: SimpleQueue[tuple[R | None, BaseException | None]]
) -> None:
    """Holds the queues and not their owner, so that an owner that is dropped can close."""
    while (function := asked.get()) is not None:
        try:
            answers.put((function(), None))
        except BaseException as error:
            answers.put((None, error))
        del function


def run_apart(function: Callable[[], R]) -> R:
    """`function()`, out of the reach of Ctrl-C."""
    apart: Apart[R] = Apart()
    try:
        return apart.run(function)
    finally:
        apart.close()
