"""The op stream of one executor: numbers, digests, what is kept, and how an executor that attaches again goes on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from block_manager_svc.oplog.stream import OpStream, Position, Reset, Resume


def stream_with(steps: int, results: int) -> OpStream:
    stream = OpStream("service")
    stream.reset("boot")
    for step in range(1, steps + 1):
        stream.push(b"step %d" % step)
    for step in range(1, results + 1):
        assert stream.is_news(step)
        stream.record()
    return stream


def digest_of(steps: int) -> bytes:
    """The definition, written once more."""
    digest = bytes(32)
    for step in range(1, steps + 1):
        digest = hashlib.sha256(digest + b"step %d" % step).digest()
    return digest if steps else b""


def position(accepted: int, completed: int | None = None) -> Position:
    completed = accepted if completed is None else completed
    return Position("service", 1, "boot", accepted, completed, digest_of(accepted))


def test_steps_are_numbered_without_gaps_and_chained_by_digest() -> None:
    stream = OpStream("service")
    stream.reset("boot")
    sent = [stream.push(b"step %d" % step) for step in (1, 2, 3)]
    assert [step.step_id for step in sent] == [1, 2, 3]
    assert [step.digest for step in sent] == [digest_of(1), digest_of(2), digest_of(3)]


@pytest.mark.parametrize("accepted", [2, 3, 4, 5])
def test_same_boot_with_equal_digest_gets_what_it_has_not_accepted_byte_for_byte(accepted: int) -> None:
    stream = stream_with(steps=5, results=2)
    decision = stream.reconcile(position(accepted))
    assert isinstance(decision, Resume)
    assert [step.step_id for step in decision.resend] == list(range(accepted + 1, 6))
    assert [step.body for step in decision.resend] == [b"step %d" % step for step in range(accepted + 1, 6)]


def test_an_executor_that_was_welcomed_and_got_nothing_yet_resumes_from_step_one() -> None:
    stream = stream_with(steps=1, results=0)
    decision = stream.reconcile(position(0))
    assert isinstance(decision, Resume)
    assert [step.step_id for step in decision.resend] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"boot_id": "another"},
        {"service_id": "another"},
        {"epoch": 0},
        {"epoch": 2},
        {"accepted": 1},  # below what it must have completed
        {"accepted": 6},  # ahead of what was sent
        {"digest": bytes(32)},
        {"digest": b""},
    ],
    ids=str,
)
def test_anything_else_resets(change: dict[str, object]) -> None:
    stream = stream_with(steps=5, results=2)
    assert isinstance(stream.reconcile(replace(position(4), **change)), Reset)  # type: ignore[arg-type]


def test_the_digest_at_the_durable_step_is_still_known_after_its_body_is_forgotten() -> None:
    stream = stream_with(steps=3, results=3)
    assert isinstance(stream.reconcile(position(3)), Resume)
    assert isinstance(stream.reconcile(replace(position(3), digest=digest_of(2))), Reset)


def test_reconciling_changes_nothing() -> None:
    stream = stream_with(steps=5, results=2)
    first = stream.reconcile(position(3))
    stream.reconcile(replace(position(3), boot_id="another"))
    assert stream.reconcile(position(3)) == first


def test_a_reset_starts_a_new_epoch_above_all_that_either_side_knew() -> None:
    stream = stream_with(steps=5, results=2)
    stream.reset("boot two", above_epoch=41)
    assert (stream.epoch, stream.last_step, stream.results_durable_through, stream.in_flight) == (42, 0, 0, 0)
    assert stream.push(b"step 1").digest == digest_of(1)
    stream.reset("boot three")
    assert stream.epoch == 43


def test_a_result_counts_once() -> None:
    stream = stream_with(steps=3, results=0)
    assert stream.is_news(1)
    assert stream.is_news(1)  # asking is not taking
    stream.record()
    assert not stream.is_news(1)
    stream.record()
    assert not stream.is_news(1)
    assert stream.is_news(3)
    assert (stream.results_durable_through, stream.in_flight) == (2, 1)


@pytest.mark.parametrize("step", [3, 4, 99])
def test_a_result_ahead_of_its_turn_is_refused(step: int) -> None:
    stream = stream_with(steps=3, results=1)
    with pytest.raises(ValueError, match=str(step)):
        stream.is_news(step)


def test_a_boot_that_was_forgotten_begins_anew() -> None:
    stream = stream_with(steps=3, results=3)
    stream.forget_boot()
    assert isinstance(stream.reconcile(position(3)), Reset)
