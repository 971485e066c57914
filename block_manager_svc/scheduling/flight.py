"""The step that is being computed, and its outputs when they come."""

from __future__ import annotations

from dataclasses import dataclass

from block_manager_svc.core.step import I32, StepOutputs
from block_manager_svc.scheduling.request import Sample

NO_TOKEN = -1  # in the place of a sampled token: the logits were not finite


@dataclass(frozen=True, slots=True)
class InFlight:
    """The step that is being computed. A sample that ends meanwhile is marked finished; its outputs are dropped."""

    samples: list[Sample]  # of the batch, in row order
    upto: I32  # tokens of each that will be computed
    sampled: list[int]  # positions in `samples` that are sampled

    def outputs(self) -> tuple[int, int, int]:
        """Tokens, log-probabilities and alternatives that the executor answers with."""
        leads = [(self.samples[at].width, self.samples[at].call.sampling.logprobs) for at in self.sampled]
        return (
            sum(width for width, _ in leads),
            sum(width for width, k in leads if k >= 0),
            sum(width * k for width, k in leads if k > 0),
        )

    def check(self, outputs: StepOutputs, vocab_size: int) -> None:
        """Raises ValueError unless these can be this step's outputs."""
        expected = self.outputs()
        got = (len(outputs.token_ids), len(outputs.logprob), len(outputs.top_token_ids))
        if got != expected or len(outputs.top_logprobs) != expected[2]:
            raise ValueError(
                f"outputs of {got} tokens, log-probabilities and alternatives, but {expected} were asked for"
            )
        for tokens, least in ((outputs.token_ids, NO_TOKEN), (outputs.top_token_ids, 0)):
            if len(tokens) and not least <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                raise ValueError(f"tokens from {tokens.min()} to {tokens.max()}, the vocabulary has {vocab_size}")


class Picked:
    """Walks output columns that were checked, sample by sample."""

    def __init__(self, outputs: StepOutputs) -> None:
        self._tokens = iter(outputs.token_ids.tolist())
        self._logprob = iter(outputs.logprob.tolist())
        self._top = zip(outputs.top_token_ids.tolist(), outputs.top_logprobs.tolist(), strict=True)

    def take(self, count: int, logprobs: int) -> list[tuple[int, float | None, tuple[tuple[int, float], ...]]]:
        return [
            (
                next(self._tokens),
                next(self._logprob) if logprobs >= 0 else None,
                tuple(next(self._top) for _ in range(logprobs)),
            )
            for _ in range(count)
        ]
