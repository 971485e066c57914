"""The executor against a service played by the test, over a real socket: order, exactly once, fencing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from support.link_service import SERVICE_ID, LinkService, Steps, Stream, greedy
from support.running_executor import BLOCK_SIZE, BLOCKS, Running, slots
from support.waiting import wait_for

from pagedkv.v1 import executor_link_pb2 as pb

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def service() -> Iterator[LinkService]:
    service = LinkService()
    yield service
    service.close()


@pytest.fixture
def running(service: LinkService, tiny_llama_dir: Path) -> Iterator[Running]:
    running = Running(tiny_llama_dir, service.address)
    yield running
    running.close()


@pytest.fixture
def stream(service: LinkService, running: Running) -> Stream:
    """Attached, epoch 1, pool reset."""
    stream = service.stream()
    stream.hello()
    stream.welcome(1, reset=True)
    return stream


def again(service: LinkService, *, durable: int = 0) -> Stream:
    """The next stream of the same boot, told to go on."""
    stream = service.stream()
    stream.hello()
    stream.welcome(1, reset=False, durable=durable)
    return stream


def decode(steps: Steps, position: int, token: int, *, row: int = 0) -> pb.Step:
    return steps.make(row=[row], start=[position], count=[1], token_ids=[token], **greedy(0))


def tokens(result: pb.StepResult) -> list[int]:
    return np.frombuffer(result.token_ids, "<i4").tolist()


def refusal(stream: Stream) -> pb.Refusal:
    """The executor's last word, after which it closes the stream."""
    refusal = stream.expect("refusal").refusal
    stream.expect_end()
    return refusal


def test_hello_says_what_the_executor_is(service: LinkService, running: Running) -> None:
    stream = service.stream()
    hello = stream.hello()
    first = stream.messages[0]
    assert (first.service_id, first.epoch) == ("", 0)
    assert len(first.boot_id) == 32
    assert (hello.rank, hello.world_size) == (0, 1)
    geometry = hello.geometry
    assert (geometry.num_blocks, geometry.num_host_blocks, geometry.block_size) == (BLOCKS, 4, BLOCK_SIZE)
    assert (geometry.num_layers, geometry.num_kv_heads) == (2, 2)
    assert (geometry.key_head_dim, geometry.value_head_dim, geometry.dtype) == (16, 16, "float64")
    assert geometry.block_bytes == 2 * BLOCK_SIZE * 2 * (16 + 16) * 8
    assert len(geometry.layout_hash) == 32
    assert (hello.accepted, hello.completed, hello.digest) == (0, 0, b"")
    assert (hello.max_rows, hello.max_batch_tokens, hello.max_blocks_per_row) == (8, 1024, 2048 // BLOCK_SIZE)
    assert hello.model.vocab_size == 320
    assert hello.model.max_context == 2048
    assert list(hello.model.eos_token_ids) == [1]
    assert hello.executor_address == running.executor.address


def test_attachments_arrive_whole(service: LinkService, running: Running, tiny_llama_dir: Path) -> None:
    stream = service.stream()
    stream.hello()
    assert stream.files["tokenizer.json"] == (tiny_llama_dir / "tokenizer.json").read_bytes()
    assert "chat_template.jinja" in stream.files
    assert "special_tokens.json" in stream.files


def test_steps_are_computed_in_order_and_named(stream: Stream, running: Running) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    first = stream.result()
    stream.send(step=decode(steps, len(PROMPT), tokens(first)[0]))
    second = stream.result()
    assert (first.step_id, second.step_id) == (1, 2)
    assert len(tokens(second)) == 1
    named = {(m.service_id, m.epoch, m.boot_id) for m in stream.messages if m.WhichOneof("message") == "result"}
    assert named == {(SERVICE_ID, 1, stream.boot_id)}
    read = running.read_k(slots(1, 2), after_step=2)
    assert np.isfinite(read[: len(PROMPT) + 1]).all()
    assert np.isnan(read[len(PROMPT) + 1 :]).all()


def test_steps_may_be_sent_ahead_of_their_results(stream: Stream) -> None:
    """Validation sees the tables as the steps before leave them, computed or not."""
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT, blocks=(1, 2)))
    for position in range(len(PROMPT), 8):
        stream.send(step=decode(steps, position, 3))
    stream.send(
        step=steps.make(delta_row=[0], delta_first=[2], delta_count=[1], delta_blocks=[3], **columns_of(8, [3]))
    )
    assert [stream.result().step_id for _ in range(4)] == [1, 2, 3, 4]


def columns_of(start: int, token_ids: list[int], row: int = 0) -> dict[str, list[float]]:
    return {"row": [row], "start": [start], "count": [len(token_ids)], "token_ids": list(token_ids), **greedy(0)}


def test_ops_run_before_the_batch_of_their_step(stream: Stream, running: Running) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    stream.result()
    # Copy-on-write of the partly filled block 2, for row 1 that shares block 1; then row 1 goes on alone.
    stream.send(
        step=steps.make(
            op_kind=[1],
            op_src=[2],
            op_dst=[9],
            delta_row=[1],
            delta_first=[0],
            delta_count=[2],
            delta_blocks=[1, 9],
            **columns_of(len(PROMPT), [3], row=1),
        )
    )
    stream.result()
    before, after = running.read_k(slots(2, 9)).reshape(2, BLOCK_SIZE, 2, 16)
    assert (before[:2] == after[:2]).all()
    assert np.isnan(before[2]).all()
    assert np.isfinite(after[2]).all()


def test_a_step_without_rows_has_an_empty_result(stream: Stream, running: Running) -> None:
    steps = Steps()
    stream.send(step=steps.make(op_kind=[2], op_src=[0], op_dst=[7]))
    result = stream.result()
    assert (result.step_id, result.token_ids) == (1, b"")
    assert (running.read_k(slots(7)) == 0).all()


def test_a_step_sent_again_is_not_applied_again_and_its_result_comes_again(stream: Stream, running: Running) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    first = stream.result()
    # Applied a second time, this copy would carry the zeros of step 3.
    stream.send(step=steps.make(op_kind=[1], op_src=[1], op_dst=[5]))
    copied = stream.result()
    stream.send(step=steps.make(op_kind=[2], op_src=[0], op_dst=[1]))
    stream.result()
    for sent in (steps.sent[0], steps.sent[1]):
        stream.send(step=sent)
    assert [stream.result(), stream.result()] == [first, copied]
    zeroed, kept = running.read_k(slots(1, 5), after_step=3).reshape(2, BLOCK_SIZE, 2, 16)
    assert (zeroed == 0).all()
    assert (kept != 0).all()
    assert np.isfinite(kept).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda step: pb.Step(step_id=2, digest=bytes(32), body=step.body), "DIGEST_MISMATCH"),
        (lambda step: pb.Step(step_id=3, digest=step.digest, body=step.body), "STEP_GAP"),
        (
            lambda step: pb.Step(step_id=2, digest=step.digest, body=step.body, results_durable_through=2),
            "DURABLE_AHEAD",
        ),
    ],
)
def test_a_step_out_of_order_or_of_another_history_is_refused_and_changes_nothing(
    service: LinkService, stream: Stream, running: Running, change: object, reason: str
) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    stream.result()
    zero = steps.make(op_kind=[2], op_src=[0], op_dst=[1])
    bad = change(zero)  # type: ignore[operator]
    stream.send(step=bad)
    refused = refusal(stream)
    assert (refused.step_id, refused.reason) == (bad.step_id, reason)
    assert refused.message
    stream = again(service)
    assert (stream.messages[0].hello.accepted, stream.messages[0].hello.completed) == (1, 1)
    assert stream.result().step_id == 1
    assert (running.read_k(slots(1)) != 0).all()


def test_a_step_that_fails_validation_is_refused_and_changes_nothing(
    service: LinkService, stream: Stream, running: Running
) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    stream.result()
    # The op before it and the delta are fine; the batch names a block that the table lacks.
    stream.send(
        step=steps.make(
            op_kind=[2],
            op_src=[0],
            op_dst=[1],
            delta_row=[0],
            delta_first=[0],
            delta_count=[1],
            delta_blocks=[6],
            **columns_of(8, [3]),
        )
    )
    refused = refusal(stream)
    assert (refused.step_id, refused.reason) == (2, "BLOCK_MISSING")
    stream = again(service, durable=1)
    steps.sent.pop()
    # Row 0 still reads block 1: decoding over block 6 would have met NaN.
    stream.send(step=decode(steps, len(PROMPT), 3))
    stream.result()
    assert (running.read_k(slots(1)) != 0).all()
    assert np.isnan(running.read_k(slots(6))).all()


def test_results_are_kept_and_sent_again_on_the_next_stream(service: LinkService, stream: Stream) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    results = [stream.result()]
    for position in range(len(PROMPT), 8):
        stream.send(step=decode(steps, position, 3))
        results.append(stream.result())
    stream.end()

    stream = service.stream()
    hello = stream.hello()
    assert (hello.accepted, hello.completed, hello.digest) == (3, 3, steps.sent[2].digest)
    assert (stream.messages[0].service_id, stream.messages[0].epoch) == (SERVICE_ID, 1)
    stream.welcome(1, reset=False, durable=1)
    assert [stream.result(), stream.result()] == results[1:]
    stream.end()

    # Durable through 3 now, said by a heartbeat; only what comes after is sent again.
    stream = again(service, durable=1)
    assert [stream.result(), stream.result()] == results[1:]
    stream.send(heartbeat=pb.Heartbeat(results_durable_through=3))
    stream.send(step=steps.make(op_kind=[2], op_src=[0], op_dst=[7]))
    fourth = stream.result()
    stream.end()
    stream = again(service, durable=3)
    assert stream.result() == fourth


def test_a_result_that_is_ready_while_no_stream_is_up_is_sent_on_the_next(
    service: LinkService, stream: Stream, running: Running
) -> None:
    steps = Steps()
    held, release = running.hold()
    stream.send(step=steps.prefill(PROMPT))
    assert held.wait(30)
    stream.send(step=decode(steps, len(PROMPT), 3))
    wait_for(lambda: running.executor.follower.position.accepted == 2, 30, "both steps accepted")
    stream.end()
    wait_for(lambda: not running.executor.follower.attached, 30, "the stream's end was seen")
    release.set()
    wait_for(lambda: running.executor.follower.position.completed == 2, 30, "both steps computed")
    stream = again(service)
    assert [stream.result().step_id, stream.result().step_id] == [1, 2]


def test_going_on_keeps_the_pool_and_the_tables(service: LinkService, stream: Stream, running: Running) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    first = tokens(stream.result())[0]
    before = running.read_k(slots(1, 2))
    stream.end()
    stream = again(service, durable=1)
    wait_for(lambda: running.executor.follower.attached, 30, "attached again")
    np.testing.assert_array_equal(running.read_k(slots(1, 2)), before)
    stream.send(step=decode(steps, len(PROMPT), first))
    second = tokens(stream.result())[0]

    # The same, undisturbed, over other blocks.
    stream.send(step=steps.prefill(PROMPT, row=1, blocks=(11, 12)))
    assert tokens(stream.result())[0] == first
    stream.send(step=decode(steps, len(PROMPT), first, row=1))
    assert tokens(stream.result())[0] == second


def test_a_reset_clears_the_tables_and_counts_from_one(service: LinkService, stream: Stream, running: Running) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    stream.result()
    stream.end()
    stream = service.stream()
    stream.hello()
    stream.welcome(2, reset=True)
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT, row=3, blocks=(4, 5)))
    assert stream.result().step_id == 1
    stream.send(step=decode(steps, len(PROMPT), 3, row=0))  # its table went with the reset
    refused = refusal(stream)
    assert (refused.step_id, refused.reason) == (2, "BLOCK_MISSING")


def test_steps_of_an_epoch_that_is_over_are_not_computed(
    service: LinkService, stream: Stream, running: Running
) -> None:
    steps = Steps()
    held, release = running.hold()
    assert held.wait(30)
    stream.send(step=steps.prefill(PROMPT))
    wait_for(lambda: running.executor.follower.position.accepted == 1, 30, "the step accepted")
    stream.end()
    stream = service.stream()
    assert stream.hello().accepted == 1
    stream.welcome(2, reset=True)
    wait_for(lambda: running.executor.follower.position.epoch == 2, 30, "the new epoch")
    release.set()
    steps = Steps()
    stream.send(step=steps.make(op_kind=[2], op_src=[0], op_dst=[7]))
    assert stream.result().step_id == 1
    assert np.isnan(running.read_k(slots(1, 2), epoch=2)).all()


def test_heartbeats_come_while_a_long_step_computes(service: LinkService, running: Running) -> None:
    stream = service.stream()
    stream.hello()
    stream.welcome(1, reset=True, interval_ms=20)
    held, release = running.hold()
    assert held.wait(30)
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    wait_for(lambda: [h for _, h in stream.heartbeats if h.accepted == 1], 30, "a heartbeat that names step 1")
    count = len(stream.heartbeats)
    wait_for(lambda: len(stream.heartbeats) >= count + 5, 30, "five more heartbeats")
    assert stream.heartbeats[-1][1].completed == 0
    release.set()
    assert stream.result().step_id == 1


def test_an_executor_that_hears_nothing_dials_again(service: LinkService, running: Running) -> None:
    stream = service.stream()
    hello = stream.hello()
    stream.welcome(1, reset=True, interval_ms=20, silence_ms=200)
    second = service.stream()
    assert second.hello().geometry == hello.geometry
    assert second.boot_id == stream.boot_id


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"epoch": 4}, "EPOCH_STALE"),
        ({"epoch": 6}, "EPOCH_UNKNOWN"),
        ({"service_id": "another"}, "IDENTITY_MISMATCH"),
    ],
)
def test_messages_of_another_epoch_or_service_are_refused(
    service: LinkService, running: Running, named: dict[str, object], reason: str
) -> None:
    stream = service.stream()
    stream.hello()
    stream.welcome(5, reset=True)
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT), **named)  # type: ignore[arg-type]
    assert refusal(stream).reason == reason
    stream = service.stream()
    assert stream.hello().accepted == 0
    stream.welcome(5, reset=False)
    wait_for(lambda: running.executor.follower.attached, 30, "attached")
    assert np.isnan(running.read_k(slots(1, 2), epoch=5)).all()


@pytest.mark.parametrize(
    ("epoch", "reset", "durable", "reason"),
    [
        (0, True, 0, "EPOCH_STALE"),
        (1, True, 0, "EPOCH_STALE"),  # steps were accepted in it
        (2, False, 0, "WELCOME_INVALID"),
        (1, False, 2, "DURABLE_AHEAD"),
        (2, True, 1, "DURABLE_AHEAD"),
    ],
)
def test_a_welcome_that_cannot_be_is_refused(
    service: LinkService, stream: Stream, epoch: int, reset: bool, durable: int, reason: str
) -> None:
    steps = Steps()
    stream.send(step=steps.prefill(PROMPT))
    result = stream.result()
    stream.end()
    stream = service.stream()
    stream.hello()
    stream.welcome(epoch, reset=reset, durable=durable)
    assert refusal(stream).reason == reason
    assert again(service).result() == result


def test_a_step_before_the_welcome_is_refused(service: LinkService, running: Running) -> None:
    stream = service.stream()
    stream.hello()
    stream.send(step=Steps().prefill(PROMPT))
    assert refusal(stream).reason == "WELCOME_EXPECTED"


def test_a_service_that_starts_late_or_comes_back_is_found(tiny_llama_dir: Path) -> None:
    first = LinkService()
    port = first.port
    first.close()
    running = Running(tiny_llama_dir, f"127.0.0.1:{port}")
    try:
        for epoch in (1, 2):
            service = LinkService(port)
            stream = service.stream()
            stream.hello()
            stream.welcome(epoch, reset=True)
            stream.send(step=Steps().prefill(PROMPT))
            assert stream.result().step_id == 1
            service.close()
    finally:
        running.close()


def test_health_follows_the_link(service: LinkService, running: Running) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert running.health() == not_serving
    assert running.health("live") == serving
    stream = service.stream()
    stream.hello()
    assert running.health() == not_serving
    stream.welcome(1, reset=True)
    wait_for(lambda: running.health() == serving, 30, "SERVING once attached")
    assert running.health("pagedkv.v1.ExecutorService") == serving
    stream.end()
    wait_for(lambda: running.health() == not_serving, 30, "NOT_SERVING once the stream ended")
    assert running.health("live") == serving
