"""Kept replies: for how long, how many, and of which request."""

from __future__ import annotations

import pytest

from block_manager_svc import replies
from block_manager_svc.core.errors import AlreadyExists
from block_manager_svc.replies import KEPT_MS, KeptReply, Replies


def test_a_reply_is_found_for_ten_minutes_by_the_same_request() -> None:
    kept = Replies()
    assert kept.find("a", b"1", 5) is None
    kept.keep("a", KeptReply(b"1", 5, b"reply"))
    for now in (5, 600_004):
        found = kept.find("a", b"1", now)
        assert found is not None
        assert found.reply == b"reply"
    with pytest.raises(AlreadyExists) as caught:
        kept.find("a", b"2", 605)
    assert (caught.value.reason, caught.value.numbers) == ("REQUEST_ID_REUSED", {"age_ms": 600})
    assert kept.find("a", b"2", 5 + KEPT_MS) is None
    assert len(kept) == 0


def test_only_what_is_too_old_goes() -> None:
    kept = Replies()
    for at in (0, 10, 20):
        kept.keep(str(at), KeptReply(b"", at, b""))
    assert kept.find("0", b"", KEPT_MS + 10) is None
    assert len(kept) == 1
    assert kept.find("20", b"", KEPT_MS + 10) is not None


@pytest.mark.parametrize(("limit", "value"), [("MAX_REPLIES", 2), ("MAX_BYTES", 20)])
def test_the_oldest_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(replies, limit, value)
    kept = Replies()
    for name in "abcd":
        kept.keep(name, KeptReply(b"", 0, bytes(10)))
    assert [name for name in "abcd" if kept.find(name, b"", 0)] == ["c", "d"]
    kept.clear()
    kept.keep("e", KeptReply(b"", 0, bytes(20)))
    assert len(kept) == 1
