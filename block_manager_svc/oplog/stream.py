"""The op stream of one executor group: numbered steps, a running digest, results exactly once.

Pure: no I/O, no clock. The life of a step:

    push ──► sent, kept ──► result recorded ──► durable ──► forgotten
                 │ executor attached again, digest equal
                 └──► sent again, byte for byte

docs/protocol.md is the specification; section names below are its.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

NO_DIGEST = bytes(32)  # the digest before step 1


@dataclass(frozen=True, slots=True)
class SentStep:
    step_id: int
    digest: bytes  # SHA-256(digest of step_id - 1 | body)
    body: bytes


@dataclass(frozen=True, slots=True)
class Position:
    """Where an executor says it stands, in its hello."""

    service_id: str
    epoch: int
    boot_id: str
    accepted: int
    completed: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Resume:
    """Same boot, digest equal: go on; these steps were sent and did not arrive."""

    resend: tuple[SentStep, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Anything else: new epoch, pool empty, sequences recompute."""

    reason: str


class OpStream:
    """Steps from the service to one executor.

    epoch rises with every reset; a message of a lower epoch is void on both sides.
    Steps are numbered from 1 after each reset, without gaps.
    """

    def __init__(self, service_id: str) -> None:
        self.service_id = service_id
        self.epoch = 0
        self.boot_id = ""
        self.last_step = 0
        self.results_durable_through = 0
        self._digest = NO_DIGEST
        self._digest_durable = NO_DIGEST
        self._kept: deque[SentStep] = deque()  # results_durable_through + 1 .. last_step

    @property
    def in_flight(self) -> int:
        """Steps that were sent and have no durable result yet."""
        return len(self._kept)

    def reconcile(self, position: Position) -> Resume | Reset:
        """Decides how an executor goes on ("Exactly once", the table). Changes nothing."""
        if position.boot_id != self.boot_id:
            return Reset(f"boot {self.boot_id} is followed" if self.boot_id else "no boot is followed")
        if (position.service_id, position.epoch) != (self.service_id, self.epoch):
            return Reset(f"it follows epoch {position.epoch} of {position.service_id or 'no service'}")
        if not self.results_durable_through <= position.accepted <= self.last_step:
            return Reset(
                f"it accepted {position.accepted}, outside of {self.results_durable_through}..{self.last_step}"
            )
        digest = self._digest_durable
        for step in self._kept:
            if step.step_id > position.accepted:
                break
            digest = step.digest
        if position.accepted and position.digest != digest:
            return Reset(f"its digest at step {position.accepted} differs")
        return Resume(tuple(step for step in self._kept if step.step_id > position.accepted))

    def forget_boot(self) -> None:
        """Whoever attaches next begins anew, also the boot that was followed until now."""
        self.boot_id = ""

    def reset(self, boot_id: str, *, above_epoch: int = 0) -> None:
        """Starts a new epoch for this boot, above every epoch that either side has known."""
        self.epoch = max(self.epoch, above_epoch) + 1
        self.boot_id = boot_id
        self.last_step = self.results_durable_through = 0
        self._digest = self._digest_durable = NO_DIGEST
        self._kept.clear()

    def push(self, body: bytes) -> SentStep:
        """Numbers, digests and keeps the next step."""
        self._digest = hashlib.sha256(self._digest + body).digest()
        self.last_step += 1
        step = SentStep(self.last_step, self._digest, body)
        self._kept.append(step)
        return step

    def is_news(self, step_id: int) -> bool:
        """True for the result that is next, False for one that came before. Changes nothing.

        Raises ValueError for a result of a step that was never sent, or ahead of its turn.
        """
        if step_id > self.last_step:
            raise ValueError(f"result of step {step_id}, but the last one sent is {self.last_step}")
        if step_id > self.results_durable_through + 1:
            raise ValueError(f"result of step {step_id} before that of {self.results_durable_through + 1}")
        return step_id > self.results_durable_through

    def record(self) -> None:
        """The next result is durable: its step is forgotten, and the executor is told with the next message."""
        step = self._kept.popleft()
        self._digest_durable = step.digest
        self.results_durable_through = step.step_id
