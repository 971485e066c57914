from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_manager_svc.scheduling.columns import share


@pytest.mark.parametrize(
    ("wanted", "budget", "shares"),
    [
        ([5, 1, 7], 13, [5, 1, 7]),  # enough for all
        ([100, 1, 1], 16, [14, 1, 1]),  # decodes behind an older prefill
        ([1, 100, 1, 50, 1], 16, [1, 13, 1, 0, 1]),
        ([30, 20, 1], 40, [30, 9, 1]),  # then prefills in order
        ([9, 1, 1, 1], 3, [0, 1, 1, 1]),
        ([3, 3], 0, [0, 0]),
        ([], 8, []),
    ],
    ids=str,
)
def test_single_tokens_come_first_then_the_others_in_order(wanted: list[int], budget: int, shares: list[int]) -> None:
    assert share(np.array(wanted, np.int32), budget).tolist() == shares


@given(wanted=st.lists(st.integers(1, 40), max_size=20), budget=st.integers(0, 200))
def test_a_budget_is_used_up_and_cuts_one_at_most(wanted: list[int], budget: int) -> None:
    shares = share(np.array(wanted, np.int32), budget).tolist()
    assert all(0 <= got <= want for got, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))
    assert sum(0 < got < want for got, want in zip(shares, wanted, strict=True)) <= 1
    if budget >= wanted.count(1):
        assert all(got == 1 for got, want in zip(shares, wanted, strict=True) if want == 1)
