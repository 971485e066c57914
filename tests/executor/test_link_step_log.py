from __future__ import annotations

import hashlib

import pytest

from gpu_executor.errors import StepInvalid
from gpu_executor.link.step_log import NO_DIGEST, Accepted, StepLog


class Chain:
    """Steps as a service numbers and digests them; bodies are told apart by `text`."""

    def __init__(self, text: str = "body") -> None:
        self.text = text
        self.digests = [NO_DIGEST]

    def step(self, step_id: int) -> tuple[int, bytes, bytes]:
        while len(self.digests) <= step_id:
            body = self.body(len(self.digests))
            self.digests.append(hashlib.sha256(self.digests[-1] + body).digest())
        return step_id, self.digests[step_id], self.body(step_id)

    def body(self, step_id: int) -> bytes:
        return f"{self.text} {step_id}".encode()


def accept(log: StepLog[str], chain: Chain, *step_ids: int) -> None:
    for step_id in step_ids:
        assert log.place(*chain.step(step_id)) is None
        log.accept(step_id, chain.digests[step_id])


def refused(log: StepLog[str], *step: object) -> str:
    before = (log.accepted, log.completed, log.durable_through, log.digest)
    with pytest.raises(StepInvalid) as error:
        log.place(*step)  # type: ignore[arg-type]
    assert (log.accepted, log.completed, log.durable_through, log.digest) == before
    return error.value.reason


def test_steps_are_accepted_in_order_and_the_digest_follows() -> None:
    log, chain = StepLog[str](), Chain()
    assert log.digest == bytes(32)
    accept(log, chain, 1, 2, 3)
    assert (log.accepted, log.completed) == (3, 0)
    assert log.digest == chain.digests[3]


def test_a_gap_is_refused() -> None:
    log, chain = StepLog[str](), Chain()
    accept(log, chain, 1)
    assert refused(log, *chain.step(3)) == "STEP_GAP"


def test_a_digest_of_another_history_is_refused() -> None:
    log, chain, other = StepLog[str](), Chain(), Chain("another body")
    accept(log, chain, 1)
    assert refused(log, *other.step(2)) == "DIGEST_MISMATCH"
    step_id, digest, _ = chain.step(2)
    assert refused(log, step_id, digest, b"not what was digested") == "DIGEST_MISMATCH"


def test_a_step_sent_again_gives_its_kept_result_or_says_that_it_computes() -> None:
    log, chain = StepLog[str](), Chain()
    accept(log, chain, 1, 2)
    log.complete(1, "result 1")
    assert log.place(*chain.step(1)) == Accepted("result 1")
    assert log.place(*chain.step(2)) == Accepted(None)
    assert log.accepted == 2


def test_a_step_sent_again_with_another_body_is_refused() -> None:
    log, chain = StepLog[str](), Chain()
    accept(log, chain, 1, 2)
    step_id, digest, _ = chain.step(1)
    assert refused(log, step_id, digest, b"another") == "DIGEST_MISMATCH"


def test_results_are_kept_until_they_are_durable() -> None:
    log, chain = StepLog[str](), Chain()
    accept(log, chain, 1, 2, 3)
    for step_id in (1, 2, 3):
        log.complete(step_id, f"result {step_id}")
    assert log.results_past(0) == ["result 1", "result 2", "result 3"]
    log.set_durable(2)
    assert log.results_past(2) == ["result 3"]
    log.set_durable(1)  # a message that was overtaken
    assert log.results_past(2) == ["result 3"]
    with pytest.raises(StepInvalid, match="durable through 2"):
        log.results_past(1)
    assert refused(log, *chain.step(2)) == "STEP_DURABLE"
    assert log.place(*chain.step(3)) == Accepted("result 3")
    accept(log, chain, 4)


def test_durable_ahead_of_completed_is_refused() -> None:
    log, chain = StepLog[str](), Chain()
    accept(log, chain, 1, 2)
    log.complete(1, "result 1")
    with pytest.raises(StepInvalid) as error:
        log.set_durable(2)
    assert error.value.reason == "DURABLE_AHEAD"
    assert log.results_past(0) == ["result 1"]


def test_the_window_bounds_what_is_accepted_and_not_completed() -> None:
    log, chain = StepLog[str](window=2), Chain()
    accept(log, chain, 1, 2)
    assert refused(log, *chain.step(3)) == "WINDOW_EXCEEDED"
    assert log.place(*chain.step(2)) == Accepted(None)  # again is no new one
    log.complete(1, "result 1")
    accept(log, chain, 3)


def test_kept_results_are_bounded() -> None:
    log, chain = StepLog[str](kept=2), Chain()
    for step_id in (1, 2):
        accept(log, chain, step_id)
        log.complete(step_id, "result")
    assert refused(log, *chain.step(3)) == "RESULTS_PILED_UP"
    log.set_durable(1)
    accept(log, chain, 3)


def test_reset_starts_again_with_the_digest_of_nothing() -> None:
    log, chain = StepLog[str](), Chain()
    accept(log, chain, 1, 2)
    log.complete(1, "result 1")
    log.set_durable(1)
    log.reset()
    assert (log.accepted, log.completed, log.durable_through, log.digest) == (0, 0, 0, bytes(32))
    assert log.results_past(0) == []
    accept(log, Chain("new"), 1)
