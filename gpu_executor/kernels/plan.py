"""What one forward pass gathers, worked out once for all its layers.

K and V lie scattered over blocks; attention is computed over tiles of them, gathered into a scratch that each thread
keeps:

    short contexts   several sequences a tile, padded to the longest of them; a mask takes the padding's weight away
    long contexts    several tiles a sequence, their results merged by log-sum-exp (split-KV, as in Flash-Decoding)

    sequence 0  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓|▓▓▓▓▓▓▓▓▓▓▓▓▓▓|▓▓▓▓▓▓▓    three tiles
    sequence 1  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    sequence 2  ▓▓▓▓▓▓▓▓▓▓▓░░░    one tile of both

What is gathered is named by row number, one row the D numbers of one head (see PagedKv); the numbers are the same for K
and V of every layer. Padding repeats a row that the sequence has: what was never written is never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Bytes of K and V.

    long:    of a tile of one sequence, at most.
    short:   of a tile of several sequences, at most.
    padding: that a sequence may add to a tile to save a call of its own.
    """

    long: int
    short: int
    padding: int


# Measured with two threads. Tiles that fit a core's second-level cache are faster by themselves, but each operator call
# hands the GIL from thread to thread, which takes longer than a small tile does.
CPU_TILING = Tiling(long=8 << 20, short=4 << 20, padding=256 << 10)
# On a GPU launches cost more, and there is no cache of a core to stay in.
GPU_TILING = Tiling(long=64 << 20, short=64 << 20, padding=4 << 20)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a head's D numbers lie, in rows of D: block * block + offset * slot + head * head (strides over D)."""

    block: int
    slot: int
    head: int


@dataclass(frozen=True, slots=True)
class Tile:
    """`length` keys for each of `size` sequences: rows index[size * Hkv * length]; mask [size, 1, 1, length] or None.

    The mask is additive. The index is an array on the CPU, elsewhere a tensor on the device.
    """

    size: int
    length: int
    index: I64 | Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Decode:
    """One new token of each of some sequences.

    query: their rows of q: a slice, or int64[size] where these are not neighbours.
    tiles: one; or several, whose results are merged, of a single sequence.
    part:  None: the result is final. Else its number among the parts of sequences that threads share.
    """

    query: slice | Tensor
    tiles: tuple[Tile, ...]
    part: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several new tokens of one sequence, its rows `query` of q; `tile` holds all keys that any of them sees."""

    query: slice
    tile: Tile


@dataclass(slots=True)
class Work:
    """What attention with one window has to do. shared: query row of a shared sequence -> its parts."""

    decodes: list[Decode] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    shared: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """A batch's tables and lengths, and the work for each attention window of the layers, made when asked for."""

    tables: NDArray[np.int32]  # [S, M]
    contexts: I64  # [S], new tokens included
    first_query: I64  # [S + 1]
    num_blocks: int
    block_size: int
    num_kv_heads: int
    stride: Rows
    slot_bytes: int  # K and V of one slot
    device: torch.device
    dtype: torch.dtype
    threads: int
    works: dict[int, Work] = field(default_factory=dict)
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def work(self, window: int) -> Work:
        if window not in self.works:
            self.works[window] = _Planner(self, window).work()
        return self.works[window]

    def slots(self, sequence: int, begin: int, end: int) -> I64:
        """Rows of head 0 of positions [begin, end) of a sequence. Table entries that hold none of them are not read."""
        size = self.block_size
        first_block = begin // size
        blocks = self.tables[sequence, first_block : -(-end // size)].astype(np.int64)
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            raise IndexError(f"sequence {sequence} has a block outside [0, {self.num_blocks}) in its table")
        slots = (blocks[:, None] * self.stride.block + np.arange(size) * self.stride.slot).reshape(-1)
        return slots[begin - first_block * size : end - first_block * size]

    def index(self, slots: I64) -> I64 | Tensor:
        """Rows of all heads, one head after another, of slots [size, length] (rows of head 0)."""
        heads = np.arange(self.num_kv_heads) * self.stride.head
        index = (slots[:, None, :] + heads[:, None]).reshape(-1)
        return index if self.device.type == "cpu" else torch.from_numpy(index).to(self.device)

    def causal_mask(self, new: int, length: int, window: int) -> Tensor:
        """[new, length]: the last `new` of `length` positions as queries; additive, of the model's dtype."""
        key = (new, length, window)
        if key not in self.masks:
            distance = np.arange(length - new, length)[:, None] - np.arange(length)
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            self.masks[key] = self.mask(hidden)
        return self.masks[key]

    def mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return mask.to(self.device)


class _Planner:
    def __init__(self, plan: Plan, window: int) -> None:
        self.plan = plan
        self.window = window
        self.tiling = CPU_TILING if plan.device.type == "cpu" else GPU_TILING
        self.new = np.diff(plan.first_query)
        # Keys that a decode token sees.
        self.lengths = np.minimum(plan.contexts, window) if window else plan.contexts

    def work(self) -> Work:
        work = Work()
        seen = self.plan.contexts > 0
        decode = np.flatnonzero((self.new == 1) & seen)
        decode = decode[np.argsort(-self.lengths[decode], kind="stable")]  # longest first
        long_slots = max(1, self.tiling.long // self.plan.slot_bytes)
        short_slots = self.tiling.short // self.plan.slot_bytes
        long = int(np.count_nonzero(self.lengths[decode] > max(long_slots, short_slots // 2)))
        total = int(self.lengths[decode].sum())
        for sequence in decode[:long].tolist():
            # A sequence that is much of all there is to do is shared between the threads.
            shares = self.plan.threads if int(self.lengths[sequence]) * self.plan.threads > total else 1
            self._long(work, sequence, shares, long_slots)
        members: list[int] = []
        for sequence in decode[long:].tolist():
            if members:
                longest = int(self.lengths[members[0]])
                padding = (longest - int(self.lengths[sequence])) * self.plan.slot_bytes
                if padding > self.tiling.padding or (len(members) + 1) * longest > short_slots:
                    work.decodes.append(self._short(members))
                    members = []
            members.append(sequence)
        if members:
            work.decodes.append(self._short(members))
        for sequence in np.flatnonzero((self.new > 1) & seen).tolist():
            work.prefills.append(self._prefill(sequence))
        return work

    def _long(self, work: Work, sequence: int, shares: int, tile_slots: int) -> None:
        end, query = int(self.plan.contexts[sequence]), int(self.plan.first_query[sequence])
        slots = self.plan.slots(sequence, end - int(self.lengths[sequence]), end)
        for share in np.array_split(slots, shares):
            tiles = tuple(
                Tile(1, len(part), self.plan.index(part[None]), None)
                for part in np.array_split(share, -(-len(share) // tile_slots))
            )
            part = None
            if shares > 1:
                part = sum(map(len, work.shared.values()))
                work.shared.setdefault(query, []).append(part)
            work.decodes.append(Decode(slice(query, query + 1), tiles, part, len(share) * self.plan.slot_bytes))

    def _short(self, members: list[int]) -> Decode:
        own = self.lengths[members]
        length = int(own[0])
        slots = np.empty((len(members), length), np.int64)
        for i, sequence in enumerate(members):
            end, count = int(self.plan.contexts[sequence]), int(own[i])
            slots[i, :count] = self.plan.slots(sequence, end - count, end)
            slots[i, count:] = slots[i, 0]
        mask = None
        if int(own[-1]) < length:
            mask = self.plan.mask((np.arange(length) >= own[:, None])[:, None, None])
        tile = Tile(len(members), length, self.plan.index(slots), mask)
        return Decode(self._select(members), (tile,), None, slots.size * self.plan.slot_bytes)

    def _select(self, members: list[int]) -> slice | Tensor:
        query = self.plan.first_query[members]
        first = int(query[0])
        if np.array_equal(query, np.arange(first, first + len(query))):
            return slice(first, first + len(query))
        return torch.from_numpy(query).to(self.plan.device)

    def _prefill(self, sequence: int) -> Prefill:
        new, end = int(self.new[sequence]), int(self.plan.contexts[sequence])
        first = int(self.plan.first_query[sequence])
        begin = max(0, end - new - self.window + 1) if self.window else 0
        index = self.plan.index(self.plan.slots(sequence, begin, end)[None])
        return Prefill(slice(first, first + new), Tile(1, end - begin, index, None))
