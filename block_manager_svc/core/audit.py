"""The invariants of the page table, each recomputed from what it is about. Costs time proportional to the pool."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from block_manager_svc.core.extra_keys import by_block
from block_manager_svc.core.moves import entries_of
from block_manager_svc.core.pins import Pins
from block_manager_svc.core.pool import BlockPool
from block_manager_svc.core.prefix_index import NO_NODE
from block_manager_svc.core.residency import Residency
from block_manager_svc.core.sequences import Sequences


def audit(
    sequences: Sequences, pool: BlockPool, pins: Pins, reserved: int, residency: Residency, block_size: int
) -> list[str]:
    """One sentence, with its numbers, for each invariant that does not hold."""
    wrong = _rows(sequences, pool, block_size)
    if wrong:  # what follows reads through the rows
        return wrong
    return (
        _references(sequences, pool, block_size)
        + residency.check(sequences, pool)
        + _places(pool)
        + _host_places(pool)
        + _pins(pool, pins)
        + _counts(pool)
        + _kept(pool, reserved)
        + _accounts(sequences, pool)
        + _contents(sequences, pool, block_size)
    )


def _rows(s: Sequences, pool: BlockPool, block_size: int) -> list[str]:
    """Each sequence is where its id says, and its columns are in order."""
    wrong = s.check() + s.tokens.check("tokens") + s.tables.check("tables")
    for row in s.alive().tolist():
        name = f"sequence {s.id[row]}"
        length, computed, writable, blocks = (int(c[row]) for c in (s.length, s.computed, s.writable, s.blocks))
        if not 0 <= computed <= min(writable, length):
            wrong.append(f"{name} has {computed} computed of {length} known and {writable} writable positions")
        if writable > blocks * block_size:
            wrong.append(f"{name} has {writable} writable positions in {blocks} blocks of {block_size}")
        if length > s.tokens.capacity[row]:
            wrong.append(f"{name} has {length} tokens in room for {s.tokens.capacity[row]}")
        if blocks > s.tables.capacity[row]:
            wrong.append(f"{name} has {blocks} blocks in room for {s.tables.capacity[row]}")
        if (keyed := s.extra.get(int(s.id[row]))) and not 0 <= keyed[0][0] <= keyed[-1][0] < length:
            wrong.append(f"{name} has extra keys for positions {keyed[0][0]} to {keyed[-1][0]}, {length} tokens")
        table = s.tables.values(row, blocks)
        device, end = pool.num_blocks, pool.num_blocks + pool.num_host
        first, gone = -(-int(s.sinks[row]) // block_size), int(s.gone[row])
        wrong += [
            f"entry {i} of {name} is {'null' if null else f'block {table[i]}'}, entries {first} to {gone} are given up"
            for i, null in enumerate((table == 0).tolist())
            if null != (first <= i < gone)
        ]
        outside = table[(table < 0) | (table >= end) | (table == device)]
        if outside.size:
            wrong.append(
                f"the table of {name} names block {outside[0]}, outside 1 to {device - 1}, or {end - 1} on host"
            )
        if s.away[row]:
            if writable > computed:
                wrong.append(f"{name} is swapped out, and writable from {computed} to {writable}")
        elif (table >= device).any():
            wrong.append(f"{name} is on the device, its table names host slot {table[table >= device][0] - device}")
    return wrong


def _references(s: Sequences, pool: BlockPool, block_size: int) -> list[str]:
    """refcount = table references; no table names a block twice; what holds nothing computed is its table's own."""
    wrong = []
    named = np.zeros(pool.refcount.size, np.int64)
    for row in s.alive().tolist():
        table = s.tables.values(row, int(s.blocks[row]))
        table = table[table > 0]
        blocks, times = np.unique(table, return_counts=True)
        wrong += [f"the table of sequence {s.id[row]} names block {b} twice" for b in blocks[times > 1]]
        np.add.at(named, table, 1)
        behind = s.tables.values(row, int(s.blocks[row]))[-(-int(s.computed[row]) // block_size) :]
        wrong += [
            f"block {b} of sequence {s.id[row]} holds nothing computed: refcount {pool.refcount[b]}, "
            f"{'sealed' if pool.sealed[b] else 'not sealed'}"
            for b in behind[(pool.refcount[behind] > 1) | pool.sealed[behind]]
        ]
    wrong += [
        f"block {b} has refcount {pool.refcount[b]}, {named[b]} table entries name it"
        for b in (pool.refcount != named).nonzero()[0]
    ]
    return wrong


def _places(pool: BlockPool) -> list[str]:
    """A block with refcount 0 is in exactly one of free and cached, any other in none; nothing is held twice."""
    wrong = pool.allocator.check() + pool.index.check()
    refcount = pool.refcount[: pool.num_blocks]
    sealed, indexed = pool.sealed[: pool.num_blocks], pool.indexed[: pool.num_blocks]
    # Cached blocks are in the order of eviction, unless they are pinned.
    cached = np.concatenate((pool.cached.order(), ((pool.pinned > 0) & (refcount == 0)).nonzero()[0]))
    times = np.bincount(cached, minlength=pool.num_blocks)
    wrong += [f"block {b} is cached {times[b]} times" for b in (times > 1).nonzero()[0]]
    places = np.minimum(times, 1)
    places[pool.allocator.free_blocks()] += 1
    expected = (refcount == 0).astype(np.int64)
    expected[0] = 0  # the null block is nowhere
    wrong += [
        f"block {b} has refcount {refcount[b]} and is in {places[b]} of free and cached"
        for b in (places != expected).nonzero()[0]
    ]
    # index ⇔ sealed or cached; a sealed block may be the double of a canonical one, a cached block may not.
    has_key = np.zeros(pool.refcount.size, bool)
    has_key[pool.index.blocks()] = True
    wrong += [
        f"block {b} is {'in' if has_key[b] else 'not in'} the index, its mark says otherwise"
        for b in (has_key != pool.indexed).nonzero()[0]
    ]
    wrong += [f"block {b} is in the index and not sealed" for b in (pool.indexed & ~pool.sealed).nonzero()[0]]
    idle = refcount == 0
    wrong += [
        f"block {b} is unreferenced: {'sealed' if sealed[b] else 'not sealed'}, "
        f"{'in' if indexed[b] else 'not in'} the index, {'cached' if times[b] else 'not cached'}"
        for b in (idle & ((sealed != (times > 0)) | (indexed != (times > 0)))).nonzero()[0]
    ]
    return wrong


def _host_places(pool: BlockPool) -> list[str]:
    """A host slot is free exactly if nothing references it, and then nothing is known of it."""
    wrong = pool.host_allocator.check()
    held = pool.refcount[pool.num_blocks :] > 0
    free = np.zeros(max(pool.num_host, 1), bool)
    free[pool.host_allocator.free_blocks()] = True
    wrong += [
        f"host slot {h} has refcount {pool.refcount[pool.num_blocks + h]} and is {'free' if free[h] else 'taken'}"
        for h in range(1, pool.num_host)
        if held[h] == free[h]
    ]
    marked = pool.sealed[pool.num_blocks :] | pool.indexed[pool.num_blocks :]
    wrong += [f"host slot {h} is unreferenced, and sealed or in the index" for h in (marked & ~held).nonzero()[0]]
    return wrong


def _pins(pool: BlockPool, pins: Pins) -> list[str]:
    """The pins of each block are those that name it; only what is found can be pinned."""
    named = pins.counts(pool)
    wrong = [f"block {b} has {pool.pinned[b]} pins, {named[b]} name it" for b in (pool.pinned != named).nonzero()[0]]
    wrong += [
        f"block {b} is pinned and not in the index"
        for b in ((pool.pinned > 0) & ~pool.indexed[: pool.num_blocks]).nonzero()[0]
    ]
    return wrong


def _counts(pool: BlockPool) -> list[str]:
    """What is counted along the way equals what there is, and the states add up to the pool."""
    states, sharing = pool.states(), pool.sharing()
    device, host = (slice(pool.num_blocks), slice(pool.num_blocks, None))
    refcount, cached = pool.refcount[device], pool.indexed[device] & (pool.refcount[device] == 0)
    counted = {
        "table entries": (sharing.table_entries, int(refcount.sum())),
        "referenced blocks": (sharing.referenced_blocks, int((refcount >= 1).sum())),
        "shared blocks": (sharing.shared_blocks, int((refcount >= 2).sum())),
        "pinned blocks": (pool._pinned, int((pool.pinned > 0).sum())),
        "cached blocks": (states.cached, int(cached.sum())),
        "sealed blocks": (states.sealed, int((pool.sealed[device] & (refcount >= 1)).sum())),
        "table entries on the host": (pool.host.entries, int(pool.refcount[host].sum())),
        "referenced host slots": (pool.host.referenced, int((pool.refcount[host] >= 1).sum())),
        "shared host slots": (pool.host.shared, int((pool.refcount[host] >= 2).sum())),
        "sealed host slots": (pool.host.sealed, int(pool.sealed[host].sum())),
    }
    wrong = [f"{there} {name}, {count} are counted" for name, (count, there) in counted.items() if count != there]
    for side, numbers, size in (("blocks", states, pool.num_blocks), ("host slots", pool.host_states(), pool.num_host)):
        total = sum(astuple(numbers))
        if total != size:
            wrong.append(f"the states of {side} add up to {total}, the pool has {size}: {numbers}")
    return wrong


def _kept(pool: BlockPool, reserved: int) -> list[str]:
    """What is promised to reservations, and what lies above the limit, is free."""
    wrong = []
    if pool.reserved != reserved:
        wrong.append(f"reservations promise {reserved} blocks, {pool.reserved} are counted")
    if len(pool.allocator) < pool.reserved + pool.withheld:
        wrong.append(
            f"{len(pool.allocator)} blocks are free, {pool.reserved} are reserved and {pool.withheld} above the limit"
        )
    return wrong


def _accounts(s: Sequences, pool: BlockPool) -> list[str]:
    """Each tenant is charged for what its tables reference and what it left in the cache, and can have its floor."""
    accounts = pool.accounts
    if accounts is None:
        return []
    holders: dict[int, set[int]] = {}
    for row in s.alive().tolist():
        for place in entries_of(s, np.array([row]), s.blocks[[row]]).tolist():
            holders.setdefault(place, set()).add(int(s.tenant[row]))
    idle = (pool.indexed & (pool.refcount == 0)).nonzero()[0]
    counted = {name: np.zeros(len(accounts.caches), np.int64) for name in ("charged", "joint", "host", "host_joint")}
    for block in idle.tolist():
        counted["charged"][accounts.tenant_of[block]] += 1
    wrong = []
    for place, tenants in holders.items():
        side, joint = ("charged", "joint") if place < pool.num_blocks else ("host", "host_joint")
        counted[side][list(tenants)] += 1
        if len(tenants) > 1:
            counted[joint][list(tenants)] += 1
        elif (told := int(accounts.tenant_of[place])) not in tenants:
            wrong.append(f"block {place} is charged to tenant {told}, tenant {tenants} alone holds it")
    for name, there in counted.items():
        told_all = getattr(accounts, name)
        wrong += [
            f"tenant {t} has {there[t]} blocks {name}, {told_all[t]} are counted"
            for t in (there != told_all).nonzero()[0]
        ]
    for tenant, cache in enumerate(accounts.caches):
        others = cache.order()[accounts.tenant_of[cache.order()] != tenant]
        wrong += [f"block {b} of another tenant is in the cache of tenant {tenant}" for b in others]
    if int(accounts.reserved.sum()) != pool.reserved:
        wrong.append(f"{accounts.reserved.sum()} blocks are reserved for tenants, {pool.reserved} in all")
    if pool.unpromised() < 0:
        wrong.append(f"tenants are guaranteed {-pool.unpromised()} blocks more than there are")
    return wrong


def _contents(s: Sequences, pool: BlockPool, block_size: int) -> list[str]:
    """Blocks hold what their holders think they hold.

    What is computed and full is sealed; an indexed block is found by its holders' tokens, behind their block before it;
    two tables share a block only in the same place, where their tokens and extra keys are equal up to what both have
    computed.
    """
    wrong = []
    first_holder: dict[int, tuple[int, int]] = {}
    for row in s.alive().tolist():
        name = f"sequence {s.id[row]}"
        table = s.tables.values(row, int(s.blocks[row])).tolist()
        full = int(s.computed[row]) // block_size
        node = pool.index.serial(int(s.root[row]))
        for place, block in enumerate(table):
            if not block:  # given up: which node stands for it is not known here
                node = 0
                continue
            own, keys = _held(s, row, place, block_size, int(s.computed[row]))
            if place < full and not pool.sealed[block]:
                wrong.append(f"block {block} of {name} is full and computed, and not sealed")
            content = pool.index.content(block)
            if content is not None:
                parent, held = content
                if not held.startswith(own) or not held[4 * block_size :].startswith(keys):
                    wrong.append(f"block {block} is indexed with other content than {name} has at {place * block_size}")
                if node and place < full and parent != node:
                    wrong.append(f"block {block} of {name} is indexed behind node {parent}, the block before is {node}")
            # 0: the block before is not canonical, so which node stands for it is not known here.
            node = pool.index.serial(pool.index.node(block))
            other, other_place = first_holder.setdefault(block, (row, place))
            if other_place != place:
                wrong.append(f"block {block} is entry {place} of {name} and {other_place} of sequence {s.id[other]}")
                continue
            # Below this both have written, or found written, what the block holds.
            end = min((place + 1) * block_size, int(s.computed[row]), int(s.computed[other]))
            if _held(s, row, place, block_size, end) != _held(s, other, place, block_size, end):
                wrong.append(f"{name} and sequence {s.id[other]} share block {block}, they differ before {end}")
        end_node = pool.index.node(table[full - 1]) if full else int(s.root[row])
        after = int(s.node[row])
        if NO_NODE not in (end_node, after) and pool.index.serial(end_node) != pool.index.serial(after):
            wrong.append(f"{name} goes on from node {after}, its {full} computed blocks end in {end_node}")
    return wrong


def _held(s: Sequences, row: int, place: int, size: int, end: int) -> tuple[bytes, bytes]:
    """What a row's entry holds of positions below `end`: tokens, and extra keys as the index has them."""
    first, end = place * size, min((place + 1) * size, end)
    keyed = tuple(each for each in s.extra.get(int(s.id[row]), ()) if each[0] < end)
    return s.tokens.values(row, end)[first:].tobytes(), by_block(keyed, size).get(place, b"")
