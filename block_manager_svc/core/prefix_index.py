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


class PrefixIndex:
    __slots__ = ("_keys", "_nodes", "_roots", "_serial", "_shift", "_width")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._width = 4 * block_size
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

    def find(self, node: int, tokens: bytes) -> tuple[int, list[int]]:
        """Follows whole blocks of `tokens` (int32) from `node`: the last node reached, and the blocks on the way."""
        nodes, width = self._nodes, self._width
        mask = (1 << self._shift) - 1
        blocks: list[int] = []
        for start in range(0, len(tokens) - width + 1, width):
            child = nodes.get(node.to_bytes(8, "little") + tokens[start : start + width])
            if child is None:
                break
            blocks.append(child & mask)
            node = child
        return node, blocks

    def insert(self, node: int, tokens: bytes, blocks: list[int]) -> tuple[int, list[int]]:
        """Chains `blocks`, which hold `tokens` (int32, all full), behind `node`.

        Where equal content is indexed already, that one stays canonical and the chain goes on from it.
        Returns the last node, and those of `blocks` that are indexed now.
        """
        nodes, width = self._nodes, self._width
        indexed: list[int] = []
        start = 0
        for block in blocks:
            key = node.to_bytes(8, "little") + tokens[start : start + width]
            child = nodes.get(key)
            if child is None:
                child = nodes[key] = self._new_node(block)
                self._keys[block] = key
                indexed.append(block)
            node = child
            start += width
        return node, indexed

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
        return None if key is None else self._nodes[key]

    def content(self, block: int) -> tuple[int, bytes] | None:
        """What a block is found by: its parent's node, and its tokens; None if it is not indexed."""
        key = self._keys[block]
        return None if key is None else (int.from_bytes(key[:8], "little"), key[8:])

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
