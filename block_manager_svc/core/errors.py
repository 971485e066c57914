"""Every refusal of the service, as one tree.

    Refused                      reason, message, numbers; what was asked changed nothing
    ├── InvalidArgument          the caller can mend it
    ├── NotFound                 it names something that is not there
    │   ├── SequenceNotFound
    │   └── ModelNotFound
    ├── AlreadyExists            its place is taken
    ├── FailedPrecondition       right in itself, not in this state
    ├── ResourceExhausted        a limit or the pool; retry_after says when waiting helps
    │   └── OutOfBlocks
    ├── Aborted                  ended by the other side's doing
    ├── DeadlineExceeded         the other side took too long
    ├── Unauthenticated          who calls is not known
    ├── PermissionDenied         who calls is known, and may not
    └── Unavailable              nobody is there to do it now
        ├── ExecutorUnavailable
        └── Draining

`rpc/errors.py` maps the tree to gRPC status codes, in one table.
"""

from __future__ import annotations


class Refused(Exception):
    """A call that was refused and changed nothing.

    reason:      UPPER_SNAKE, part of the contract.
    message:     one sentence: what is wrong and what to do next.
    numbers:     what the message is about, as exact values.
    retry_after: seconds after which trying again makes sense; None: it does not.
    """

    def __init__(self, reason: str, message: str, *, retry_after: float | None = None, **numbers: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.numbers = numbers


class InvalidArgument(Refused):
    pass


class NotFound(Refused):
    pass


class SequenceNotFound(NotFound):
    def __init__(self, sequence: int) -> None:
        super().__init__(
            "SEQUENCE_NOT_FOUND", f"sequence {sequence} is not alive: it has ended, or never was", sequence=sequence
        )


class ModelNotFound(NotFound):
    pass


class AlreadyExists(Refused):
    pass


class FailedPrecondition(Refused):
    pass


class ResourceExhausted(Refused):
    pass


class OutOfBlocks(ResourceExhausted):
    """The pool has fewer blocks free or evictable than the command needs."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            "OUT_OF_BLOCKS",
            f"{needed} blocks are needed, {available} are free or evictable: "
            f"free or preempt {needed - available} first",
            needed=needed,
            available=available,
        )


class Aborted(Refused):
    pass


class DeadlineExceeded(Refused):
    pass


class Unauthenticated(Refused):
    pass


class PermissionDenied(Refused):
    pass


class Unavailable(Refused):
    pass


class ExecutorUnavailable(Unavailable):
    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__("EXECUTOR_UNAVAILABLE", message, retry_after=retry_after)


class Draining(Unavailable):
    """No retry_after: it does not come back."""

    def __init__(self, message: str = "this service is about to stop: call another instance") -> None:
        super().__init__("DRAINING", message)
