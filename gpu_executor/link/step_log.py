"""Which steps were accepted and completed, and what they gave: order, exactly once, and nothing else.

    durable_through ≤ completed ≤ accepted
    ────────┬───────────┬──────────┬────────────►  step_id
      results│   kept    │ computing│  the next is accepted + 1
      dropped│  results  │ (window) │

Pure: no I/O, no clock, no threads. See docs/protocol.md, "Two watermarks" and "Exactly once".
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpu_executor.errors import StepInvalid

NO_DIGEST = bytes(32)
"""The digest before step 1."""

R = TypeVar("R")


def next_digest(digest: bytes, body: bytes) -> bytes:
    """digest(n) = SHA-256(digest(n - 1) | body of step n)."""
    return hashlib.sha256(digest + body).digest()


@dataclass(frozen=True, slots=True)
class Accepted(Generic[R]):
    """The step was accepted before: it is not applied again.

    result: what it gave; None while it still computes (its result is then sent once, when it is there).
    """

    result: R | None


class StepLog(Generic[R]):
    """Steps of one epoch. R is what a completed step leaves, kept until it is durable.

    window: steps that may be accepted and not completed.
    kept:   steps that may be accepted and not durable.
    """

    def __init__(self, *, window: int = 64, kept: int = 4096) -> None:
        self._window = window
        self._kept = kept
        self.reset()

    def reset(self) -> None:
        """A new epoch: steps count from 1 again, with the digest of nothing; kept results are dropped."""
        self.accepted = 0
        self.completed = 0
        self.durable_through = 0
        self._digests: dict[int, bytes] = {0: NO_DIGEST}  # of durable_through .. accepted
        self._results: dict[int, R] = {}  # of durable_through + 1 .. completed

    @property
    def digest(self) -> bytes:
        """digest(accepted)."""
        return self._digests[self.accepted]

    def place(self, step_id: int, digest: bytes, body: bytes) -> Accepted[R] | None:
        """Where a step that came in belongs; changes nothing.

        Returns None when it is the next in order (validate it, then `accept`), or what is known of it when it was
        accepted before. Raises StepInvalid: STEP_GAP, STEP_DURABLE, DIGEST_MISMATCH, WINDOW_EXCEEDED, RESULTS_PILED_UP.
        """
        if step_id > self.accepted + 1:
            raise StepInvalid("STEP_GAP", f"step {step_id} came where {self.accepted + 1} is next")
        if step_id <= self.durable_through:
            raise StepInvalid(
                "STEP_DURABLE", f"step {step_id} came again, but results are durable through {self.durable_through}"
            )
        if next_digest(self._digests[step_id - 1], body) != digest:
            raise StepInvalid("DIGEST_MISMATCH", f"step {step_id}: its digest is not that of steps 1 to {step_id}")
        if step_id <= self.accepted:
            return Accepted(self._results.get(step_id))
        if self.accepted - self.completed >= self._window:
            raise StepInvalid(
                "WINDOW_EXCEEDED", f"step {step_id}: {self._window} steps were accepted and are not completed yet"
            )
        if self.accepted - self.durable_through >= self._kept:
            raise StepInvalid(
                "RESULTS_PILED_UP", f"step {step_id}: the results of {self._kept} steps are kept and not durable yet"
            )
        return None

    def accept(self, step_id: int, digest: bytes) -> None:
        """Fixes the place of a step that `place` found to be the next, and that was validated."""
        assert step_id == self.accepted + 1
        self.accepted = step_id
        self._digests[step_id] = digest

    def complete(self, step_id: int, result: R) -> None:
        """The device has finished the step; its result is kept until it is durable."""
        assert step_id == self.completed + 1 <= self.accepted
        self.completed = step_id
        self._results[step_id] = result

    def set_durable(self, through: int) -> None:
        """Drops the results of steps up to `through`; an older statement than the last changes nothing.

        Raises StepInvalid DURABLE_AHEAD when the step is not completed.
        """
        if through > self.completed:
            raise StepInvalid(
                "DURABLE_AHEAD", f"results are said to be durable through {through}, completed is {self.completed}"
            )
        for step_id in range(self.durable_through, through):
            del self._digests[step_id]
            del self._results[step_id + 1]
        self.durable_through = max(self.durable_through, through)

    def results_past(self, step_id: int) -> list[R]:
        """Kept results of the steps after `step_id`, in order.

        Raises StepInvalid RESULTS_DROPPED when some of them were dropped as durable.
        """
        if step_id < self.durable_through:
            raise StepInvalid(
                "RESULTS_DROPPED",
                f"results past {step_id} are asked for, but were said to be durable through {self.durable_through}",
            )
        return [self._results[n] for n in range(step_id + 1, self.completed + 1)]
