"""Free blocks of the pool: a bitmap of two levels.

    leaf:     0              1              2                  1,024 blocks each
    bits:     00000000 0000… 00010110 1111… 11111111 1111…     1: free; little-endian within a byte
    any_free: 0              1              1                  a byte a leaf; 0: nothing is free in it
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
# Up to this many blocks are freed one by one. Of more, those that lie close are freed through a packed window.
_FEW = 24
_DENSE_BITS_PER_BLOCK = 16


class BitmapAllocator:
    """Hands out blocks 1 .. num_blocks - 1, lowest numbers first; block 0 is never free."""

    __slots__ = ("_any_free", "_any_free_view", "_bits", "_bits_view", "_free", "_lowest", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        leaves = -(-num_blocks >> _LEAF_SHIFT)
        self.num_blocks = num_blocks
        flags = np.zeros(leaves << _LEAF_SHIFT, np.uint8)
        flags[1:num_blocks] = 1
        # Bytes for single items, and the same memory as arrays.
        self._bits = bytearray(np.packbits(flags, bitorder="little"))
        self._bits_view = np.frombuffer(self._bits, np.uint8)
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
        width = 16 + (count >> 3)  # bytes
        while missing:
            at = self._lowest >> 3
            leaf = at // _LEAF_BYTES
            if not self._any_free[leaf]:
                at = self._any_free.find(1, leaf) * _LEAF_BYTES
            window = np.unpackbits(self._bits_view[at : at + width], bitorder="little")
            found = window.nonzero()[0][:missing]
            found += at << 3
            missing -= found.size
            parts.append(found)
            self._take_through(at, ((at + width) << 3) - 1 if missing else int(found[-1]))
            width *= 2
        self._free -= count
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _take_through(self, first: int, last: int) -> None:
        """All that was free from byte `first` through block `last` is taken; nothing is free below."""
        byte = last >> 3
        if byte > first:
            self._bits_view[first:byte] = 0
            if (leaf := byte // _LEAF_BYTES) > first // _LEAF_BYTES:
                self._any_free_view[first // _LEAF_BYTES : leaf] = 0
        self._bits[byte] &= 0xFE << (last & 7)
        self._lowest = last + 1

    def free(self, blocks: I64) -> None:
        """Gives blocks back, in any order. None of them may be free already, or named twice."""
        if blocks.size <= _FEW:
            for block in blocks.tolist():
                self._bits[block >> 3] |= 1 << (block & 7)
                self._any_free[block >> _LEAF_SHIFT] = 1
                if block < self._lowest:
                    self._lowest = block
        else:
            low, high = int(blocks.min()), int(blocks.max())
            first = low >> 3
            span = (high >> 3) - first + 1
            if span << 3 <= blocks.size * _DENSE_BITS_PER_BLOCK:
                window = np.zeros(span << 3, np.uint8)
                window[blocks - (first << 3)] = 1
                self._bits_view[first : first + span] |= np.packbits(window, bitorder="little")
                self._any_free_view[low >> _LEAF_SHIFT : (high >> _LEAF_SHIFT) + 1] = 1
            else:
                np.bitwise_or.at(self._bits_view, blocks >> 3, _BIT[blocks & 7])
                self._any_free_view[blocks >> _LEAF_SHIFT] = 1
            self._lowest = min(self._lowest, low)
        self._free += blocks.size

    def free_blocks(self) -> I64:
        """All free blocks, ascending. Costs time proportional to the pool."""
        return np.unpackbits(self._bits_view, bitorder="little").nonzero()[0]

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
        leaves = self._bits_view.reshape(-1, _LEAF_BYTES).max(axis=1) > 0
        wrong += [
            f"leaf {leaf} of the bitmap has free blocks, its summary says it has none"
            for leaf in (leaves & (self._any_free_view == 0)).nonzero()[0]
        ]
        return wrong
