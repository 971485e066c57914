"""StepBatch as a test writes it: plain lists in and out."""

from __future__ import annotations

from itertools import chain

import numpy as np

from pagedkv.v1 import block_manager_pb2 as pb


def u64(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def of_u64(column: bytes) -> list[int]:
    return np.frombuffer(column, "<u8").tolist()


def of_u32(column: bytes) -> list[int]:
    return np.frombuffer(column, "<u4").tolist()


def ref(item: int, position: int = 0) -> int:
    return 1 << 63 | item << 32 | position


def create(*prompts: list[int], lookahead: int = 0, adapter: str = "") -> pb.BatchItem:
    return pb.BatchItem(
        create=pb.CreateCommand(
            counts=u32(*map(len, prompts)),
            tokens=i32(*chain(*prompts)),
            lookahead=u32(*[lookahead] * len(prompts)) if lookahead else b"",
            adapter=adapter,
        )
    )


def append(sequences: list[int], *tokens: list[int], lookahead: int = 0) -> pb.BatchItem:
    return pb.BatchItem(
        append=pb.AppendCommand(
            sequences=u64(*sequences),
            counts=u32(*map(len, tokens)),
            tokens=i32(*chain(*tokens)),
            lookahead=u32(*[lookahead] * len(sequences)) if lookahead else b"",
        )
    )


def commit(sequence: int, upto: int) -> pb.BatchItem:
    return pb.BatchItem(commit=pb.CommitCommand(sequences=u64(sequence), upto=u32(upto)))


def fork(sequence: int, count: int = 1) -> pb.BatchItem:
    return pb.BatchItem(fork=pb.ForkCommand(sequences=u64(sequence), counts=u32(count)))


def truncate(sequence: int, length: int) -> pb.BatchItem:
    return pb.BatchItem(truncate=pb.TruncateCommand(sequences=u64(sequence), lengths=u32(length)))


def free(*sequences: int) -> pb.BatchItem:
    return pb.BatchItem(free=pb.FreeCommand(sequences=u64(*sequences)))


def pin(tokens: list[int], ttl_ms: int, adapter: str = "") -> pb.BatchItem:
    return pb.BatchItem(pin=pb.PinCommand(tokens=i32(*tokens), ttl_ms=ttl_ms, adapter=adapter))


def unpin(*pins: int) -> pb.BatchItem:
    return pb.BatchItem(unpin=pb.UnpinCommand(pins=u64(*pins)))


def batch(*items: pb.BatchItem, **fields: object) -> pb.StepBatchRequest:
    return pb.StepBatchRequest(items=items, **fields)


def reasons(reply: pb.StepBatchResponse) -> list[str]:
    """Of each item, "" where it has none."""
    return [result.error.reason for result in reply.results]
