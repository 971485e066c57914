"""Prefix index: finds the block that holds the K/V of given tokens after a given prefix.

A trie over full blocks, kept as one dictionary:

    (node of the parent block: 8 bytes | the block's tokens: int32 little-endian)  ->  node

The key holds the tokens themselves, so a hit is exact and nothing can collide; the parent's node stands for all that
comes before. A node is a number that is never used again: a serial above, the block's number below. A block that is
evicted takes its node along, and what was chained behind that node is not found any more, whatever the block holds
next.
Each namespace has a root of its own (whose block is 0), so equal tokens of two namespaces never meet.
"""

from __future__ import annotations

from itertools import islice
from struct import Struct

import numpy as np

from block_manager_svc.core.step import I64


class PrefixIndex:
    __slots__ = ("_keys", "_nodes", "_pieces", "_roots", "_serial", "_shift")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pieces = Struct(f"{4 * block_size}s").iter_unpack  # tokens of one block after another
        self._shift = num_blocks.bit_length()
        self._serial = 0
        self._roots: dict[bytes, int] = {}
        self._nodes: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._nodes)

    def root(self, namespace: bytes) -> int:
        """The node that all first blocks of a namespace have for their parent."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = self._new_node(0)
        return node

    def detached(self) -> int:
        """A node for what comes after blocks that are not found any more: nothing behind it is found either."""
        return self._new_node(0)

    def find(self, node: int, tokens: bytes) -> tuple[int, I64]:
        """Follows whole blocks of `tokens` (int32) from `node`: the last node reached, and the blocks on the way."""
        child = self._nodes.get
        path: list[int] = []
        found: int | None
        for (piece,) in self._pieces(tokens):
            found = child(node.to_bytes(8, "little") + piece)
            if found is None:
                break
            path.append(found)
            node = found
        return node, np.array(path, np.int64) & ((1 << self._shift) - 1)

    def insert(
        self, parents: list[int], counts: list[int], tokens: bytes, blocks: list[int]
    ) -> tuple[list[int], list[int]]:
        """Chains the next counts[i] of `blocks` behind node parents[i]; `tokens` (int32) is what all of them hold.

        Where equal content is indexed already, that one stays canonical and the chain goes on from it.
        Returns the last node of each chain, and those of `blocks` that are indexed now.
        """
        nodes = self._nodes
        ends: list[int] = []
        indexed: list[int] = []
        held = zip(blocks, self._pieces(tokens), strict=True)
        for parent, count in zip(parents, counts, strict=True):
            node = parent
            for block, (piece,) in islice(held, count):
                key = node.to_bytes(8, "little") + piece
                found = nodes.get(key)
                if found is None:
                    found = nodes[key] = self._new_node(block)
                    self._keys[block] = key
                    indexed.append(block)
                node = found
            ends.append(node)
        return ends, indexed

    def remove(self, blocks: list[int]) -> None:
        """Forgets blocks; all must be indexed."""
        for block in blocks:
            key = self._keys[block]
            assert key is not None
            del self._nodes[key]
            self._keys[block] = None

    def node(self, block: int) -> int | None:
        """The node of a block; None if it is not indexed."""
        key = self._keys[block]
        return None if key is None else self._nodes.get(key)

    def content(self, block: int) -> tuple[int, bytes] | None:
        """What a block is found by: its parent's node, and its tokens; None if it is not indexed."""
        key = self._keys[block]
        return None if key is None else (int.from_bytes(key[:8], "little"), key[8:])

    def blocks(self) -> I64:
        """All blocks that can be found, for audits. Costs time proportional to their number."""
        return np.array(list(self._nodes.values()), np.int64) & ((1 << self._shift) - 1)

    def check(self) -> list[str]:
        """One sentence for each way in which blocks and nodes disagree."""
        mask = (1 << self._shift) - 1
        wrong = [
            f"the index leads to block {node & mask}, which is known there by another key"
            for key, node in self._nodes.items()
            if self._keys[node & mask] != key
        ]
        named = sum(key is not None for key in self._keys)
        if named != len(self._nodes):
            wrong.append(f"{named} blocks have a key in the index, {len(self._nodes)} can be found")
        return wrong

    def _new_node(self, block: int) -> int:
        self._serial += 1
        return self._serial << self._shift | block
