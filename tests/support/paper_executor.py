"""An executor on paper: obeys steps exactly, with stamps for K/V and a hash for a model.

The stamp written for position p is a function of the stamp at p - 1 and of the token; the "model" samples a function
of all stamps from 0 to the last position, read through the block table. So a block that was shared, copied, freed or
reused wrongly changes the tokens that come out, and a slot that was never written is noticed when it is read.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.step import OpKind, Samples, StepOutputs, StepPlan

UNWRITTEN = -1
_MASK = (1 << 61) - 1


def stamp(before: int, token: int) -> int:
    return (before * 1_000_003 + token * 7_919 + 12_345) & _MASK


def pick(stamps: list[int], seed: int, sample: int, vocab: int) -> int:
    total = seed * 31 + sample
    for value in stamps:
        total = (total * 69_069 + value) & _MASK
    return (total >> 7) % vocab


def undisturbed(
    prompt: list[int], count: int, *, seed: int, sample: int, vocab: int, stop: frozenset[int]
) -> list[int]:
    """The tokens of one sample, by the definition, with no blocks at all."""
    stamps: list[int] = []
    for token in prompt:
        stamps.append(stamp(stamps[-1] if stamps else 0, token))
    out: list[int] = []
    while len(out) < count:
        out.append(pick(stamps, seed, sample, vocab))
        if out[-1] in stop:
            break
        stamps.append(stamp(stamps[-1], out[-1]))
    return out


class PaperExecutor:
    def __init__(self, num_blocks: int, block_size: int, max_rows: int, vocab: int) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.copies = 0
        self.slots = np.full((num_blocks, block_size), UNWRITTEN, np.int64)
        self.tables = np.zeros((max_rows, num_blocks), np.int32)

    def execute(self, plan: StepPlan) -> StepOutputs:
        for kind, src, dst in zip(plan.ops.kind, plan.ops.src, plan.ops.dst, strict=True):
            assert kind in (OpKind.COPY, OpKind.ZERO)
            assert dst != 0
            self.slots[dst] = self.slots[src] if kind == OpKind.COPY else UNWRITTEN
            self.copies += int(kind == OpKind.COPY)
        at = 0
        for row, first, count in zip(plan.deltas.row, plan.deltas.first, plan.deltas.count, strict=True):
            self.tables[row, first : first + count] = plan.deltas.blocks[at : at + count]
            at += count
        assert at == len(plan.deltas.blocks)
        at = 0
        written: set[tuple[int, int]] = set()
        assert len(set(plan.batch.row.tolist())) == len(plan.batch.row)
        for row, start, count in zip(plan.batch.row, plan.batch.start, plan.batch.count, strict=True):
            assert count >= 1
            for position in range(start, start + count):
                before = self._read(row, position - 1) if position else 0
                slot = self._slot(row, position)
                assert slot not in written, "two rows write to one slot in one step"
                assert slot[0] != 0, "the null block is never written"
                written.add(slot)
                self.slots[slot] = stamp(before, int(plan.batch.token_ids[at]))
                at += 1
        assert at == len(plan.batch.token_ids)
        return self._sample(plan, plan.samples)

    def _sample(self, plan: StepPlan, samples: Samples) -> StepOutputs:
        tokens, logprob, top, top_logprob = [], [], [], []
        for i, source in enumerate(samples.source):
            row = plan.batch.row[source]
            length = int(plan.batch.start[source] + plan.batch.count[source])
            stamps = [self._read(row, position) for position in range(length)]
            tokens.append(pick(stamps, int(samples.seed[i]), int(samples.index[i]), self.vocab))
            if (k := int(samples.logprobs[i])) >= 0:
                logprob.append(-0.5)
                top += list(range(k))
                top_logprob += [-1.0 - j for j in range(k)]
        return StepOutputs(
            np.array(tokens, np.int32),
            np.array(logprob, np.float32),
            np.array(top, np.int32),
            np.array(top_logprob, np.float32),
        )

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        return int(self.tables[row, position // self.block_size]), position % self.block_size

    def _read(self, row: int, position: int) -> int:
        value = int(self.slots[self._slot(row, position)])
        assert value != UNWRITTEN, f"row {row} reads position {position}, which nobody wrote"
        return value
