"""Every state of a small world: `python tests/core/core_world.py`, or `make world`.

A world is a page table with few blocks, few sequences and two token values. From the empty table, every command that is
possible is given in every state that was not met before, until there is no such state. In each state the invariants
hold (`check`), and each sequence reads at its computed positions what belongs there.

States are the same if they differ only in names: of sequences, of blocks (the core takes any free block for any other),
of nodes of the index, and of the two tokens. What is left of them is one canonical tuple, of which a digest is kept.
The search goes deep first, so that one table can be set back to where it was (`Memory`) instead of being copied.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import marshal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import OutOfBlocks, ResourceExhausted
from block_manager_svc.core.prefix_index import NO_NODE
from block_manager_svc.core.step import OpKind

Command = tuple[str, tuple[int, ...]]
Slots = dict[int, tuple[object, ...]]  # place * block size + offset -> (namespace, tokens up to there)
ROOT, DEAD = 1 << 10, 1 << 20  # names of nodes that no block has: roots, and those whose block has other content


@dataclass(frozen=True, slots=True)
class Bounds:
    block_size: int = 2
    num_blocks: int = 5  # with the null block
    num_host: int = 4  # with slot 0 and the spare one; 0: no swapping
    sequences: int = 3
    tokens: int = 5  # of a sequence
    shared: bool = True  # one namespace for all, or one for each sequence, so that nobody finds anybody's blocks


class Memory:
    """All that a page table remembers, to set it back to: arrays in place, so that views of them stay good."""

    def __init__(self, table: PageTable) -> None:
        self._arrays: list[tuple[object, str]] = []
        self._bytes: list[tuple[object, str]] = []
        self._containers: list[tuple[object, str]] = []
        self._values: list[tuple[object, str]] = []
        self._seen: set[int] = set()
        self._walk(table)

    def _walk(self, thing: object) -> None:
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        for kind in type(thing).__mro__:
            for name in getattr(kind, "__slots__", ()):
                value = getattr(thing, name)
                if isinstance(value, np.ndarray):
                    if value.base is None:  # else a view of what is saved as bytes
                        self._arrays.append((thing, name))
                elif isinstance(value, bytearray):
                    self._bytes.append((thing, name))
                elif isinstance(value, (dict, list)):
                    self._containers.append((thing, name))
                elif hasattr(type(value), "__slots__") and type(value).__module__.startswith("block_manager_svc"):
                    self._values.append((thing, name))
                    self._walk(value)
                elif not callable(value) and not isinstance(value, (memoryview, itertools.count)):
                    self._values.append((thing, name))

    def save(self) -> list[list[object]]:
        arrays = [getattr(thing, name) for thing, name in self._arrays]
        return [
            [(array, array.copy()) for array in arrays],
            [bytes(getattr(thing, name)) for thing, name in self._bytes],
            [_copy(getattr(thing, name)) for thing, name in self._containers],
            [getattr(thing, name) for thing, name in self._values],
        ]

    def restore(self, saved: list[list[object]]) -> None:
        arrays, blobs, containers, values = saved
        for (thing, name), (array, content) in zip(self._arrays, arrays, strict=True):
            array[...] = content
            if getattr(thing, name) is not array:
                setattr(thing, name, array)
        for (thing, name), blob in zip(self._bytes, blobs, strict=True):
            getattr(thing, name)[:] = blob
        for (thing, name), container in zip(self._containers, containers, strict=True):
            setattr(thing, name, _copy(container))
        for (thing, name), value in zip(self._values, values, strict=True):
            setattr(thing, name, value)


def _copy(value: object) -> object:
    if isinstance(value, dict):
        return type(value)((key, _copy(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


class World:
    """`states` counts those met, `counts` the commands given, and `refused` of each kind."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.table = PageTable(bounds.num_blocks, bounds.block_size, num_host=bounds.num_host)
        self.memory = Memory(self.table)
        self.states = 0
        self.deepest = 0
        self.counts: Counter[str] = Counter()
        self._state = b""  # the digest of the state that commands are given in
        self.slots: Slots = {}  # what the device and the host hold
        self.namespaces: dict[int, bytes] = {}

    def search(self, most: int | None = None) -> bool:
        """Whether all states were met; `most`: stop at so many. AssertionError tells the commands that lead there."""
        met = {self._met()}
        path: list[Command] = []
        frames = [self._frame()]
        while frames:
            if most is not None and self.states >= most:
                return False
            saved, slots, namespaces, self._state, commands = frames[-1]
            command = next(commands, None)
            if command is None:
                frames.pop()
                del path[len(frames) - 1 :]
                continue
            self.memory.restore(saved)
            self.slots, self.namespaces = dict(slots), dict(namespaces)
            path[len(frames) - 1 :] = [command]
            try:
                self._give(command)
                self._read()
                digest = self._digest()
                if digest not in met:
                    met.add(digest)
                    self._met()
                    frames.append(self._frame())
                    self.deepest = max(self.deepest, len(frames))
            except Exception as error:
                raise AssertionError(f"after {path}: {error!r}") from error
        return True

    def _met(self) -> bytes:
        self.states += 1
        assert (wrong := self.table.check()) == [], wrong
        return self._digest()

    def _frame(self) -> tuple[list[list[object]], Slots, dict[int, bytes], bytes, Iterator[Command]]:
        return self.memory.save(), self.slots, self.namespaces, self._digest(), iter(list(self._commands()))

    # --- commands -----------------------------------------------------------------------------------------------------

    def _commands(self) -> Iterator[Command]:
        """All that change something, in the state that the table is in."""
        bounds, s = self.bounds, self.table._sequences
        rows = s.alive().tolist()
        alive = [int(s.id[row]) for row in rows]
        if len(alive) < bounds.sequences:
            # Longer prompts come from `grow` and `drop`. The other token is the same but for its name, if all is empty.
            yield from (("create", (token,)) for token in (0, 1))
            yield from (("fork", (sequence,)) for sequence in alive)
        here, away = [], []
        for row, sequence in zip(rows, alive, strict=True):
            length, computed, writable, blocks = (int(c[row]) for c in (s.length, s.computed, s.writable, s.blocks))
            yield "free", (sequence,)
            if blocks:
                yield "drop", (sequence,)
            yield from (("truncate", (sequence, to)) for to in range(1, length))
            if s.away[row]:
                away.append(sequence)
                continue
            if computed:
                here.append(sequence)
            if not blocks and length > bounds.block_size:
                yield "reuse", (sequence,)
            if writable < length:
                yield "grow", (sequence,)
            if length < bounds.tokens:
                yield from (("grow", (sequence, token)) for token in (0, 1))
            yield from (("commit", (sequence, to)) for to in range(computed + 1, min(writable, length) + 1))
        if bounds.num_host:
            yield from (("swap out", (sequence,)) for sequence in here)
            yield from (("swap in", (sequence,)) for sequence in away)
            yield from (("exchange", pair) for pair in itertools.product(here, away))

    def _give(self, command: Command) -> None:
        name, arguments = command
        table, sequence = self.table, arguments[0]
        self.counts[name] += 1
        try:
            match name:
                case "create":
                    namespace = b"" if self.bounds.shared else table.next_sequence.to_bytes(8, "little")
                    self.namespaces[table.create(list(arguments), namespace)] = namespace
                case "fork":
                    [child] = table.fork(sequence).tolist()
                    self.namespaces[child] = self.namespaces[sequence]
                case "free":
                    table.free([sequence])
                    del self.namespaces[sequence]
                case "drop":
                    table.drop([sequence])
                case "truncate":
                    table.truncate([sequence], [arguments[1]])
                case "reuse":
                    table.reuse(sequence)
                case "grow":
                    new = list(arguments[1:])
                    extended = table.grow([sequence], [len(new)], new, [0]).extended
                    self._move(extended.copy_src.tolist(), extended.copy_dst.tolist())
                case "commit":
                    self._write(sequence, arguments[1])
                    table.commit([sequence], [arguments[1]])
                case _:
                    out = arguments[:1] if name != "swap in" else ()
                    ops = table.swap(list(out), list(arguments[len(out) :])).ops
                    host = self.bounds.num_blocks
                    for kind, src, dst in zip(ops.kind.tolist(), ops.src.tolist(), ops.dst.tolist(), strict=True):
                        leaves = kind == OpKind.SWAP_OUT
                        self._move([src if leaves else src + host], [dst + host if leaves else dst])
        except (OutOfBlocks, ResourceExhausted):
            self.counts[f"{name} refused"] += 1
            assert self._digest() == self._state, "a refusal changed something"

    # --- the device ---------------------------------------------------------------------------------------------------

    def _move(self, sources: list[int], targets: list[int]) -> None:
        size = self.bounds.block_size
        for source, target in zip(sources, targets, strict=True):
            for offset in range(size):
                held = self.slots.pop(target * size + offset, None), self.slots.get(source * size + offset)
                if held[1] is not None:
                    self.slots[target * size + offset] = held[1]

    def _write(self, sequence: int, upto: int) -> None:
        """K/V of the positions that are to be committed, as a step would."""
        [computed] = self.table.computed([sequence]).tolist()
        for position, slot, held in self._positions(sequence, upto):
            if position >= computed:
                self.slots[slot] = held

    def _read(self) -> None:
        for sequence, computed in zip(
            (ids := self.table.sequences()).tolist(), self.table.computed(ids).tolist(), strict=True
        ):
            for position, slot, held in self._positions(sequence, computed):
                assert self.slots.get(slot) == held, f"sequence {sequence} reads another's at position {position}"

    def _positions(self, sequence: int, upto: int) -> Iterator[tuple[int, int, tuple[object, ...]]]:
        """Each position below `upto`, its slot, and what it is to hold."""
        s, size = self.table._sequences, self.bounds.block_size
        row = s.row(sequence)
        tokens = s.tokens.values(row, upto).tolist()
        places = s.tables.values(row, int(s.blocks[row])).tolist()
        namespace = self.namespaces[sequence]
        for position in range(upto):
            slot = places[position // size] * size + position % size
            yield position, slot, (namespace, *tokens[: position + 1])

    # --- what a state is ----------------------------------------------------------------------------------------------

    def _digest(self) -> bytes:
        s, pool = self.table._sequences, self.table._pool
        index = pool.index
        sequences = []
        for row in s.alive().tolist():
            length = int(s.length[row])
            tokens = tuple(s.tokens.values(row, length).tolist())
            columns = int(s.computed[row]), int(s.writable[row]), int(s.away[row])
            places = s.tables.values(row, int(s.blocks[row])).tolist()
            node, root = int(s.node[row]), int(s.root[row])
            sequences.append((tokens, columns, places, node and index.serial(node), index.serial(root)))
        cached = pool.cached.order().tolist()
        contents = {place: index.content(place) for places in (*(q[2] for q in sequences), cached) for place in places}
        blocks = {
            place: (
                place >= pool.num_blocks,
                bool(pool.sealed[place]),
                content and (content[0], tuple(np.frombuffer(content[1], np.int32).tolist())),
            )
            for place, content in contents.items()
        }
        self._forget_orphans(sequences, cached, blocks)
        serials = {index.serial(index.node(place)): place for place, content in contents.items() if content}
        roots = {index.serial(node) for node in index._roots.values()}
        flipped = [(tuple(1 - t for t in q[0]), *q[1:]) for q in sequences]
        flipped_blocks = {
            place: (*block[:2], block[2] and (block[2][0], tuple(1 - t for t in block[2][1])))
            for place, block in blocks.items()
        }
        forms = [
            _form(list(order), cached, held, serials, roots)
            for chosen, held in ((sequences, blocks), (flipped, flipped_blocks))
            for order in _orders(chosen)
        ]
        return hashlib.blake2b(min(marshal.dumps(form, 0) for form in forms), digest_size=16).digest()

    def _forget_orphans(self, sequences: list[tuple], cached: list[int], blocks: dict) -> None:
        """Cached blocks that nobody can find any more are all the same, whatever they hold: they wait for eviction.

        That is so if an ancestor is gone, unless a sequence goes on from there; and where each sequence has a
        namespace of its own, if that sequence is gone.
        """
        index = self.table._pool.index
        places = {index.serial(index.node(place)): place for place in index.blocks().tolist()}
        reached = {serial for _, _, _, *serials in sequences for serial in serials}
        if self.bounds.shared:
            reached |= {index.serial(node) for node in index._roots.values()}
        for place in cached:
            serial = index.serial(index.node(place))
            while serial not in reached and serial in places:
                serial = index.content(places[serial])[0]
            if serial not in reached:
                blocks[place] = blocks[place][0], blocks[place][1], None


def _orders(sequences: list[tuple]) -> Iterator[tuple]:
    """The sequences in order of what they are by themselves; those that are equal in it, in every order."""
    groups = [list(group) for _, group in itertools.groupby(sorted(sequences, key=_alone), key=_alone)]
    for parts in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield tuple(itertools.chain.from_iterable(parts))


def _alone(sequence: tuple) -> tuple:
    tokens, columns, places, _, _ = sequence
    return tokens, columns, len(places)


def _form(sequences: list[tuple], cached: list[int], blocks: dict, serials: dict, roots: set[int]) -> tuple:
    """The state with names given in the order in which this meets them."""
    names: dict[int, int] = {}
    for place in itertools.chain(*(places for _, _, places, _, _ in sequences), cached):
        names.setdefault(place, len(names))
    others: dict[int, int] = {}

    def node(serial: int) -> int:
        if serial in serials:
            return names[serials[serial]]
        if serial == NO_NODE:
            return -1
        return others.setdefault(serial, (ROOT if serial in roots else DEAD) + len(others))

    held = tuple(
        (host, sealed, content and (node(content[0]), content[1]))
        for host, sealed, content in (blocks[place] for place in names)
    )
    return (
        tuple(
            (tokens, columns, tuple(names[place] for place in places), node(after), node(root))
            for tokens, columns, places, after, root in sequences
        ),
        tuple(names[place] for place in cached),
        held,
    )


# Each has room for what it is about; all of it in one world would be more states than a night has seconds.
WORLDS = (
    Bounds(sequences=1, tokens=5, num_host=0),  # long prefixes, their eviction and what it leaves
    Bounds(sequences=2, tokens=3, num_blocks=4, num_host=0),  # prefixes found, copies, and pressure
    Bounds(sequences=2, tokens=3, num_blocks=4, num_host=0, shared=False),  # nobody finds anybody's blocks
    Bounds(sequences=3, tokens=2, num_blocks=3, num_host=0),  # blocks with three holders
    Bounds(sequences=2, tokens=2, num_blocks=3, num_host=4),  # shared blocks on the host, exchanges
)
LARGE = Bounds()  # of which only so many states are seen as `--most` says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=20_000, help="states of the world that is too large for all")
    parser.add_argument("--record", type=Path, help="a folder for the record of this run, as JSON")
    options = parser.parse_args()
    worlds = []
    for bounds in (*WORLDS, LARGE):
        world = World(bounds)
        began = time.monotonic()
        complete = world.search(options.most if bounds is LARGE else None)
        worlds.append(
            {
                "bounds": asdict(bounds),
                "states": world.states,
                "all states": complete,
                "commands": dict(sorted(world.counts.items())),
                "longest path": world.deepest,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        sys.stdout.write(json.dumps(worlds[-1]) + "\n")
        sys.stdout.flush()
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "proof": "all states of small worlds",
        "worlds": worlds,
        "python": sys.version.split()[0],
        "revision": revision,
    }
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        (options.record / "core-world.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
