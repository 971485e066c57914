import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATE_UNSPECIFIED: _ClassVar[SequenceState]
    SEQUENCE_STATE_WAITING: _ClassVar[SequenceState]
    SEQUENCE_STATE_RUNNING: _ClassVar[SequenceState]
    SEQUENCE_STATE_ENGINE: _ClassVar[SequenceState]

class Admission(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMISSION_UNSPECIFIED: _ClassVar[Admission]
    ADMISSION_OK: _ClassVar[Admission]
    ADMISSION_LATER: _ClassVar[Admission]
    ADMISSION_NEVER: _ClassVar[Admission]

class WatchPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WATCH_PHASE_UNSPECIFIED: _ClassVar[WatchPhase]
    WATCH_PHASE_SNAPSHOT: _ClassVar[WatchPhase]
    WATCH_PHASE_SNAPSHOT_END: _ClassVar[WatchPhase]
    WATCH_PHASE_CHANGES: _ClassVar[WatchPhase]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_BLOCK_STORED: _ClassVar[EventKind]
    EVENT_KIND_BLOCK_MOVED: _ClassVar[EventKind]
    EVENT_KIND_BLOCK_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_CACHE_RESET: _ClassVar[EventKind]
    EVENT_KIND_SEQUENCE_CREATED: _ClassVar[EventKind]
    EVENT_KIND_SEQUENCE_ENDED: _ClassVar[EventKind]
    EVENT_KIND_TABLE_CHANGED: _ClassVar[EventKind]
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_WAITING: SequenceState
SEQUENCE_STATE_RUNNING: SequenceState
SEQUENCE_STATE_ENGINE: SequenceState
ADMISSION_UNSPECIFIED: Admission
ADMISSION_OK: Admission
ADMISSION_LATER: Admission
ADMISSION_NEVER: Admission
WATCH_PHASE_UNSPECIFIED: WatchPhase
WATCH_PHASE_SNAPSHOT: WatchPhase
WATCH_PHASE_SNAPSHOT_END: WatchPhase
WATCH_PHASE_CHANGES: WatchPhase
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_BLOCK_STORED: EventKind
EVENT_KIND_BLOCK_MOVED: EventKind
EVENT_KIND_BLOCK_REMOVED: EventKind
EVENT_KIND_CACHE_RESET: EventKind
EVENT_KIND_SEQUENCE_CREATED: EventKind
EVENT_KIND_SEQUENCE_ENDED: EventKind
EVENT_KIND_TABLE_CHANGED: EventKind

class ReplyHeader(_message.Message):
    __slots__ = ("service_id", "epoch", "revision")
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    epoch: int
    revision: int
    def __init__(self, service_id: _Optional[str] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("header", "block_size", "block_bytes", "device", "host", "sharing", "activity", "limit", "watermark", "layout", "tenants")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    block_size: int
    block_bytes: int
    device: BlockStates
    host: BlockStates
    sharing: Sharing
    activity: Activity
    limit: int
    watermark: int
    layout: Layout
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., device: _Optional[_Union[BlockStates, _Mapping]] = ..., host: _Optional[_Union[BlockStates, _Mapping]] = ..., sharing: _Optional[_Union[Sharing, _Mapping]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ..., limit: _Optional[int] = ..., watermark: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "charged", "cached", "reserved", "host", "floor", "quota", "host_floor", "host_quota")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CHARGED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    HOST_FLOOR_FIELD_NUMBER: _ClassVar[int]
    HOST_QUOTA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    charged: int
    cached: int
    reserved: int
    host: int
    floor: int
    quota: int
    host_floor: int
    host_quota: int
    def __init__(self, tenant: _Optional[str] = ..., charged: _Optional[int] = ..., cached: _Optional[int] = ..., reserved: _Optional[int] = ..., host: _Optional[int] = ..., floor: _Optional[int] = ..., quota: _Optional[int] = ..., host_floor: _Optional[int] = ..., host_quota: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("free_runs", "largest_free_run", "highest_used_block")
    FREE_RUNS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FREE_RUN_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_USED_BLOCK_FIELD_NUMBER: _ClassVar[int]
    free_runs: int
    largest_free_run: int
    highest_used_block: int
    def __init__(self, free_runs: _Optional[int] = ..., largest_free_run: _Optional[int] = ..., highest_used_block: _Optional[int] = ...) -> None: ...

class BlockStates(_message.Message):
    __slots__ = ("null", "free", "reserved", "active", "sealed", "cached", "quarantined")
    NULL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    null: int
    free: int
    reserved: int
    active: int
    sealed: int
    cached: int
    quarantined: int
    def __init__(self, null: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., active: _Optional[int] = ..., sealed: _Optional[int] = ..., cached: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class Sharing(_message.Message):
    __slots__ = ("table_entries", "referenced_blocks", "shared_blocks", "peak_table_entries", "peak_referenced_blocks", "peak_shared_blocks")
    TABLE_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEAK_TABLE_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PEAK_REFERENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEAK_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    table_entries: int
    referenced_blocks: int
    shared_blocks: int
    peak_table_entries: int
    peak_referenced_blocks: int
    peak_shared_blocks: int
    def __init__(self, table_entries: _Optional[int] = ..., referenced_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., peak_table_entries: _Optional[int] = ..., peak_referenced_blocks: _Optional[int] = ..., peak_shared_blocks: _Optional[int] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("steps", "prompt_tokens", "cached_tokens", "computed_tokens", "sampled_tokens", "copies_on_write", "evicted_blocks", "preemptions", "step_us", "executor_us", "running", "waiting", "steps_in_flight", "swapped_out_blocks", "swapped_in_blocks")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIES_ON_WRITE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_US_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    sampled_tokens: int
    copies_on_write: int
    evicted_blocks: int
    preemptions: int
    step_us: int
    executor_us: int
    running: int
    waiting: int
    steps_in_flight: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    def __init__(self, steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., copies_on_write: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., preemptions: _Optional[int] = ..., step_us: _Optional[int] = ..., executor_us: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., swapped_out_blocks: _Optional[int] = ..., swapped_in_blocks: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("header", "sequence", "tokens", "computed", "blocks", "shared_blocks", "state")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    sequence: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    computed: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    shared_blocks: _containers.RepeatedScalarFieldContainer[int]
    state: _containers.RepeatedScalarFieldContainer[SequenceState]
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., sequence: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., computed: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ..., shared_blocks: _Optional[_Iterable[int]] = ..., state: _Optional[_Iterable[_Union[SequenceState, str]]] = ...) -> None: ...

class GetBlockTablesRequest(_message.Message):
    __slots__ = ("sequence", "first", "upto", "table_revision")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    TABLE_REVISION_FIELD_NUMBER: _ClassVar[int]
    sequence: _containers.RepeatedScalarFieldContainer[int]
    first: _containers.RepeatedScalarFieldContainer[int]
    upto: _containers.RepeatedScalarFieldContainer[int]
    table_revision: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[_Iterable[int]] = ..., first: _Optional[_Iterable[int]] = ..., upto: _Optional[_Iterable[int]] = ..., table_revision: _Optional[_Iterable[int]] = ...) -> None: ...

class GetBlockTablesResponse(_message.Message):
    __slots__ = ("header", "block_size", "sequence", "indptr", "indices", "last_page_len", "refcount", "table_revision", "slot_indptr", "slots")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INDPTR_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    LAST_PAGE_LEN_FIELD_NUMBER: _ClassVar[int]
    REFCOUNT_FIELD_NUMBER: _ClassVar[int]
    TABLE_REVISION_FIELD_NUMBER: _ClassVar[int]
    SLOT_INDPTR_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    block_size: int
    sequence: _containers.RepeatedScalarFieldContainer[int]
    indptr: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    last_page_len: _containers.RepeatedScalarFieldContainer[int]
    refcount: _containers.RepeatedScalarFieldContainer[int]
    table_revision: _containers.RepeatedScalarFieldContainer[int]
    slot_indptr: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., block_size: _Optional[int] = ..., sequence: _Optional[_Iterable[int]] = ..., indptr: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., last_page_len: _Optional[_Iterable[int]] = ..., refcount: _Optional[_Iterable[int]] = ..., table_revision: _Optional[_Iterable[int]] = ..., slot_indptr: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class GetSequenceRequest(_message.Message):
    __slots__ = ("sequence", "first", "upto")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    first: int
    upto: int
    def __init__(self, sequence: _Optional[int] = ..., first: _Optional[int] = ..., upto: _Optional[int] = ...) -> None: ...

class GetSequenceResponse(_message.Message):
    __slots__ = ("header", "state", "tenant", "tokens", "computed", "writable", "blocks", "shared_blocks", "host_blocks", "swapped_out", "table_revision", "priority", "token_ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    TABLE_REVISION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    state: SequenceState
    tenant: str
    tokens: int
    computed: int
    writable: int
    blocks: int
    shared_blocks: int
    host_blocks: int
    swapped_out: bool
    table_revision: int
    priority: int
    token_ids: bytes
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., state: _Optional[_Union[SequenceState, str]] = ..., tenant: _Optional[str] = ..., tokens: _Optional[int] = ..., computed: _Optional[int] = ..., writable: _Optional[int] = ..., blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., swapped_out: _Optional[bool] = ..., table_revision: _Optional[int] = ..., priority: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("counts", "tokens", "lookahead", "adapter", "extra_keys", "window", "sinks", "generate")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    counts: bytes
    tokens: bytes
    lookahead: bytes
    adapter: str
    extra_keys: ExtraKeys
    window: int
    sinks: int
    generate: bool
    def __init__(self, counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., lookahead: _Optional[bytes] = ..., adapter: _Optional[str] = ..., extra_keys: _Optional[_Union[ExtraKeys, _Mapping]] = ..., window: _Optional[int] = ..., sinks: _Optional[int] = ..., generate: _Optional[bool] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("header", "cached", "admission", "shortfall")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    SHORTFALL_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    cached: bytes
    admission: _containers.RepeatedScalarFieldContainer[Admission]
    shortfall: bytes
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., cached: _Optional[bytes] = ..., admission: _Optional[_Iterable[_Union[Admission, str]]] = ..., shortfall: _Optional[bytes] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("blocks", "sequences", "tokens")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    blocks: bool
    sequences: bool
    tokens: bool
    def __init__(self, blocks: _Optional[bool] = ..., sequences: _Optional[bool] = ..., tokens: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("header", "phase", "block_size", "kind", "hash", "parent", "place", "namespace", "namespaces", "tokens", "sequence", "table_revision")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_REVISION_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    phase: WatchPhase
    block_size: int
    kind: bytes
    hash: bytes
    parent: bytes
    place: bytes
    namespace: bytes
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    tokens: bytes
    sequence: bytes
    table_revision: bytes
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., phase: _Optional[_Union[WatchPhase, str]] = ..., block_size: _Optional[int] = ..., kind: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., place: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., namespaces: _Optional[_Iterable[bytes]] = ..., tokens: _Optional[bytes] = ..., sequence: _Optional[bytes] = ..., table_revision: _Optional[bytes] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("header", "freed_blocks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    freed_blocks: int
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., freed_blocks: _Optional[int] = ...) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ResizeResponse(_message.Message):
    __slots__ = ("header", "evicted_blocks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    evicted_blocks: int
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "floor", "quota", "host_floor", "host_quota")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    HOST_FLOOR_FIELD_NUMBER: _ClassVar[int]
    HOST_QUOTA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    floor: int
    quota: int
    host_floor: int
    host_quota: int
    def __init__(self, tenant: _Optional[str] = ..., floor: _Optional[int] = ..., quota: _Optional[int] = ..., host_floor: _Optional[int] = ..., host_quota: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ("header", "usage")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    usage: TenantUsage
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., usage: _Optional[_Union[TenantUsage, _Mapping]] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ("max_moves",)
    MAX_MOVES_FIELD_NUMBER: _ClassVar[int]
    max_moves: int
    def __init__(self, max_moves: _Optional[int] = ...) -> None: ...

class CompactResponse(_message.Message):
    __slots__ = ("header", "moved_blocks", "changed_tables", "step_id")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_TABLES_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    moved_blocks: int
    changed_tables: int
    step_id: int
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., moved_blocks: _Optional[int] = ..., changed_tables: _Optional[int] = ..., step_id: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("header", "violations")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., violations: _Optional[_Iterable[str]] = ...) -> None: ...

class StepBatchRequest(_message.Message):
    __slots__ = ("request_id", "atomic", "no_wait", "items")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATOMIC_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    atomic: bool
    no_wait: bool
    items: _containers.RepeatedCompositeFieldContainer[BatchItem]
    def __init__(self, request_id: _Optional[str] = ..., atomic: _Optional[bool] = ..., no_wait: _Optional[bool] = ..., items: _Optional[_Iterable[_Union[BatchItem, _Mapping]]] = ...) -> None: ...

class BatchItem(_message.Message):
    __slots__ = ("create", "append", "commit", "fork", "truncate", "free", "swap", "pin", "unpin", "reserve", "release", "table_revision")
    CREATE_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TABLE_REVISION_FIELD_NUMBER: _ClassVar[int]
    create: CreateCommand
    append: AppendCommand
    commit: CommitCommand
    fork: ForkCommand
    truncate: TruncateCommand
    free: FreeCommand
    swap: SwapCommand
    pin: PinCommand
    unpin: UnpinCommand
    reserve: ReserveCommand
    release: ReleaseCommand
    table_revision: bytes
    def __init__(self, create: _Optional[_Union[CreateCommand, _Mapping]] = ..., append: _Optional[_Union[AppendCommand, _Mapping]] = ..., commit: _Optional[_Union[CommitCommand, _Mapping]] = ..., fork: _Optional[_Union[ForkCommand, _Mapping]] = ..., truncate: _Optional[_Union[TruncateCommand, _Mapping]] = ..., free: _Optional[_Union[FreeCommand, _Mapping]] = ..., swap: _Optional[_Union[SwapCommand, _Mapping]] = ..., pin: _Optional[_Union[PinCommand, _Mapping]] = ..., unpin: _Optional[_Union[UnpinCommand, _Mapping]] = ..., reserve: _Optional[_Union[ReserveCommand, _Mapping]] = ..., release: _Optional[_Union[ReleaseCommand, _Mapping]] = ..., table_revision: _Optional[bytes] = ...) -> None: ...

class ExtraKeys(_message.Message):
    __slots__ = ("of", "positions", "keys")
    OF_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    of: bytes
    positions: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, of: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CreateCommand(_message.Message):
    __slots__ = ("counts", "tokens", "lookahead", "adapter", "reservation", "priority", "priority_ttl_ms", "extra_keys", "window", "sinks")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    counts: bytes
    tokens: bytes
    lookahead: bytes
    adapter: str
    reservation: int
    priority: int
    priority_ttl_ms: int
    extra_keys: ExtraKeys
    window: int
    sinks: int
    def __init__(self, counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., lookahead: _Optional[bytes] = ..., adapter: _Optional[str] = ..., reservation: _Optional[int] = ..., priority: _Optional[int] = ..., priority_ttl_ms: _Optional[int] = ..., extra_keys: _Optional[_Union[ExtraKeys, _Mapping]] = ..., window: _Optional[int] = ..., sinks: _Optional[int] = ...) -> None: ...

class AppendCommand(_message.Message):
    __slots__ = ("sequences", "counts", "tokens", "lookahead", "reservation", "extra_keys")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    sequences: bytes
    counts: bytes
    tokens: bytes
    lookahead: bytes
    reservation: int
    extra_keys: ExtraKeys
    def __init__(self, sequences: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., lookahead: _Optional[bytes] = ..., reservation: _Optional[int] = ..., extra_keys: _Optional[_Union[ExtraKeys, _Mapping]] = ...) -> None: ...

class CommitCommand(_message.Message):
    __slots__ = ("sequences", "upto")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    sequences: bytes
    upto: bytes
    def __init__(self, sequences: _Optional[bytes] = ..., upto: _Optional[bytes] = ...) -> None: ...

class ForkCommand(_message.Message):
    __slots__ = ("sequences", "counts")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    sequences: bytes
    counts: bytes
    def __init__(self, sequences: _Optional[bytes] = ..., counts: _Optional[bytes] = ...) -> None: ...

class TruncateCommand(_message.Message):
    __slots__ = ("sequences", "lengths")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    sequences: bytes
    lengths: bytes
    def __init__(self, sequences: _Optional[bytes] = ..., lengths: _Optional[bytes] = ...) -> None: ...

class FreeCommand(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: bytes
    def __init__(self, sequences: _Optional[bytes] = ...) -> None: ...

class SwapCommand(_message.Message):
    __slots__ = ("out", "back")
    OUT_FIELD_NUMBER: _ClassVar[int]
    BACK_FIELD_NUMBER: _ClassVar[int]
    out: bytes
    back: bytes
    def __init__(self, out: _Optional[bytes] = ..., back: _Optional[bytes] = ...) -> None: ...

class PinCommand(_message.Message):
    __slots__ = ("tokens", "adapter", "ttl_ms", "extra_keys")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    adapter: str
    ttl_ms: int
    extra_keys: ExtraKeys
    def __init__(self, tokens: _Optional[bytes] = ..., adapter: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., extra_keys: _Optional[_Union[ExtraKeys, _Mapping]] = ...) -> None: ...

class UnpinCommand(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: bytes
    def __init__(self, pins: _Optional[bytes] = ...) -> None: ...

class ReserveCommand(_message.Message):
    __slots__ = ("blocks", "ttl_ms")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    ttl_ms: int
    def __init__(self, blocks: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReleaseCommand(_message.Message):
    __slots__ = ("reservations",)
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    reservations: bytes
    def __init__(self, reservations: _Optional[bytes] = ...) -> None: ...

class BatchResult(_message.Message):
    __slots__ = ("error", "sequences", "cached", "slot_indptr", "slots", "copy_src", "copy_dst", "pin", "pinned_tokens", "swapped_blocks", "reservation")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SLOT_INDPTR_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COPY_SRC_FIELD_NUMBER: _ClassVar[int]
    COPY_DST_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    error: BatchError
    sequences: bytes
    cached: bytes
    slot_indptr: bytes
    slots: bytes
    copy_src: bytes
    copy_dst: bytes
    pin: int
    pinned_tokens: int
    swapped_blocks: int
    reservation: int
    def __init__(self, error: _Optional[_Union[BatchError, _Mapping]] = ..., sequences: _Optional[bytes] = ..., cached: _Optional[bytes] = ..., slot_indptr: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., copy_src: _Optional[bytes] = ..., copy_dst: _Optional[bytes] = ..., pin: _Optional[int] = ..., pinned_tokens: _Optional[int] = ..., swapped_blocks: _Optional[int] = ..., reservation: _Optional[int] = ...) -> None: ...

class BatchError(_message.Message):
    __slots__ = ("code", "reason", "message", "metadata", "retry_delay")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    retry_delay: _duration_pb2.Duration
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StepBatchResponse(_message.Message):
    __slots__ = ("header", "results", "table_sequence", "table_revision", "step_id", "replayed")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TABLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_REVISION_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    results: _containers.RepeatedCompositeFieldContainer[BatchResult]
    table_sequence: bytes
    table_revision: bytes
    step_id: int
    replayed: bool
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., results: _Optional[_Iterable[_Union[BatchResult, _Mapping]]] = ..., table_sequence: _Optional[bytes] = ..., table_revision: _Optional[bytes] = ..., step_id: _Optional[int] = ..., replayed: _Optional[bool] = ...) -> None: ...
