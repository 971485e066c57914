"""Where sequences meet the prefix index: what they find of their tokens, and what they add by computing them.

sequence   root ─► node of block 0 ─► node of block 1 ─► s.node: behind it, the next full block is indexed
"""

from __future__ import annotations

import numpy as np

from block_manager_svc.core.extra_keys import Keyed, by_block
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.prefix_index import NO_NODE
from block_manager_svc.core.sequences import Sequences
from block_manager_svc.core.step import I32, I64


def find(pool: BlockPool, root: int, tokens: I32, keyed: Keyed = ()) -> tuple[int, I64]:
    """What the index finds of whole blocks on the device, and the node that it ends in.

    What lies on the host is not there before it is swapped in.
    """
    node, blocks = pool.index.find(root, tokens.tobytes(), by_block(keyed, pool.index.block_size))
    if pool.host.sealed and (away := (blocks >= pool.num_blocks).nonzero()[0]).size:
        blocks = blocks[: away[0]]
        node = pool.index.node(int(blocks[-1])) if blocks.size else root
    return node, blocks


def find_own(s: Sequences, pool: BlockPool, size: int, row: int) -> tuple[int, I64]:
    """What a row finds of its own tokens: whole blocks, below its last token. size: tokens a block."""
    whole = (int(s.length[row]) - 1) // size * size
    return find(pool, int(s.root[row]), s.tokens.values(row, whole), s.extra.get(int(s.id[row]), ()))


def node_at(s: Sequences, pool: BlockPool, size: int, row: int, full: int) -> int:
    """The node that the row's first `full` blocks end in, NO_NODE if they are not found any more."""
    index = pool.index
    if s.node[row] == NO_NODE:
        return NO_NODE
    if not full:
        return int(s.root[row])
    last = index.node(int(s.tables.values(row, full)[-1]))
    if last != NO_NODE:
        return last
    # The block is the double of a canonical one, which may be gone by now.
    keys = by_block(s.extra.get(int(s.id[row]), ()), size)
    node, blocks = index.find(int(s.root[row]), s.tokens.values(row, full * size).tobytes(), keys)
    return node if blocks.size == full else NO_NODE


def seal(s: Sequences, pool: BlockPool, size: int, rows: I64, first: I64, count: I64) -> list[int]:
    """Seals logical blocks first[i] .. + count[i] of each row. Returns the nodes that they are chained behind."""
    counts = count.tolist()
    if max(counts) == 1:
        tokens = s.tokens.gather_equal(rows, first * size, size).tobytes()
        blocks = s.tables.data[s.tables.start[rows] + first]
    else:
        tokens = s.tokens.gather(rows, first * size, count * size).tobytes()
        blocks = s.tables.gather(rows, first, count)
    parents: list[int] = s.node[rows].tolist()
    for i, node in enumerate(parents):
        if not pool.index.is_alive(node):
            parents[i] = node_at(s, pool, size, int(rows[i]), int(first[i]))
    extra = _keys_of_sealed(s, size, rows, first, count) if s.extra else {}
    s.node[rows] = pool.seal(parents, counts, tokens, blocks.astype(np.int64), extra)
    return parents


def canonical(s: Sequences, pool: BlockPool, size: int, row: int, parent: int, first: int, count: int) -> I64:
    """Places of the canonical blocks of logical blocks first .. + count of a row, behind node `parent`."""
    tokens = s.tokens.values(row, (first + count) * size)[first * size :].tobytes()
    keys = by_block(s.extra.get(int(s.id[row]), ()), size)
    here = {block - first: key for block, key in keys.items() if block >= first}
    return pool.index.find(parent, tokens, here)[1]


def _keys_of_sealed(s: Sequences, size: int, rows: I64, first: I64, count: I64) -> dict[int, bytes]:
    """Extra keys of logical blocks first[i] .. + count[i] of each row, by their place among all of them."""
    keys: dict[int, bytes] = {}
    begin = count.cumsum() - count
    for i, sequence in enumerate(s.id[rows].tolist()):
        for block, key in by_block(s.extra.get(sequence, ()), size).items():
            if 0 <= block - first[i] < count[i]:
                keys[int(begin[i] + block - first[i])] = key
    return keys
