from __future__ import annotations

import hashlib

import numpy as np

from gpu_executor.engine import Timings
from gpu_executor.link.follower import Follower
from gpu_executor.link.step_log import NO_DIGEST
from gpu_executor.step import Geometry, Outputs
from gpu_executor.validate import Limits
from pagedkv.v1 import executor_link_pb2 as pb

GEOMETRY = Geometry(
    num_blocks=8,
    num_host_blocks=0,
    block_size=4,
    num_layers=1,
    num_kv_heads=1,
    key_head_dim=8,
    value_head_dim=8,
    dtype="float32",
)
LIMITS = Limits(max_rows=2, max_batch_tokens=16, max_blocks_per_row=4, vocab_size=32, max_context=16)
INTEGERS, REALS = np.zeros(0, np.int32), np.zeros(0, np.float32)


def take_first_step(follower: Follower) -> None:
    body = pb.StepBody(step_id=1).SerializeToString()
    follower.take_step(pb.Step(step_id=1, body=body, digest=hashlib.sha256(NO_DIGEST + body).digest()))


def complete(follower: Follower, epoch: int, compute_us: int) -> None:
    follower.complete(epoch, 1, Outputs(INTEGERS, REALS, INTEGERS, REALS), Timings(0, compute_us))


def test_a_result_of_an_epoch_that_is_over_is_neither_kept_nor_sent() -> None:
    follower = Follower(GEOMETRY, LIMITS, boot_id="boot")
    sent: list[pb.AttachRequest] = []
    follower.welcome("service", 1, pb.Welcome(reset=True), sent.append)
    take_first_step(follower)
    follower.welcome("service", 2, pb.Welcome(reset=True), sent.append)
    take_first_step(follower)

    complete(follower, epoch=1, compute_us=11)
    assert sent == []
    assert follower.position.completed == 0
    follower.welcome("service", 2, pb.Welcome(), sent.append)
    assert sent == []

    complete(follower, epoch=2, compute_us=22)
    [message] = sent
    assert (message.epoch, message.result.compute_us) == (2, 22)
    assert follower.position.completed == 1
