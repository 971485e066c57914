"""Work of some length for one call, in a thread, without holding up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Offload:
    """At most `at_once` pieces of work run; the others wait. Bound to the event loop that it is first used in.

    A thread cannot be stopped: when its caller is cancelled it keeps its place until it has ended, so that many
    cancelled calls do not add up to many threads. Work that has not begun by then never does.
    """

    def __init__(self, at_once: int) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work()` gives or raises."""
        await self._places.acquire()
        thread = asyncio.get_running_loop().run_in_executor(None, work)
        thread.add_done_callback(self._leave)
        return await asyncio.shield(thread)

    def _leave(self, thread: asyncio.Future[T]) -> None:
        self._places.release()
        if not thread.cancelled():
            thread.exception()  # seen, also when nobody waits for it any more
