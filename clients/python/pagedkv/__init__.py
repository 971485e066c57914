"""The client of pagedkv, a paged KV-cache block manager for LLM inference.

    from pagedkv import Client

    with Client("127.0.0.1:50061") as client:
        for piece in client.generate("The capital of France is", max_tokens=32):
            print(piece.text, end="")

`AsyncClient` has the same calls for asyncio. Every failure is a `PagedKvError`.
"""

from pagedkv._access import Tls
from pagedkv._async import AsyncClient, AsyncStream
from pagedkv._batch import Batch, BatchReply, Item, ItemResult
from pagedkv._errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PagedKvError,
    ResourceExhausted,
    Unavailable,
)
from pagedkv._sync import Client, Stream
from pagedkv._types import (
    Activity,
    Admission,
    Audit,
    BlockStates,
    BlockTable,
    CacheReset,
    Compacted,
    Completion,
    FinishReason,
    Header,
    Layout,
    Listing,
    Match,
    Model,
    Piece,
    Pool,
    QuotaSet,
    Resized,
    Sample,
    SamplingOptions,
    SequenceDetails,
    SequenceInfo,
    SequenceState,
    Sharing,
    Slots,
    TenantUsage,
    TokenLogprob,
    Usage,
)

__all__ = [
    "Aborted",
    "Activity",
    "Admission",
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Audit",
    "Batch",
    "BatchReply",
    "BlockStates",
    "BlockTable",
    "CacheReset",
    "Cancelled",
    "Client",
    "Compacted",
    "Completion",
    "DeadlineExceeded",
    "FailedPrecondition",
    "FinishReason",
    "Header",
    "Internal",
    "InvalidArgument",
    "Item",
    "ItemResult",
    "Layout",
    "Listing",
    "Match",
    "Model",
    "NotFound",
    "PagedKvError",
    "Piece",
    "Pool",
    "QuotaSet",
    "Resized",
    "ResourceExhausted",
    "Sample",
    "SamplingOptions",
    "SequenceDetails",
    "SequenceInfo",
    "SequenceState",
    "Sharing",
    "Slots",
    "Stream",
    "TenantUsage",
    "Tls",
    "TokenLogprob",
    "Unavailable",
    "Usage",
]
