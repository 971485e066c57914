"""What a caller asks for and what it gets: a call, its parallel samples, their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from block_manager_svc.core.step import I32


class FinishReason(IntEnum):
    STOP = 1  # end-of-sequence token, stop token or stop string
    LENGTH = 2  # max_tokens


class SequenceState(IntEnum):
    WAITING = 1  # holds no blocks
    RUNNING = 2
    ENGINE = 3  # not the loop's: of an engine that schedules itself


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; ranges as SamplingParams in generation.proto, all defaults resolved."""

    max_tokens: int = 0  # 0: to the end of the context or of the pool
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # the model's end-of-sequence tokens included, unless ignored
    logprobs: int = -1  # -1 none, 0 the token's own, k also the best k
    n: int = 1


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sampled token of one sample."""

    sample: int
    token_id: int
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sample:
    """One of a call's parallel samples: one sequence of the page table once its call's prefill is through."""

    call: Call
    index: int
    sequence: int = 0  # 0: none yet (before the fork), or no more
    row: int = -1  # its place in the executor's batch state while running
    generated: int = 0
    finished: bool = False

    @property
    def arrival(self) -> tuple[int, int]:
        """Order of arrival: calls first come first, a call's samples by number."""
        return (self.call.id, self.index)

    @property
    def width(self) -> int:
        """Rows that it takes, or will take when its call forks after the prefill."""
        return 1 if self.call.forked else self.call.sampling.n


@dataclass(slots=True, eq=False)
class Call:
    """One Generate: a prompt, and n samples that part after one prefill."""

    id: int
    prompt: I32
    sampling: Sampling
    owner: int = 0  # of its sequences
    tenant: int = 0  # who is charged for their blocks
    realm: bytes = b""  # of its namespaces
    samples: list[Sample] = field(default_factory=list)
    max_tokens: int = 0  # as asked, or what there is room for
    forked: bool = False  # every sample has its own sequence
    cached_tokens: int = -1  # prompt tokens found in the prefix cache at first admission; -1: not admitted yet
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt = np.ascontiguousarray(self.prompt, np.int32)
        self.samples = [Sample(self, index) for index in range(self.sampling.n)]
        self.forked = self.sampling.n == 1

    @property
    def completion_tokens(self) -> int:
        return sum(sample.generated for sample in self.samples)

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)
