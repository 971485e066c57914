"""A batch: an ordered list of commands, each with its own result; one that is refused changes nothing, or all or none.

What the commands move leaves as one list of block ops, in decision order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from block_manager_svc.core.arguments import count_column
from block_manager_svc.core.commands import (
    Append,
    Command,
    Commit,
    Create,
    Expecting,
    Fork,
    Free,
    Pin,
    Reserve,
    Swap,
    Truncate,
    Unpin,
    referred,
)
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, Refused, SequenceNotFound
from block_manager_svc.core.page_table import PageTable
from block_manager_svc.core.step import I64, BlockOps
from block_manager_svc.core.undo import Recording

MAX_SLOTS: Final = 1 << 20  # in the results of one batch
MAX_CHILDREN: Final = 1 << 16  # of one batch

_NONE: Final = np.empty(0, np.int64)
_NO_OPS: Final = BlockOps()


@dataclass(slots=True)
class Done:
    """What a command gave; columns that its kind does not have are empty.

    sequences:           i64, the ids that it made.
    cached:              i64, tokens of each new prompt whose K/V are there already.
    slot_indptr, slots:  i64, as in Grown: the positions that are new to write.
    ops:                 blocks that are copied, zeroed or swapped, before anything is written.
    pin, pinned:         id of the pin, and the tokens that it holds.
    reservation:         its id.
    """

    sequences: I64 = field(default_factory=lambda: _NONE)
    cached: I64 = field(default_factory=lambda: _NONE)
    slot_indptr: I64 = field(default_factory=lambda: _NONE)
    slots: I64 = field(default_factory=lambda: _NONE)
    ops: BlockOps = field(default_factory=lambda: _NO_OPS)
    pin: int = 0
    pinned: int = 0
    reservation: int = 0


@dataclass(slots=True)
class Executed:
    """results: one for each command. touched: i64, the sequences that were made or named and are alive, each once."""

    results: list[Done | Refused]
    ops: BlockOps
    touched: I64


def execute(
    table: PageTable, commands: Sequence[Command | Refused], *, owner: int = 0, tenant: int = 0, atomic: bool = False
) -> Executed:
    """Executes commands in order. Sequences that are not `owner`'s count as not there; `tenant` is charged.

    atomic: the first refusal takes back all that the commands before it have done, and is raised, with the number
    `failed_item` more. Else what was refused, also before it became a command, keeps its place among the results.
    A command is refused as the table's method refuses it, or with FailedPrecondition REFERENCE_INVALID,
    InvalidArgument TOO_MANY_SLOTS or TOO_MANY_CHILDREN.
    """
    if not atomic:
        return _execute(_Batch(table, owner, tenant), commands)
    with Recording(table) as recording:
        executed = _execute(_Batch(table, owner, tenant), commands, until_refused=True)
        if executed.results and isinstance(refused := executed.results[-1], Refused):
            recording.take_back()
            refused.numbers["failed_item"] = len(executed.results) - 1
            raise refused
    return executed


def _execute(batch: _Batch, commands: Sequence[Command | Refused], *, until_refused: bool = False) -> Executed:
    for command in commands:
        try:
            result = command if isinstance(command, Refused) else batch.run(command)
        except Refused as refused:
            result = refused
        batch.results.append(result)
        if until_refused and isinstance(result, Refused):
            break
    return Executed(batch.results, batch.ops(), batch.touched())


class _Batch:
    """One batch under way."""

    __slots__ = ("_children", "_freed", "_named", "_owner", "_slots", "_table", "_tenant", "results")

    def __init__(self, table: PageTable, owner: int, tenant: int) -> None:
        self.results: list[Done | Refused] = []
        self._table = table
        self._owner = owner
        self._tenant = tenant
        self._slots = MAX_SLOTS  # that may still be named
        self._children = MAX_CHILDREN  # that may still be made
        self._named: list[I64] = []
        self._freed = False

    def run(self, command: Command) -> Done:
        match command:
            case Append():
                return self._append(command)
            case Commit():
                sequences = self._sequences(command.sequences)
                self._table.commit(sequences, command.upto)
            case Create():
                return self._create(command)
            case Fork():
                return self._fork(command)
            case Truncate():
                sequences = self._sequences(command.sequences)
                self._table.truncate(sequences, command.lengths)
            case Free():
                sequences = self._sequences(command.sequences)
                self._table.free(sequences)
                self._freed = True
            case Pin():
                pin = self._table.pin
                pinned = pin(command.tokens, command.until, command.namespace, owner=self._owner, extra=command.extra)
                return Done(pin=pinned.pin, pinned=pinned.tokens)
            case Unpin():
                self._table.unpin(self._resolve(command.pins, _made_pin), owner=self._owner)
                return Done()
            case Swap():
                return self._swap(command)
            case Expecting():
                self._table.check_revisions(self._sequences(command.sequences), command.revisions)
                return self.run(command.command)
            case Reserve():
                reserve = self._table.reserve
                return Done(reservation=reserve(command.blocks, command.until, owner=self._owner, tenant=self._tenant))
            case _:  # Release, the last of the kinds
                ids = self._resolve(command.reservations, _made_reservation)
                self._table.release(ids, owner=self._owner)
                return Done()
        self._named.append(sequences)
        return Done()

    def _append(self, command: Append) -> Done:
        sequences = self._sequences(command.sequences)
        grown = self._table.grow(
            sequences,
            command.counts,
            command.tokens,
            command.lookahead,
            reservation=self._reservation(command.reservation),
            owner=self._owner,
            most=self._slots,
            extra=command.extra,
        )
        self._slots -= grown.slots.size
        self._named.append(sequences)
        extended = grown.extended
        ops = extended.ops() if extended.copy_src.size or extended.zeroed.size else _NO_OPS
        return Done(slot_indptr=grown.slot_indptr, slots=grown.slots, ops=ops)

    def _create(self, command: Create) -> Done:
        begun = self._table.begin(
            command.counts,
            command.tokens,
            command.lookahead,
            command.namespace,
            owner=self._owner,
            tenant=self._tenant,
            retention=command.retention,
            reservation=self._reservation(command.reservation),
            most=self._slots,
            extra=command.extra,
            window=command.window,
            sinks=command.sinks,
        )
        self._slots -= begun.slots.size
        self._named.append(begun.sequences)
        return Done(
            sequences=begun.sequences,
            cached=begun.cached,
            slot_indptr=begun.slot_indptr,
            slots=begun.slots,
            ops=begun.ops,
        )

    def _fork(self, command: Fork) -> Done:
        sequences = self._sequences(command.sequences)
        counts = count_column(command.counts, "counts", sequences.size)
        if (total := int(counts.sum())) > self._children:
            raise InvalidArgument(
                "TOO_MANY_CHILDREN",
                f"{total} children, {self._children} more can be made in this batch: fork in parts",
                children=total,
                limit=self._children,
            )
        if (counts == 0).any():
            raise InvalidArgument("COUNT_OUT_OF_RANGE", "0 children: at least 1", count=0)
        self._children -= total
        fork = self._table.fork
        made = [fork(sequence, count) for sequence, count in zip(sequences.tolist(), counts.tolist(), strict=True)]
        children = np.concatenate(made) if made else _NONE
        self._named += (sequences, children)
        return Done(sequences=children)

    def _swap(self, command: Swap) -> Done:
        out, back = self._sequences(command.out), self._sequences(command.back)
        swapped = self._table.swap(out, back)
        self._named += (out, back, swapped.changed)
        return Done(ops=swapped.ops)

    # --- ids ----------------------------------------------------------------------------------------------------------

    def _sequences(self, column: I64) -> I64:
        """The sequences that a column names, all alive, distinct and the owner's."""
        try:
            self._table.check_owner(column, self._owner)
        except SequenceNotFound:
            ids = self._resolve(column, _made_sequences)
            if ids is column:
                raise
            self._table.check_owner(ids, self._owner)
            return ids
        return column  # no references, as nearly always

    def _reservation(self, reservation: int) -> int:
        if reservation >= 0:
            return reservation
        return int(self._resolve(np.array([reservation], np.int64), _made_reservation)[0])

    def _resolve(self, column: I64, made: Callable[[Done], I64]) -> I64:
        """The column with ids in the place of its references. made: what of a result they may name."""
        if not column.size or int(column.min()) >= 0:
            return column
        ids = column.copy()
        for at in (column < 0).nonzero()[0].tolist():
            item, position = referred(int(column[at]))
            result = self.results[item] if item < len(self.results) else None
            candidates = made(result) if isinstance(result, Done) else _NONE
            if position >= candidates.size:
                raise FailedPrecondition(
                    "REFERENCE_INVALID",
                    f"item {item} has not made what position {position} refers to: it has failed, comes later, or "
                    f"made {candidates.size} of the kind",
                    item=item,
                    position=position,
                )
            ids[at] = candidates[position]
        return ids

    # --- what it leaves -----------------------------------------------------------------------------------------------

    def ops(self) -> BlockOps:
        parts = [result.ops for result in self.results if isinstance(result, Done) and result.ops.kind.size]
        if len(parts) < 2:
            return parts[0] if parts else _NO_OPS
        return BlockOps(
            np.concatenate([part.kind for part in parts]),
            np.concatenate([part.src for part in parts]),
            np.concatenate([part.dst for part in parts]),
        )

    def touched(self) -> I64:
        if not self._named:
            return _NONE
        ids, *others = self._named
        key = ids.tobytes()
        if any(each.tobytes() != key for each in others):  # else a step that names the same in all its items
            ids = np.unique(np.concatenate(self._named))
        return ids[self._table.alive(ids)] if self._freed else ids


def _made_sequences(result: Done) -> I64:
    return result.sequences


def _made_pin(result: Done) -> I64:
    return np.array([result.pin], np.int64) if result.pin else _NONE


def _made_reservation(result: Done) -> I64:
    return np.array([result.reservation], np.int64) if result.reservation else _NONE
