"""StepBatch: from columns on the wire to commands of the core, and from their results back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import grpc.aio
import numpy as np

from block_manager_svc.core import commands
from block_manager_svc.core.batch import Done, Executed
from block_manager_svc.core.errors import InvalidArgument, Refused
from block_manager_svc.core.eviction.retention import Retention
from block_manager_svc.core.step import I64, OpKind
from block_manager_svc.manager import Manager
from block_manager_svc.replies import KeptReply, Replies
from block_manager_svc.rpc.authentication import caller
from block_manager_svc.rpc.columns import as_u32, as_u64, engine_namespace, extra_keys, i32, u32, u64, wire_id
from block_manager_svc.rpc.errors import numbers_of, retry_delay, status_of
from pagedkv.v1 import block_manager_pb2 as pb

MAX_ITEMS: Final = 4096
MAX_ID_BYTES: Final = 128
_REPLY_S: Final = 0.05  # before the caller's deadline, so that it still hears why

_Context = grpc.aio.ServicerContext[Any, Any]


class StepBatch:
    """The rpc, over one manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._replies: dict[int, Replies] = {}  # by tenant: no tenant meets, or pushes out, another's
        self._epoch = 0  # that they are of

    async def __call__(self, request: pb.StepBatchRequest, context: _Context) -> pb.StepBatchResponse:
        """Executes the batch before anything is awaited; so a caller that goes away cannot leave it halfway."""
        manager = self._manager
        _check_size(request)
        now = manager.now()
        if not request.request_id:
            reply = self._execute(request, now)
        elif (again := self._find(request, digest := _digest(request), now)) is not None:
            reply = again
        else:
            reply = self._execute(request, now)
            kept = KeptReply(digest, now, reply.SerializeToString())
            self._kept().keep(request.request_id, kept)
        if reply.step_id and not request.no_wait:
            await manager.wait_completed(reply.step_id, _patience(context))
        return reply

    def _find(self, request: pb.StepBatchRequest, digest: bytes, now: int) -> pb.StepBatchResponse | None:
        """The kept reply. A reset forgets them all: what they say is gone with the pool."""
        if self._epoch != self._manager.epoch:
            self._replies.clear()
            self._epoch = self._manager.epoch
        kept = self._kept().find(request.request_id, digest, now)
        if kept is None:
            return None
        reply = pb.StepBatchResponse.FromString(kept.reply)
        reply.replayed = True
        return reply

    def _kept(self) -> Replies:
        return self._replies.setdefault(caller().tenant.number, Replies())

    def _execute(self, request: pb.StepBatchRequest, now: int) -> pb.StepBatchResponse:
        commands = [_command(item, now) for item in request.items]
        executed, step_id = self._manager.execute(commands, tenant=caller().tenant, atomic=request.atomic)
        return self._reply(executed, step_id)

    def _reply(self, executed: Executed, step_id: int) -> pb.StepBatchResponse:
        manager = self._manager
        table = manager.page_table
        assert table is not None
        touched = executed.touched
        return pb.StepBatchResponse(
            header=pb.ReplyHeader(service_id=manager.service_id, epoch=manager.epoch, revision=table.revision),
            results=map(_result, executed.results),
            table_sequence=as_u64(touched),
            table_revision=as_u64(table.changed(touched)),
            step_id=step_id,
        )


def _check_size(request: pb.StepBatchRequest) -> None:
    if (asked := len(request.items)) > MAX_ITEMS:
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"{asked} items, at most {MAX_ITEMS} go at once: send in parts",
            asked=asked,
            limit=MAX_ITEMS,
        )
    if request.request_id and (size := len(request.request_id.encode())) > MAX_ID_BYTES:
        raise InvalidArgument(
            "REQUEST_ID_TOO_LONG",
            f"a request id of {size} bytes, the limit is {MAX_ID_BYTES}",
            bytes=size,
            limit=MAX_ID_BYTES,
        )


def _digest(request: pb.StepBatchRequest) -> bytes:
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


def _patience(context: _Context) -> float | None:
    """Seconds that the caller still waits, less what a reply takes; None: for ever."""
    remaining = context.time_remaining()
    return None if remaining is None else max(0.0, remaining - _REPLY_S)


# --- in --------------------------------------------------------------------------------------------------------------


def _create(m: pb.CreateCommand, now: int) -> commands.Create:
    counts = u32(m.counts, "counts")
    return commands.Create(
        counts,
        i32(m.tokens, "tokens"),
        u32(m.lookahead, "lookahead") if m.lookahead else np.zeros(counts.size, np.int64),
        engine_namespace(m.adapter),
        wire_id(m.reservation),
        Retention(m.priority, m.priority_ttl_ms or None) if m.HasField("priority") else None,
        extra_keys(m),
        m.window,
        m.sinks,
    )


def _append(m: pb.AppendCommand, now: int) -> commands.Append:
    sequences = u64(m.sequences, "sequences")
    return commands.Append(
        sequences,
        u32(m.counts, "counts") if m.counts else None,
        i32(m.tokens, "tokens"),
        u32(m.lookahead, "lookahead") if m.lookahead else None,
        wire_id(m.reservation),
        extra_keys(m),
    )


def _commit(m: pb.CommitCommand, now: int) -> commands.Commit:
    return commands.Commit(u64(m.sequences, "sequences"), u32(m.upto, "upto"))


def _fork(m: pb.ForkCommand, now: int) -> commands.Fork:
    sequences = u64(m.sequences, "sequences")
    return commands.Fork(sequences, u32(m.counts, "counts") if m.counts else np.ones(sequences.size, np.int64))


def _truncate(m: pb.TruncateCommand, now: int) -> commands.Truncate:
    return commands.Truncate(u64(m.sequences, "sequences"), u32(m.lengths, "lengths"))


def _free(m: pb.FreeCommand, now: int) -> commands.Free:
    return commands.Free(u64(m.sequences, "sequences"))


def _swap(m: pb.SwapCommand, now: int) -> commands.Swap:
    return commands.Swap(u64(m.out, "out"), u64(m.back, "back"))


def _pin(m: pb.PinCommand, now: int) -> commands.Pin:
    return commands.Pin(i32(m.tokens, "tokens"), now + m.ttl_ms, engine_namespace(m.adapter), extra_keys(m))


def _unpin(m: pb.UnpinCommand, now: int) -> commands.Unpin:
    return commands.Unpin(u64(m.pins, "pins"))


def _reserve(m: pb.ReserveCommand, now: int) -> commands.Reserve:
    return commands.Reserve(m.blocks, now + m.ttl_ms)


def _release(m: pb.ReleaseCommand, now: int) -> commands.Release:
    return commands.Release(u64(m.reservations, "reservations"))


_DECODE: Final[dict[str, Callable[[Any, int], commands.Command]]] = {
    "create": _create,
    "append": _append,
    "commit": _commit,
    "fork": _fork,
    "truncate": _truncate,
    "free": _free,
    "swap": _swap,
    "pin": _pin,
    "unpin": _unpin,
    "reserve": _reserve,
    "release": _release,
}


def _command(item: pb.BatchItem, now: int) -> commands.Command | Refused:
    """The item's command, or why it is none."""
    kind = item.WhichOneof("command")
    if kind is None:
        return InvalidArgument("ITEM_EMPTY", "an item without a command, or with one of a newer contract")
    try:
        command = _DECODE[kind](getattr(item, kind), now)
        if not item.table_revision:
            return command
        return commands.Expecting(_named(command), u64(item.table_revision, "table_revision"), command)
    except InvalidArgument as refused:
        return refused


def _named(command: commands.Command) -> I64:
    """The sequences that a command names, in the order of its columns."""
    if isinstance(command, commands.Swap):
        return np.concatenate((command.out, command.back))
    return getattr(command, "sequences", np.zeros(0, np.int64))


# --- out -------------------------------------------------------------------------------------------------------------


def _result(result: Done | Refused) -> pb.BatchResult:
    if isinstance(result, Refused):
        return pb.BatchResult(error=_error(result))
    message = pb.BatchResult(
        sequences=as_u64(result.sequences),
        cached=as_u32(result.cached),
        slot_indptr=as_u32(result.slot_indptr),
        slots=as_u64(result.slots),
        pin=result.pin,
        pinned_tokens=result.pinned,
        reservation=result.reservation,
    )
    ops = result.ops
    if ops.kind.size:
        copies = ops.kind == OpKind.COPY
        message.copy_src, message.copy_dst = as_u32(ops.src[copies]), as_u32(ops.dst[copies])
        message.swapped_blocks = int(np.count_nonzero(ops.kind > OpKind.ZERO))
    return message


def _error(refused: Refused) -> pb.BatchError:
    """The same as of a whole call that is refused."""
    status = status_of(refused)
    return pb.BatchError(
        code=status.code,
        reason=refused.reason,
        message=status.message,
        metadata=numbers_of(refused),
        retry_delay=retry_delay(refused),
    )
