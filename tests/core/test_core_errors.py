from __future__ import annotations

from block_manager_svc.core.errors import Draining, ExecutorUnavailable, OutOfBlocks, SequenceNotFound, Unavailable


def test_nobody_is_there_and_whether_trying_again_helps() -> None:
    attached = ExecutorUnavailable("no executor is attached", retry_after=2.5)
    assert isinstance(attached, Unavailable)
    assert (attached.reason, attached.retry_after, str(attached)) == (
        "EXECUTOR_UNAVAILABLE",
        2.5,
        "no executor is attached",
    )
    assert ExecutorUnavailable("").retry_after == 1.0
    draining = Draining()
    assert isinstance(draining, Unavailable)
    assert (draining.reason, draining.retry_after) == ("DRAINING", None)
    assert draining.message == "this service is about to stop: call another instance"


def test_numbers_are_in_the_message_and_beside_it() -> None:
    short = OutOfBlocks(needed=9, available=4)
    assert short.numbers == {"needed": 9, "available": 4}
    assert short.message == "9 blocks are needed, 4 are free or evictable: free or preempt 5 first"
    assert SequenceNotFound(7).message == "sequence 7 is not alive: it has ended, or never was"
