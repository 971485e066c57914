"""Free blocks of the pool: a bitmap of two levels.

    leaf:     0              1              2                  1,024 blocks each
    bits:     00000000 0000… 00010110 1111… 11111111 1111…     1: free; little-endian within a byte
    any_free: 0              1              1                  a byte a leaf
                                ▲
                                lowest: nothing below it is free

Looking for blocks jumps over leaves with nothing free by a memchr over `any_free`, from `lowest` on, and then widens
its window by doubling. So the cost follows the number of blocks asked for and how scattered they lie, not the size of
the pool.
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.step import I64

_LEAF_SHIFT = 10  # blocks in a leaf, as a power of two
_LEAF_BYTES = 1 << (_LEAF_SHIFT - 3)
_BIT = (1 << np.arange(8)).astype(np.uint8)
# A batch whose blocks lie this close together is freed through one packed window, else bit by bit.
_DENSE_BITS_PER_BLOCK = 16


class BitmapAllocator:
    """Hands out blocks 1 .. num_blocks - 1, lowest numbers first; block 0 is never free."""

    __slots__ = ("_any_free", "_any_free_view", "_bits", "_free", "_lowest", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        leaves = -(-num_blocks >> _LEAF_SHIFT)
        self.num_blocks = num_blocks
        flags = np.zeros(leaves << _LEAF_SHIFT, np.uint8)
        flags[1:num_blocks] = 1
        self._bits = np.packbits(flags, bitorder="little")
        self._any_free = bytearray(b"\1" * leaves)
        self._any_free_view = np.frombuffer(self._any_free, np.uint8)
        self._free = num_blocks - 1
        self._lowest = 1

    def __len__(self) -> int:
        """Number of free blocks."""
        return self._free

    def allocate(self, count: int) -> I64:
        """Takes the `count` lowest-numbered free blocks, ascending. At least `count` must be free."""
        assert 0 <= count <= self._free
        parts: list[I64] = []
        missing = count
        at = self._lowest >> 3
        width = 16 + (count >> 3)
        while missing:
            leaf = self._any_free.find(1, at >> (_LEAF_SHIFT - 3))
            at = max(at, leaf * _LEAF_BYTES)
            end = min(at + width, self._bits.size)
            found = np.unpackbits(self._bits[at:end], bitorder="little").nonzero()[0][:missing]
            if found.size:
                missing -= found.size
                found += at << 3
                parts.append(found)
                self._clear_through(at, int(found[-1]) if not missing else (end << 3) - 1)
            at = end
            width *= 2
        self._free -= count
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _clear_through(self, first_byte: int, last: int) -> None:
        """Clears the bits from byte `first_byte` through block `last`; there is nothing free below."""
        byte = last >> 3
        self._bits[first_byte:byte] = 0
        self._bits[byte] &= (0xFE << (last & 7)) & 0xFF
        self._lowest = last + 1
        # Leaves that this emptied: whole ones passed, and the last one if nothing is left in it.
        leaf = byte // _LEAF_BYTES
        first_leaf = first_byte // _LEAF_BYTES
        if leaf > first_leaf:
            self._any_free_view[first_leaf:leaf] = 0
        if not self._bits[byte : (leaf + 1) * _LEAF_BYTES].any():
            self._any_free[leaf] = 0

    def free(self, blocks: I64) -> None:
        """Gives blocks back, in any order. None of them may be free already, or named twice."""
        if not blocks.size:
            return
        low, high = int(blocks.min()), int(blocks.max())
        first = low >> 3
        span = (high >> 3) - first + 1
        if span << 3 <= blocks.size * _DENSE_BITS_PER_BLOCK:
            window = np.zeros(span << 3, np.uint8)
            window[blocks - (first << 3)] = 1
            self._bits[first : first + span] |= np.packbits(window, bitorder="little")
            self._any_free_view[low >> _LEAF_SHIFT : (high >> _LEAF_SHIFT) + 1] = 1
        else:
            np.bitwise_or.at(self._bits, blocks >> 3, _BIT[blocks & 7])
            self._any_free_view[blocks >> _LEAF_SHIFT] = 1
        self._free += blocks.size
        self._lowest = min(self._lowest, low)

    def free_blocks(self) -> I64:
        """All free blocks, ascending. Costs time proportional to the pool."""
        return np.unpackbits(self._bits, bitorder="little").nonzero()[0]

    def check(self) -> list[str]:
        """One sentence for each way in which the levels disagree."""
        wrong = []
        free = self.free_blocks()
        if free.size != self._free:
            wrong.append(f"the bitmap has {free.size} free blocks, {self._free} are counted")
        if free.size and (free[0] == 0 or free[-1] >= self.num_blocks):
            wrong.append(f"blocks {free[0]} to {free[-1]} are free, the pool hands out 1 to {self.num_blocks - 1}")
        if free.size and free[0] < self._lowest:
            wrong.append(f"block {free[0]} is free below {self._lowest}, the lowest that may be")
        leaves = self._bits.reshape(-1, _LEAF_BYTES).max(axis=1) > 0
        wrong += [
            f"leaf {leaf} of the bitmap {'has' if leaves[leaf] else 'has no'} free blocks, its summary says otherwise"
            for leaf in (leaves != self._any_free_view.astype(bool)).nonzero()[0]
        ]
        return wrong
