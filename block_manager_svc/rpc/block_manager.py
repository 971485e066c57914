"""BlockManagerService: the page table from outside. The contract is protos/pagedkv/v1/block_manager.proto."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc.aio

from block_manager_svc.core import PageTable
from block_manager_svc.core.errors import ExecutorUnavailable, InvalidArgument, NotFound
from block_manager_svc.identity import Callers, Tenant
from block_manager_svc.manager import Manager, Quota
from block_manager_svc.rpc import reads
from block_manager_svc.rpc.authentication import caller
from block_manager_svc.rpc.columns import engine_namespace
from block_manager_svc.rpc.step_batch import StepBatch
from block_manager_svc.rpc.watch import WatchEvents
from block_manager_svc.scheduling.request import SequenceState
from pagedkv.v1 import block_manager_pb2 as pb
from pagedkv.v1 import block_manager_pb2_grpc

MAX_MOVES = 4096  # of one compaction
_MOVES = 256

_Context = grpc.aio.ServicerContext[Any, Any]


class BlockManagerServicer(block_manager_pb2_grpc.BlockManagerServiceServicer):
    """Each reply is made in one go in the event loop that also steps, so it is of one moment between two steps."""

    def __init__(self, manager: Manager, callers: Callers, write_timeout: float) -> None:
        self._manager = manager
        self._callers = callers
        self._step_batch = StepBatch(manager)
        self._watch_events = WatchEvents(manager, write_timeout)

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
        return reads.list_sequences(table, self._manager.sequence_states(), self._header(table))

    async def GetBlockTables(  # noqa: N802
        self, request: pb.GetBlockTablesRequest, context: _Context
    ) -> pb.GetBlockTablesResponse:
        table = self._table()
        return reads.block_tables(table, request, self._header(table))

    async def GetSequence(  # noqa: N802
        self, request: pb.GetSequenceRequest, context: _Context
    ) -> pb.GetSequenceResponse:
        table = self._table()
        state = self._manager.sequence_states().get(request.sequence, SequenceState.ENGINE)
        names = {tenant.number: tenant.name for tenant in self._callers.tenants()}
        return reads.sequence(table, request, state, names, self._header(table))

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchResponse:  # noqa: N802
        table = self._table()
        realm = caller().tenant.realm
        namespace = self._manager.namespace(realm) if request.generate else engine_namespace(request.adapter)
        return reads.match(table, request, namespace, self._header(table))

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: _Context) -> None:  # noqa: N802
        await self._watch_events(request, context)

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
