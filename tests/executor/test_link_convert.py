from __future__ import annotations

import hashlib

import numpy as np
import pytest

from gpu_executor.errors import StepInvalid
from gpu_executor.link.convert import PIECE_BYTES, attachment_pieces, attachments, result_message, step_from_body
from gpu_executor.step import Outputs
from pagedkv.v1 import executor_link_pb2 as pb


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def body(**columns: bytes) -> bytes:
    return pb.StepBody(step_id=7, **columns).SerializeToString()


def test_columns_arrive_as_they_were_packed() -> None:
    step = step_from_body(
        7,
        body(
            op_kind=bytes([1, 3]),
            op_src=i32(4, 5),
            op_dst=i32(6, 0),
            delta_row=i32(0, 2),
            delta_first=i32(0, 5),
            delta_count=i32(2, 1),
            delta_blocks=i32(8, 9, 10),
            row=i32(0),
            start=i32(3),
            count=i32(2),
            token_ids=i32(11, 12),
            sample_from=i32(0),
            sample_index=i32(1),
            seed=np.array([2**64 - 1], "<u8").tobytes(),
            temperature=np.array([0.5], "<f4").tobytes(),
            top_p=np.array([0.25], "<f4").tobytes(),
            top_k=i32(4),
            logprobs=i32(-1),
        ),
    )
    assert step.step_id == 7
    assert step.ops.kind.tolist() == [1, 3]
    assert step.ops.src.tolist() == [4, 5]
    assert step.ops.dst.tolist() == [6, 0]
    assert step.deltas.row.tolist() == [0, 2]
    assert step.deltas.blocks.tolist() == [8, 9, 10]
    assert step.batch.token_ids.tolist() == [11, 12]
    assert step.samples.seed.tolist() == [2**64 - 1]
    assert step.samples.temperature.tolist() == [0.5]
    assert step.samples.logprobs.tolist() == [-1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff", "BODY_MALFORMED"),
        (pb.StepBody(step_id=8).SerializeToString(), "STEP_ID_MISMATCH"),
        (body(row=b"\x00\x00\x00"), "COLUMN_LENGTH"),
        (body(sample_from=i32(0), seed=bytes(7)), "COLUMN_LENGTH"),
        (body(op_kind=bytes([1]), op_src=i32(1), op_dst=i32(1, 2)), "COLUMNS_UNEQUAL"),
        (body(row=i32(0), start=i32(0)), "COLUMNS_UNEQUAL"),
        (body(sample_from=i32(0)), "COLUMNS_UNEQUAL"),
        (body(delta_row=i32(0), delta_first=i32(0), delta_count=i32(2), delta_blocks=i32(1)), "DELTA_BLOCKS_MISMATCH"),
        (body(delta_blocks=i32(1)), "DELTA_BLOCKS_MISMATCH"),
        (body(row=i32(0), start=i32(0), count=i32(1), token_ids=i32(1, 2)), "TOKEN_IDS_MISMATCH"),
        # Sums are taken in 64 bits: they do not wrap around to what would fit.
        (body(row=i32(0, 1), start=i32(0, 0), count=i32(2**31 - 1, 2**31 - 1)), "TOKEN_IDS_MISMATCH"),
    ],
)
def test_malformed_bodies_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(StepInvalid) as error:
        step_from_body(7, data)
    assert error.value.reason == reason


def test_result_is_packed_little_endian() -> None:
    outputs = Outputs(
        np.array([5, 6], np.int32),
        np.array([-0.5], np.float32),
        np.array([5, 9], np.int32),
        np.array([-0.5, -2.0], np.float32),
    )
    message = result_message(3, 0, outputs, ops_us=1, compute_us=2)
    assert message.step_id == 3
    assert np.frombuffer(message.token_ids, "<i4").tolist() == [5, 6]
    assert np.frombuffer(message.logprob, "<f4").tolist() == [-0.5]
    assert np.frombuffer(message.top_token_ids, "<i4").tolist() == [5, 9]
    assert np.frombuffer(message.top_logprobs, "<f4").tolist() == [-0.5, -2.0]
    assert (message.ops_us, message.compute_us) == (1, 2)


def test_attachments_come_in_order_and_in_pieces_below_the_limit() -> None:
    files = {"tokenizer.json": bytes(range(256)) * 10_000, "chat_template.jinja": b"{{ x }}"}
    announced = attachments(files)
    assert [(a.name, a.size) for a in announced] == [("tokenizer.json", 2_560_000), ("chat_template.jinja", 7)]
    assert announced[0].sha256 == hashlib.sha256(files["tokenizer.json"]).digest()
    pieces = list(attachment_pieces(files))
    assert max(len(p.data) for p in pieces) <= PIECE_BYTES
    assert [p.name for p in pieces] == ["tokenizer.json"] * 3 + ["chat_template.jinja"]
    for name, data in files.items():
        joined = b""
        for piece in (p for p in pieces if p.name == name):
            assert piece.offset == len(joined)
            joined += piece.data
        assert joined == data
