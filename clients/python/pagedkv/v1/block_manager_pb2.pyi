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
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_WAITING: SequenceState
SEQUENCE_STATE_RUNNING: SequenceState

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
    __slots__ = ("header", "block_size", "block_bytes", "device", "host", "sharing", "activity")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    block_size: int
    block_bytes: int
    device: BlockStates
    host: BlockStates
    sharing: Sharing
    activity: Activity
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., device: _Optional[_Union[BlockStates, _Mapping]] = ..., host: _Optional[_Union[BlockStates, _Mapping]] = ..., sharing: _Optional[_Union[Sharing, _Mapping]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("steps", "prompt_tokens", "cached_tokens", "computed_tokens", "sampled_tokens", "copies_on_write", "evicted_blocks", "preemptions", "step_us", "executor_us", "running", "waiting", "steps_in_flight")
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
    def __init__(self, steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., copies_on_write: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., preemptions: _Optional[int] = ..., step_us: _Optional[int] = ..., executor_us: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., steps_in_flight: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[_Iterable[int]] = ...) -> None: ...

class GetBlockTablesResponse(_message.Message):
    __slots__ = ("header", "block_size", "sequence", "indptr", "indices", "last_page_len", "refcount")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INDPTR_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    LAST_PAGE_LEN_FIELD_NUMBER: _ClassVar[int]
    REFCOUNT_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    block_size: int
    sequence: _containers.RepeatedScalarFieldContainer[int]
    indptr: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    last_page_len: _containers.RepeatedScalarFieldContainer[int]
    refcount: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., block_size: _Optional[int] = ..., sequence: _Optional[_Iterable[int]] = ..., indptr: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., last_page_len: _Optional[_Iterable[int]] = ..., refcount: _Optional[_Iterable[int]] = ...) -> None: ...

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
