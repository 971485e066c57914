from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OP_KIND_UNSPECIFIED: _ClassVar[OpKind]
    OP_KIND_COPY: _ClassVar[OpKind]
    OP_KIND_ZERO: _ClassVar[OpKind]
    OP_KIND_SWAP_OUT: _ClassVar[OpKind]
    OP_KIND_SWAP_IN: _ClassVar[OpKind]
OP_KIND_UNSPECIFIED: OpKind
OP_KIND_COPY: OpKind
OP_KIND_ZERO: OpKind
OP_KIND_SWAP_OUT: OpKind
OP_KIND_SWAP_IN: OpKind

class AttachRequest(_message.Message):
    __slots__ = ("service_id", "epoch", "boot_id", "hello", "attachment", "result", "heartbeat", "refusal")
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    epoch: int
    boot_id: str
    hello: Hello
    attachment: AttachmentPiece
    result: StepResult
    heartbeat: Heartbeat
    refusal: Refusal
    def __init__(self, service_id: _Optional[str] = ..., epoch: _Optional[int] = ..., boot_id: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., attachment: _Optional[_Union[AttachmentPiece, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("service_id", "epoch", "boot_id", "welcome", "step", "heartbeat")
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    epoch: int
    boot_id: str
    welcome: Welcome
    step: Step
    heartbeat: Heartbeat
    def __init__(self, service_id: _Optional[str] = ..., epoch: _Optional[int] = ..., boot_id: _Optional[str] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("rank", "world_size", "geometry", "accepted", "completed", "digest", "max_rows", "max_batch_tokens", "max_blocks_per_row", "model", "attachments", "executor_address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    geometry: Geometry
    accepted: int
    completed: int
    digest: bytes
    max_rows: int
    max_batch_tokens: int
    max_blocks_per_row: int
    model: ModelDescription
    attachments: _containers.RepeatedCompositeFieldContainer[Attachment]
    executor_address: str
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., accepted: _Optional[int] = ..., completed: _Optional[int] = ..., digest: _Optional[bytes] = ..., max_rows: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_blocks_per_row: _Optional[int] = ..., model: _Optional[_Union[ModelDescription, _Mapping]] = ..., attachments: _Optional[_Iterable[_Union[Attachment, _Mapping]]] = ..., executor_address: _Optional[str] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("num_blocks", "num_host_blocks", "block_size", "num_layers", "num_kv_heads", "key_head_dim", "value_head_dim", "dtype", "block_bytes", "layout_hash")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_host_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: str
    block_bytes: int
    layout_hash: bytes
    def __init__(self, num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., key_head_dim: _Optional[int] = ..., value_head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_bytes: _Optional[int] = ..., layout_hash: _Optional[bytes] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("id", "vocab_size", "max_context", "eos_token_ids", "fingerprint")
    ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    id: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: bytes
    def __init__(self, id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class Attachment(_message.Message):
    __slots__ = ("name", "size", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class AttachmentPiece(_message.Message):
    __slots__ = ("name", "offset", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("reset", "results_durable_through", "heartbeat_interval_ms", "silence_limit_ms")
    RESET_FIELD_NUMBER: _ClassVar[int]
    RESULTS_DURABLE_THROUGH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    results_durable_through: int
    heartbeat_interval_ms: int
    silence_limit_ms: int
    def __init__(self, reset: _Optional[bool] = ..., results_durable_through: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., silence_limit_ms: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "digest", "results_durable_through", "body")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESULTS_DURABLE_THROUGH_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    digest: bytes
    results_durable_through: int
    body: bytes
    def __init__(self, step_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., results_durable_through: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class StepBody(_message.Message):
    __slots__ = ("step_id", "op_kind", "op_src", "op_dst", "delta_row", "delta_first", "delta_count", "delta_blocks", "row", "start", "count", "token_ids", "sample_from", "sample_index", "seed", "temperature", "top_p", "top_k", "logprobs")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    OP_KIND_FIELD_NUMBER: _ClassVar[int]
    OP_SRC_FIELD_NUMBER: _ClassVar[int]
    OP_DST_FIELD_NUMBER: _ClassVar[int]
    DELTA_ROW_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIRST_FIELD_NUMBER: _ClassVar[int]
    DELTA_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELTA_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FROM_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    op_kind: bytes
    op_src: bytes
    op_dst: bytes
    delta_row: bytes
    delta_first: bytes
    delta_count: bytes
    delta_blocks: bytes
    row: bytes
    start: bytes
    count: bytes
    token_ids: bytes
    sample_from: bytes
    sample_index: bytes
    seed: bytes
    temperature: bytes
    top_p: bytes
    top_k: bytes
    logprobs: bytes
    def __init__(self, step_id: _Optional[int] = ..., op_kind: _Optional[bytes] = ..., op_src: _Optional[bytes] = ..., op_dst: _Optional[bytes] = ..., delta_row: _Optional[bytes] = ..., delta_first: _Optional[bytes] = ..., delta_count: _Optional[bytes] = ..., delta_blocks: _Optional[bytes] = ..., row: _Optional[bytes] = ..., start: _Optional[bytes] = ..., count: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., sample_from: _Optional[bytes] = ..., sample_index: _Optional[bytes] = ..., seed: _Optional[bytes] = ..., temperature: _Optional[bytes] = ..., top_p: _Optional[bytes] = ..., top_k: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "rank", "token_ids", "logprob", "top_token_ids", "top_logprobs", "ops_us", "compute_us")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OPS_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    rank: int
    token_ids: bytes
    logprob: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    ops_us: int
    compute_us: int
    def __init__(self, step_id: _Optional[int] = ..., rank: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprob: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., ops_us: _Optional[int] = ..., compute_us: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("accepted", "completed", "results_durable_through")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_DURABLE_THROUGH_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    completed: int
    results_durable_through: int
    def __init__(self, accepted: _Optional[int] = ..., completed: _Optional[int] = ..., results_durable_through: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("step_id", "reason", "message")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    reason: str
    message: str
    def __init__(self, step_id: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
