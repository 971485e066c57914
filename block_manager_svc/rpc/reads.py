"""Reads of the page table for one caller: sequences, block tables, slots, what of a prompt is cached."""

from __future__ import annotations

from typing import Final

import numpy as np

from block_manager_svc.core import PageTable
from block_manager_svc.core.admission import Verdict
from block_manager_svc.core.arguments import check_length, count_column
from block_manager_svc.core.errors import InvalidArgument, PermissionDenied, SequenceNotFound
from block_manager_svc.core.extra_keys import ExtraKeys
from block_manager_svc.core.step import I64
from block_manager_svc.rpc.authentication import caller
from block_manager_svc.rpc.columns import as_u32, extra_keys, i32, u32
from block_manager_svc.scheduling.request import SequenceState
from pagedkv.v1 import block_manager_pb2 as pb

MAX_SEQUENCES: Final = 4096
MAX_PROMPTS: Final = 1024
MAX_SLOTS: Final = 1 << 20
MAX_TOKENS: Final = 1 << 18
_LARGEST: Final = 2**63 - 1  # the wire's u64 holds more than the core's i64

STATES: Final = {
    SequenceState.WAITING: pb.SEQUENCE_STATE_WAITING,
    SequenceState.RUNNING: pb.SEQUENCE_STATE_RUNNING,
    SequenceState.ENGINE: pb.SEQUENCE_STATE_ENGINE,
}
_ADMISSIONS: Final = {
    Verdict.OK: pb.ADMISSION_OK,
    Verdict.LATER: pb.ADMISSION_LATER,
    Verdict.NEVER: pb.ADMISSION_NEVER,
}


def visible(table: PageTable) -> I64:
    """Sequences that the caller may know of, in order of creation: an operator all, others their tenant's."""
    sequences = table.sequences()
    who = caller()
    return sequences if who.is_operator else sequences[np.abs(table.owners(sequences)) == who.tenant.number]


def list_sequences(
    table: PageTable, states: dict[int, SequenceState], header: pb.ReplyHeader
) -> pb.ListSequencesResponse:
    sequences = visible(table)
    csr = table.tables(sequences)
    # Shared entries before each entry, so that a table's are the difference of two (a table may be empty).
    shared = np.concatenate(([0], np.cumsum(csr.refcount > 1)))
    return pb.ListSequencesResponse(
        header=header,
        sequence=sequences.tolist(),
        tokens=table.length(sequences).tolist(),
        computed=table.computed(sequences).tolist(),
        blocks=np.diff(csr.indptr).tolist(),
        shared_blocks=np.diff(shared[csr.indptr]).tolist(),
        state=[STATES[states.get(sequence, SequenceState.ENGINE)] for sequence in sequences.tolist()],
    )


def block_tables(table: PageTable, m: pb.GetBlockTablesRequest, header: pb.ReplyHeader) -> pb.GetBlockTablesResponse:
    _check_count(len(m.sequence), MAX_SEQUENCES, "sequences")
    sequences = _named(table, m.sequence) if m.sequence else visible(table)[:MAX_SEQUENCES]
    if m.table_revision:
        table.check_revisions(sequences, np.array(m.table_revision, np.uint64).astype(np.int64))
    indptr = slots = np.empty(0, np.int64)
    if m.first or m.upto:
        indptr, slots = _slots(table, sequences, np.array(m.first, np.int64), np.array(m.upto, np.int64))
    csr = table.tables(sequences)
    return pb.GetBlockTablesResponse(
        header=header,
        block_size=table.block_size,
        sequence=sequences.tolist(),
        indptr=csr.indptr.tolist(),
        indices=csr.indices.tolist(),
        last_page_len=csr.last_page_len.tolist(),
        refcount=csr.refcount.tolist(),
        table_revision=csr.changed.tolist(),
        slot_indptr=indptr.tolist(),
        slots=slots.tolist(),
    )


def _slots(table: PageTable, sequences: I64, first: I64, upto: I64) -> tuple[I64, I64]:
    for name, values in (("first", first), ("upto", upto)):
        check_length(values, name, sequences.size)
    if (total := int((upto - first).clip(0).sum())) > MAX_SLOTS:
        raise InvalidArgument(
            "TOO_MANY_SLOTS", f"{total} slots, the limit is {MAX_SLOTS}: ask in parts", slots=total, limit=MAX_SLOTS
        )
    return table.slots(sequences, first, upto)


def sequence(
    table: PageTable, m: pb.GetSequenceRequest, state: SequenceState, tenants: dict[int, str], header: pb.ReplyHeader
) -> pb.GetSequenceResponse:
    """tenants: names by number."""
    ids = _named(table, [m.sequence])
    number = abs(int(table.owners(ids)[0]))
    tokens = b""
    if m.first or m.upto:
        tokens = _tokens(table, ids, m.first, m.upto, own=number == caller().tenant.number)
    facts = table.facts(m.sequence)
    return pb.GetSequenceResponse(
        header=header,
        state=STATES[state],
        tenant=tenants.get(number, ""),
        tokens=facts.tokens,
        computed=facts.computed,
        writable=facts.writable,
        blocks=facts.blocks,
        shared_blocks=facts.shared_blocks,
        host_blocks=facts.host_blocks,
        swapped_out=facts.swapped_out,
        table_revision=facts.table_revision,
        priority=facts.priority,
        token_ids=tokens,
    )


def _tokens(table: PageTable, ids: I64, first: int, upto: int, *, own: bool) -> bytes:
    if not own:
        raise PermissionDenied(
            "TOKENS_PRIVATE", "the tokens of another tenant's sequence: ask without positions", sequence=int(ids[0])
        )
    if upto - first > MAX_TOKENS:
        raise InvalidArgument(
            "TOO_MANY_TOKENS",
            f"{upto - first} tokens, the limit is {MAX_TOKENS}: ask in parts",
            tokens=upto - first,
            limit=MAX_TOKENS,
        )
    return table.token_range(ids, [first], [upto]).astype("<i4").tobytes()


def match(table: PageTable, m: pb.MatchRequest, namespace: bytes, header: pb.ReplyHeader) -> pb.MatchResponse:
    counts = u32(m.counts, "counts")
    _check_count(counts.size, MAX_PROMPTS, "prompts")
    counts = count_column(counts, "counts", counts.size)
    tokens = i32(m.tokens, "tokens")
    check_length(tokens, "tokens", int(counts.sum()), "that the counts add up to")
    lookahead = u32(m.lookahead, "lookahead") if m.lookahead else np.zeros_like(counts)
    lookahead = count_column(lookahead, "lookahead", counts.size)
    keys, tenant, end = extra_keys(m), caller().tenant.account, counts.cumsum().tolist()
    judged = [
        table.admission(
            tokens[e - n : e],
            ahead,
            namespace,
            tenant=tenant,
            extra=_of(keys, i),
            window=m.window,
            sinks=m.sinks,
        )
        for i, (e, n, ahead) in enumerate(zip(end, counts.tolist(), lookahead.tolist(), strict=True))
    ]
    return pb.MatchResponse(
        header=header,
        cached=as_u32(np.array([each.cached for each in judged], np.int64)),
        admission=[_ADMISSIONS[each.verdict] for each in judged],
        shortfall=as_u32(np.array([each.shortfall for each in judged], np.int64)),
    )


def _of(keys: ExtraKeys | None, place: int) -> ExtraKeys | None:
    """Those of one place, as of a single sequence."""
    if keys is None:
        return None
    mine = (keys.of == place).nonzero()[0]
    return ExtraKeys(keys.of[mine] * 0, keys.positions[mine], [keys.keys[i] for i in mine.tolist()])


def _check_count(asked: int, limit: int, what: str) -> None:
    if asked > limit:
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"{asked} {what} are asked for, at most {limit} go at once: ask in parts",
            asked=asked,
            limit=limit,
        )


def _named(table: PageTable, ids: object) -> I64:
    """SequenceNotFound for the first that is not alive, or another tenant's: nothing tells the two apart."""
    wire = np.array(ids, np.uint64)
    if (largest := int(wire.max())) > _LARGEST:
        raise SequenceNotFound(largest)
    sequences = wire.astype(np.int64)
    who = caller()
    seen = table.owned(sequences, who.tenant.calls) | table.owned(sequences, who.tenant.engines)
    if not who.is_operator and not seen.all():
        raise SequenceNotFound(int(sequences[~seen][0]))
    return sequences
