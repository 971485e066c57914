"""What one forward pass gathers, worked out once for all its layers.

The sequences of a batch become groups, each one call of SDPA:

    decode   sequences with one new token and nearly equal contexts, padded to the longest of them
    prefill  one sequence with several new tokens

A group names K/V rows by number: row (block, offset) of a layer lies at block * block_stride + offset * slot_stride, so
one index serves K and V of every layer. Padding repeats a row that the sequence has, and a mask takes its weight away:
no row that was never written is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Joining a sequence to a group saves a call; it is worth this much padding (bytes of K and V).
PADDING_PER_CALL = 256 << 10
# K and V of a group of several sequences: what a core's second-level cache holds.
GROUP_BYTES = 1 << 20
# Query tokens of a prefill that are scored at once against the keys that the last of them sees.
QUERY_TILE = 256


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that one SDPA call serves.

    query:  their rows of q: a slice, or int64[n] when these are not neighbours.
    size:   sequences.
    new:    query tokens of each; several only when size is 1.
    length: keys gathered for each sequence.
    index:  int64[size * length], K/V rows in units of slots (see slot_index).
    mask:   additive [size, 1, 1, length], or None when nothing is padded (decode only).
    """

    query: slice | Tensor
    size: int
    new: int
    length: int
    index: Tensor
    mask: Tensor | None


@dataclass(slots=True)
class Plan:
    """Groups for each attention window that the model's layers use, made when first asked for."""

    tables: NDArray[np.int32]
    contexts: NDArray[np.int64]
    first_query: NDArray[np.int64]
    block_size: int
    slots_per_block: int  # block stride in units of slots: 2 * block_size where V lies behind K
    slot_bytes: int  # K and V of one slot
    device: torch.device
    dtype: torch.dtype
    groups_of: dict[int, list[Group]] = field(default_factory=dict)
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def groups(self, window: int) -> list[Group]:
        if window not in self.groups_of:
            self.groups_of[window] = self._decode_groups(window) + self._prefill_groups(window)
        return self.groups_of[window]

    def slot_index(self, sequence: int, begin: int, end: int) -> NDArray[np.int64]:
        """Rows of positions [begin, end) of a sequence. Table entries past `end` are not read."""
        size = self.block_size
        first_block = begin // size
        blocks = self.tables[sequence, first_block : -(-end // size)].astype(np.int64)
        rows = (blocks[:, None] * self.slots_per_block + np.arange(size)).reshape(-1)
        return rows[begin - first_block * size : end - first_block * size]

    def causal_mask(self, new: int, length: int, window: int) -> Tensor:
        """[new, length]: the last `new` of `length` positions as queries; additive, of the model's dtype."""
        key = (new, length, window)
        if key not in self.masks:
            distance = np.arange(length - new, length)[:, None] - np.arange(length)
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            mask = torch.zeros(new, length, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            self.masks[key] = mask.to(self.device)
        return self.masks[key]

    def _decode_groups(self, window: int) -> list[Group]:
        new = np.diff(self.first_query)
        decode = np.flatnonzero((new == 1) & (self.contexts > 0))
        lengths = np.minimum(self.contexts, window) if window else self.contexts
        decode = decode[np.argsort(-lengths[decode], kind="stable")]
        groups: list[Group] = []
        members: list[int] = []
        for sequence in decode.tolist():
            if members:
                longest = int(lengths[members[0]])
                padding = (longest - int(lengths[sequence])) * self.slot_bytes
                if padding > PADDING_PER_CALL or (len(members) + 1) * longest * self.slot_bytes > GROUP_BYTES:
                    groups.append(self._decode_group(members, lengths))
                    members = []
            members.append(sequence)
        if members:
            groups.append(self._decode_group(members, lengths))
        return groups

    def _decode_group(self, members: list[int], lengths: NDArray[np.int64]) -> Group:
        own = lengths[members]
        length = int(own[0])
        index = np.empty((len(members), length), np.int64)
        for i, sequence in enumerate(members):
            end = int(self.contexts[sequence])
            rows = self.slot_index(sequence, end - int(own[i]), end)
            index[i, : len(rows)] = rows
            index[i, len(rows) :] = rows[-1]
        mask = None
        if int(own[-1]) < length:
            padded = torch.from_numpy(np.arange(length) >= own[:, None])
            mask = torch.zeros(len(members), 1, 1, length, dtype=self.dtype)
            mask.masked_fill_(padded[:, None, None], float("-inf"))
            mask = mask.to(self.device)
        query = self.first_query[members]
        return Group(
            query=_select(query, self.device),
            size=len(members),
            new=1,
            length=length,
            index=torch.from_numpy(index.reshape(-1)).to(self.device),
            mask=mask,
        )

    def _prefill_groups(self, window: int) -> list[Group]:
        new = np.diff(self.first_query)
        groups: list[Group] = []
        for sequence in np.flatnonzero((new > 1) & (self.contexts > 0)).tolist():
            count, end, first = int(new[sequence]), int(self.contexts[sequence]), int(self.first_query[sequence])
            begin = max(0, end - count - window + 1) if window else 0
            index = self.slot_index(sequence, begin, end)
            groups.append(
                Group(
                    query=slice(first, first + count),
                    size=1,
                    new=count,
                    length=end - begin,
                    index=torch.from_numpy(index).to(self.device),
                    mask=None,
                )
            )
        return groups


def _select(rows: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return torch.from_numpy(rows).to(device)
