"""BlockManagerService: the page table from outside. The contract is protos/pagedkv/v1/block_manager.proto."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc.aio
import numpy as np

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import ExecutorUnavailable, InvalidArgument, NotFound, SequenceNotFound
from block_manager_svc.core.step import I64
from block_manager_svc.identity import Callers, Tenant
from block_manager_svc.manager import Manager, Quota
from block_manager_svc.rpc.authentication import caller
from block_manager_svc.rpc.step_batch import StepBatch
from block_manager_svc.scheduling.request import SequenceState
from pagedkv.v1 import block_manager_pb2 as pb
from pagedkv.v1 import block_manager_pb2_grpc

MAX_SEQUENCES = 4096
MAX_MOVES = 4096  # of one compaction
_MOVES = 256
_LARGEST = 2**63 - 1  # the wire's u64 holds more than the core's i64

_STATES = {
    SequenceState.WAITING: pb.SEQUENCE_STATE_WAITING,
    SequenceState.RUNNING: pb.SEQUENCE_STATE_RUNNING,
    SequenceState.ENGINE: pb.SEQUENCE_STATE_ENGINE,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class BlockManagerServicer(block_manager_pb2_grpc.BlockManagerServiceServicer):
    """Each reply is made in one go in the event loop that also steps, so it is of one moment between two steps."""

    def __init__(self, manager: Manager, callers: Callers) -> None:
        self._manager = manager
        self._callers = callers
        self._step_batch = StepBatch(manager)

    async def GetPool(self, request: pb.GetPoolRequest, context: _Context) -> pb.GetPoolResponse:  # noqa: N802
        table = self._table()
        sharing, counters = table.sharing(), table.counters
        return pb.GetPoolResponse(
            header=self._header(table),
            block_size=table.block_size,
            block_bytes=self._manager.block_bytes,
            device=pb.BlockStates(**asdict(table.states())),
            host=pb.BlockStates(**asdict(table.host_states())),
            sharing=pb.Sharing(
                table_entries=sharing.table_entries,
                referenced_blocks=sharing.referenced_blocks,
                shared_blocks=sharing.shared_blocks,
                peak_table_entries=counters.peak_table_entries,
                peak_referenced_blocks=counters.peak_referenced_blocks,
                peak_shared_blocks=counters.peak_shared_blocks,
            ),
            activity=pb.Activity(**asdict(self._manager.activity())),
            limit=table.limit,
            watermark=table.watermark,
            layout=pb.Layout(**asdict(table.layout())),
            tenants=[_usage(table, tenant) for tenant in self._visible_tenants()],
        )

    async def ListSequences(  # noqa: N802
        self, request: pb.ListSequencesRequest, context: _Context
    ) -> pb.ListSequencesResponse:
        table = self._table()
        sequences = _visible(table)
        csr = table.tables(sequences)
        # Shared entries before each entry, so that a table's are the difference of two (a table may be empty).
        shared = np.concatenate(([0], np.cumsum(csr.refcount > 1)))
        states = self._manager.sequence_states()
        return pb.ListSequencesResponse(
            header=self._header(table),
            sequence=sequences.tolist(),
            tokens=table.length(sequences).tolist(),
            computed=table.computed(sequences).tolist(),
            blocks=np.diff(csr.indptr).tolist(),
            shared_blocks=np.diff(shared[csr.indptr]).tolist(),
            state=[_STATES[states.get(sequence, SequenceState.ENGINE)] for sequence in sequences.tolist()],
        )

    async def GetBlockTables(  # noqa: N802
        self, request: pb.GetBlockTablesRequest, context: _Context
    ) -> pb.GetBlockTablesResponse:
        table = self._table()
        asked = len(request.sequence)
        if asked > MAX_SEQUENCES:
            raise InvalidArgument(
                "TOO_MANY_ITEMS",
                f"{asked} sequences are asked for, at most {MAX_SEQUENCES} go at once: ask in parts",
                asked=asked,
                limit=MAX_SEQUENCES,
            )
        if asked and (largest := max(request.sequence)) > _LARGEST:
            raise SequenceNotFound(largest)
        if asked:
            sequences = np.array(request.sequence, np.int64)
            _check_visible(table, sequences)
        else:
            sequences = _visible(table)[:MAX_SEQUENCES]
        csr = table.tables(sequences)
        return pb.GetBlockTablesResponse(
            header=self._header(table),
            block_size=table.block_size,
            sequence=sequences.tolist(),
            indptr=csr.indptr.tolist(),
            indices=csr.indices.tolist(),
            last_page_len=csr.last_page_len.tolist(),
            refcount=csr.refcount.tolist(),
            table_revision=csr.changed.tolist(),
        )

    async def Audit(self, request: pb.AuditRequest, context: _Context) -> pb.AuditResponse:  # noqa: N802
        table = self._table()
        return pb.AuditResponse(header=self._header(table), violations=self._manager.audit())

    async def ResetCache(  # noqa: N802
        self, request: pb.ResetCacheRequest, context: _Context
    ) -> pb.ResetCacheResponse:
        table = self._table()
        freed = self._manager.reset_cache()
        return pb.ResetCacheResponse(header=self._header(table), freed_blocks=freed)

    async def Resize(self, request: pb.ResizeRequest, context: _Context) -> pb.ResizeResponse:  # noqa: N802
        table = self._table()
        evicted = self._manager.resize(request.limit)
        return pb.ResizeResponse(header=self._header(table), evicted_blocks=evicted)

    async def SetQuota(self, request: pb.SetQuotaRequest, context: _Context) -> pb.SetQuotaResponse:  # noqa: N802
        table = self._table()
        tenant = next((tenant for tenant in self._callers.tenants() if tenant.name == request.tenant), None)
        if tenant is None:
            raise NotFound("TENANT_UNKNOWN", "no token stands for this tenant", tenant=request.tenant)
        quota = Quota(
            floor=request.floor,
            quota=request.quota if request.HasField("quota") else None,
            host_floor=request.host_floor,
            host_quota=request.host_quota if request.HasField("host_quota") else None,
        )
        self._manager.set_quota(tenant, quota)
        return pb.SetQuotaResponse(header=self._header(table), usage=_usage(table, tenant))

    async def Compact(self, request: pb.CompactRequest, context: _Context) -> pb.CompactResponse:  # noqa: N802
        if (asked := request.max_moves) > MAX_MOVES:
            raise InvalidArgument("COUNT_OUT_OF_RANGE", f"{asked} moves: at most {MAX_MOVES} at once", count=asked)
        moved, step_id = self._manager.compact(asked or _MOVES)
        return pb.CompactResponse(
            header=self._header(self._table()),
            moved_blocks=moved.ops.kind.size,
            changed_tables=moved.changed.size,
            step_id=step_id,
        )

    async def StepBatch(  # noqa: N802
        self, request: pb.StepBatchRequest, context: _Context
    ) -> pb.StepBatchResponse:
        return await self._step_batch(request, context)

    def _visible_tenants(self) -> list[Tenant]:
        who = caller()
        return self._callers.tenants() if who.is_operator else [who.tenant]

    def _table(self) -> PageTable:
        table = self._manager.page_table
        if table is None:
            raise ExecutorUnavailable("no executor has attached yet, so there is no pool: start one, or try again")
        return table

    def _header(self, table: PageTable) -> pb.ReplyHeader:
        return pb.ReplyHeader(service_id=self._manager.service_id, epoch=self._manager.epoch, revision=table.revision)


def _usage(table: PageTable, tenant: Tenant) -> pb.TenantUsage:
    return pb.TenantUsage(tenant=tenant.name, **asdict(table.usage(tenant.account)))


def _visible(table: PageTable) -> I64:
    """Sequences that the caller may know of, in order of creation: an operator all, others their tenant's."""
    sequences = table.sequences()
    who = caller()
    return sequences if who.is_operator else sequences[np.abs(table.owners(sequences)) == who.tenant.number]


def _check_visible(table: PageTable, sequences: I64) -> None:
    """SequenceNotFound for the first that is not alive, or another tenant's: nothing tells the two apart."""
    who = caller()
    visible = table.owned(sequences, who.tenant.calls) | table.owned(sequences, who.tenant.engines)
    if not who.is_operator and not visible.all():
        raise SequenceNotFound(int(sequences[~visible][0]))
