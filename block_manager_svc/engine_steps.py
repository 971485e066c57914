"""Steps that carry the block ops of engines' batches, and nothing to compute: who waits for them, and how many may fly.

They go into the op stream as they are decided, among the steps of the step loop. Each has a result, an empty one.
"""

from __future__ import annotations

import asyncio

from block_manager_svc.core.errors import DeadlineExceeded, Refused, ResourceExhausted

# An executor takes 64 steps that it has not completed; one of them may be the step loop's.
WINDOW = 60
RETRY_SOON = 0.05  # seconds; an executor that is behind computes a batch meanwhile


class EngineSteps:
    """Steps in flight. Bound to the event loop that it is used in."""

    __slots__ = ("_flying",)

    def __init__(self) -> None:
        # By step id. A future tells how the step ended: None, or why it never will.
        self._flying: dict[int, asyncio.Future[Refused | None]] = {}

    def __contains__(self, step_id: int) -> bool:
        return step_id in self._flying

    def check_room(self) -> None:
        """ResourceExhausted WINDOW_FULL: as many are in flight as may be."""
        if len(self._flying) >= WINDOW:
            raise ResourceExhausted(
                "WINDOW_FULL",
                f"{WINDOW} steps of engines are in flight, the executor is behind: try again soon",
                retry_after=RETRY_SOON,
                limit=WINDOW,
            )

    def sent(self, step_id: int) -> None:
        self._flying[step_id] = asyncio.get_running_loop().create_future()

    def completed(self, step_id: int) -> None:
        self._flying.pop(step_id).set_result(None)

    def give_up(self, why: Refused, *, forget: bool) -> None:
        """Whoever waits is told why it waits in vain. forget: the steps themselves will never have a result."""
        for step_id, ended in self._flying.items():
            ended.set_result(why)
            self._flying[step_id] = asyncio.get_running_loop().create_future()
        if forget:
            self._flying.clear()

    async def wait(self, step_id: int, seconds: float | None) -> None:
        """Until the step is completed; at once if it is. None: for ever.

        Raises DeadlineExceeded STEP_NOT_COMPLETED, or what `give_up` was given.
        """
        ended = self._flying.get(step_id)
        if ended is None:
            return
        await asyncio.wait((ended,), timeout=seconds)
        if not ended.done():
            raise DeadlineExceeded(
                "STEP_NOT_COMPLETED",
                f"the batch stands, but step {step_id} with its copies was not completed in time",
                step_id=step_id,
            )
        if (why := ended.result()) is not None:
            raise why
