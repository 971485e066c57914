"""Prefix index: finds the block that holds the K/V of given tokens after a given prefix.

A trie over full blocks, kept as one dictionary:

    (serial of the parent's node: 8 bytes | the block's tokens: int32 little-endian | its extra keys)  ->  node

The key holds the content itself, so a hit is exact and nothing can collide; the parent's serial stands for all that
comes before. A node is one number: above, a serial that is never used again; below, the block that held the content
when the node was read. A block that is evicted takes its node along, and what was chained behind that node is not found
any more, whatever the block holds next. A block that moves keeps its serial, and with it all that is chained behind.
Each namespace has a root of its own (whose block is 0), so equal tokens of two namespaces never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from struct import Struct

import numpy as np

from block_manager_svc.core.events import EventLog
from block_manager_svc.core.step import I64

_NO_KEYS: Mapping[int, bytes] = {}

NO_NODE = 0  # in the place of a node: what comes behind it is not indexed


class PrefixIndex:
    __slots__ = (
        "_keys",
        "_mask",
        "_moved",
        "_nodes",
        "_pieces",
        "_roots",
        "_serial",
        "_shift",
        "_width",
        "block_size",
        "events",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pieces = Struct(f"{4 * block_size}s").iter_unpack  # tokens of one block after another
        self._width = 4 * block_size
        self.block_size = block_size
        self._shift = num_blocks.bit_length()
        self._mask = (1 << self._shift) - 1
        self._serial = 0
        self._roots: dict[bytes, int] = {}
        self._nodes: dict[bytes, int] = {}
        self._moved: set[int] = set()  # serials of indexed blocks that do not lie where they were when they came in
        self._keys: list[bytes | None] = [None] * num_blocks
        self.events: EventLog | None = None

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._nodes)

    def root(self, namespace: bytes) -> int:
        """The node that all first blocks of a namespace have for their parent."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = self._new_node(0)
            if self.events is not None:
                self.events.root(node >> self._shift, namespace)
        return node

    def is_alive(self, node: int) -> bool:
        """Whether a node is a root, or one whose block is found now, wherever it lies."""
        block = node & self._mask
        if not block:
            return node != NO_NODE
        key = self._keys[block]
        if key is not None and self._nodes[key] == node:
            return True
        return node >> self._shift in self._moved

    def find(self, node: int, tokens: bytes, extra: Mapping[int, bytes] = _NO_KEYS) -> tuple[int, I64]:
        """Follows whole blocks of `tokens` (int32) from `node`: the last node reached, and the blocks on the way.

        extra: the extra keys of those blocks that have some, by their place among these.
        """
        child, shift = self._nodes.get, self._shift
        path: list[int] = []
        serial = node >> shift
        found: int | None
        for (piece,) in self._contents(tokens, extra):
            found = child(serial.to_bytes(8, "little") + piece)
            if found is None:
                break
            path.append(found)
            serial = found >> shift
        return path[-1] if path else node, np.array(path, np.int64) & self._mask

    def insert(
        self,
        parents: list[int],
        counts: list[int],
        tokens: bytes,
        blocks: list[int],
        extra: Mapping[int, bytes] = _NO_KEYS,
    ) -> tuple[list[int], list[int]]:
        """Chains the next counts[i] of `blocks` behind node parents[i]; `tokens` (int32) is what all of them hold,
        `extra` as in `find`.

        Where equal content is indexed already, that one stays canonical and the chain goes on from it. Behind NO_NODE
        nothing is indexed. Returns the last node of each chain, and those of `blocks` that are indexed now.
        """
        nodes, shift = self._nodes, self._shift
        ends: list[int] = []
        indexed: list[int] = []
        held = zip(blocks, self._contents(tokens, extra), strict=True)
        for parent, count in zip(parents, counts, strict=True):
            node = parent
            for block, (piece,) in islice(held, count):
                if node == NO_NODE:
                    continue
                key = (node >> shift).to_bytes(8, "little") + piece
                found = nodes.get(key)
                if found is None:
                    found = nodes[key] = self._new_node(block)
                    self._keys[block] = key
                    indexed.append(block)
                node = found
            ends.append(node)
        if self.events is not None:
            for block in indexed:
                new = self._keys[block]
                assert new is not None
                self._tell_stored(self.events, int.from_bytes(new[:8], "little"), new, nodes[new])
        return ends, indexed

    def remove(self, blocks: list[int]) -> None:
        """Forgets blocks; all must be indexed."""
        for block in blocks:
            key = self._keys[block]
            assert key is not None
            node = self._nodes.pop(key)
            self._keys[block] = None
            if self._moved:
                self._moved.discard(node >> self._shift)
            if self.events is not None:
                self.events.removed(node >> self._shift)

    def clear(self) -> None:
        """Forgets all blocks. Namespaces stay."""
        for block in self.blocks().tolist():
            self._keys[block] = None
        self._nodes.clear()
        self._moved.clear()
        if self.events is not None:
            self.events.reset()

    def move(self, old: list[int], new: list[int]) -> None:
        """What old[i] is found by, leads to new[i] from now on. `old` are indexed, of `new` none but those in `old`."""
        keys = [self._keys[block] for block in old]
        for block in old:
            self._keys[block] = None
        for block, key in zip(new, keys, strict=True):
            assert key is not None
            self._keys[block] = key
            serial = self._nodes[key] >> self._shift
            self._nodes[key] = serial << self._shift | block
            self._moved.add(serial)
            if self.events is not None:
                self.events.moved(serial, block)

    def watch(self, events: EventLog) -> None:
        """Tells what can be found now, and from now on what changes. Costs time proportional to the index."""
        children: dict[bytes, list[tuple[bytes, int]]] = {}  # by the parent's serial
        for key, node in self._nodes.items():
            children.setdefault(key[:8], []).append((key, node))
        reached = [node >> self._shift for node in self._roots.values()]
        for serial, namespace in zip(reached, self._roots, strict=True):
            events.root(serial, namespace)
        for parent in reached:  # grows meanwhile
            for key, node in children.get(parent.to_bytes(8, "little"), ()):
                self._tell_stored(events, parent, key, node)
                reached.append(node >> self._shift)
        self.events = events

    def serial(self, node: int) -> int:
        """What is the same of a node wherever its block lies."""
        return node >> self._shift

    def node(self, block: int) -> int:
        """The node of a block; NO_NODE if it is not indexed."""
        key = self._keys[block]
        return NO_NODE if key is None else self._nodes.get(key, NO_NODE)

    def content(self, block: int) -> tuple[int, bytes] | None:
        """What a block is found by: the serial of its parent's node, and `held`; None if it is not indexed."""
        key = self._keys[block]
        return None if key is None else (int.from_bytes(key[:8], "little"), key[8:])

    def held(self, block: int) -> bytes:
        """What an indexed block holds: its tokens (int32), and behind them its extra keys."""
        key = self._keys[block]
        assert key is not None
        return key[8:]

    def blocks(self) -> I64:
        """All blocks that can be found, for audits. Costs time proportional to their number."""
        return np.array(list(self._nodes.values()), np.int64) & self._mask

    def check(self) -> list[str]:
        """One sentence for each way in which blocks and nodes disagree."""
        mask = self._mask
        wrong = [
            f"the index leads to block {node & mask}, which is known there by another key"
            for key, node in self._nodes.items()
            if self._keys[node & mask] != key
        ]
        named = sum(key is not None for key in self._keys)
        if named != len(self._nodes):
            wrong.append(f"{named} blocks have a key in the index, {len(self._nodes)} can be found")
        return wrong

    def _contents(self, tokens: bytes, extra: Mapping[int, bytes]) -> Iterable[tuple[bytes]]:
        pieces: Iterable[tuple[bytes]] = self._pieces(tokens)
        return ((piece + extra.get(i, b""),) for i, (piece,) in enumerate(pieces)) if extra else pieces

    def _tell_stored(self, events: EventLog, parent: int, key: bytes, node: int) -> None:
        end = 8 + self._width
        events.stored(node >> self._shift, parent, key[8:end], key[end:], node & self._mask)

    def _new_node(self, block: int) -> int:
        self._serial += 1
        return self._serial << self._shift | block
