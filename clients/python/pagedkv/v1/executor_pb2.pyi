from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadKvRequest(_message.Message):
    __slots__ = ("service_id", "epoch", "after_step", "layer", "slots")
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    epoch: int
    after_step: int
    layer: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, service_id: _Optional[str] = ..., epoch: _Optional[int] = ..., after_step: _Optional[int] = ..., layer: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadKvResponse(_message.Message):
    __slots__ = ("first", "count", "dtype", "num_kv_heads", "key_head_dim", "value_head_dim", "k", "v")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    dtype: str
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    k: bytes
    v: bytes
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., dtype: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., key_head_dim: _Optional[int] = ..., value_head_dim: _Optional[int] = ..., k: _Optional[bytes] = ..., v: _Optional[bytes] = ...) -> None: ...
