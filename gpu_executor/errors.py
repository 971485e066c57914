"""What the executor refuses, and why.

StepInvalid        a step failed validation; nothing of it was applied
ModelUnsupported   the model would run, and be wrong, over a paged pool
"""

from __future__ import annotations


class StepInvalid(Exception):
    """A step that breaks the contract: the service is wrong. Nothing was touched.

    reason:  UPPER_SNAKE, part of the contract.
    message: one sentence with the numbers.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class ModelUnsupported(Exception):
    """A model that cannot be served here with right results.

    reason:  UPPER_SNAKE.
    message: one sentence: what about the model it is.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
