"""Sampling is a function of logits, parameters and (seed, sample, position) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_executor.model.philox import philox4x32, uniform
from gpu_executor.model.sampler import NO_TOKEN, sample
from gpu_executor.step import Outputs, Samples


def samples(count: int, **columns: object) -> Samples:
    defaults: dict[str, object] = {
        "index": 0,
        "seed": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "logprobs": -1,
    }
    types = {"seed": np.uint64, "temperature": np.float32, "top_p": np.float32}
    filled = {
        name: np.broadcast_to(np.asarray(value, types.get(name, np.int32)), count).copy()
        for name, value in {**defaults, **columns}.items()
    }
    return Samples(source=np.arange(count, dtype=np.int32), **filled)


def draw(logits: torch.Tensor, count: int, **columns: object) -> np.ndarray:
    """Tokens of `count` samples from one row of logits, at as many positions."""
    rows = np.zeros(count, np.int64)
    return sample(logits[None], samples(count, **columns), np.arange(count), rows).token_ids


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123, kat_vectors, philox4x32 10
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    both = philox4x32(np.array([counter] * 2, np.uint32), np.array([key] * 2, np.uint32))
    assert both.tolist() == [expected] * 2


def test_uniform_numbers_fill_the_unit_interval_and_differ_in_every_argument() -> None:
    n = 20_000
    u = uniform(np.full(n, 7, np.uint64), np.zeros(n, np.int32), np.arange(n))
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(np.histogram(u, 10, (0, 1))[0] - n / 10).max() < 5 * (n / 10) ** 0.5
    one = [
        uniform(np.array([s], np.uint64), np.array([i], np.int32), np.array([p]))[0]
        for s in (0, 1, 1 << 40)
        for i in (0, 1)
        for p in (0, 1)
    ]
    assert len(set(one)) == len(one)


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 9.0]])
    out = sample(logits, samples(3), np.zeros(3))
    assert out.token_ids.tolist() == [1, 0, 3]
    assert out.token_ids.dtype == np.int32
    assert (out.logprob.size, out.top_token_ids.size, out.top_logprobs.size) == (0, 0, 0)


def test_frequencies_follow_the_tempered_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 20_000
    counts = np.bincount(draw(logits, n, seed=3, temperature=0.7), minlength=4)
    expected = torch.softmax(logits.double() / 0.7, 0).numpy() * n
    assert (abs(counts - expected) < 5 * expected**0.5).all()


def test_the_batch_that_a_sample_is_in_does_not_matter() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 3000)
    columns = {
        "index": np.arange(16) % 3,
        "seed": np.arange(16) * 977,
        "temperature": np.linspace(0, 2, 16),
        "top_p": np.linspace(0.2, 1, 16),
        "top_k": np.arange(16) * 7,
        "logprobs": 3,
    }
    positions = np.arange(16) * 11
    together = sample(logits, samples(16, **columns), positions)
    for i in range(16):
        alone = samples(
            1, **{name: np.asarray(value).reshape(-1)[[min(i, np.size(value) - 1)]] for name, value in columns.items()}
        )
        one: Outputs = sample(logits[i : i + 1], alone, positions[[i]])
        assert one.token_ids[0] == together.token_ids[i]
        assert one.logprob[0] == together.logprob[i]
        assert one.top_token_ids.tolist() == together.top_token_ids[3 * i : 3 * i + 3].tolist()


def test_samples_of_one_row_part_by_their_index() -> None:
    tokens = sample(
        torch.zeros(1, 1000), samples(8, index=np.arange(8), seed=5, temperature=1.0), np.full(8, 4), np.zeros(8, int)
    ).token_ids
    assert len(set(tokens.tolist())) > 6


def test_top_k_keeps_k_and_of_equals_the_lowest_ids() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert set(draw(logits, 500, seed=1, temperature=1.0, top_k=3).tolist()) == {0, 1, 2}
    assert set(draw(logits, 50, seed=1, temperature=5.0, top_k=1).tolist()) == {1}
    assert set(draw(logits, 2000, seed=1, temperature=5.0, top_k=99).tolist()) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_that_hold_p() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    for top_p, kept in ((0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 3, 2}), (0.95, {0, 1, 2, 3})):
        assert set(draw(logits, 800, seed=2, temperature=1.0, top_p=top_p).tolist()) == kept


def test_top_p_counts_after_top_k() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    # Of the two that top_k leaves, 4/7 and 3/7, the first holds half.
    assert set(draw(logits, 300, seed=2, temperature=1.0, top_k=2, top_p=0.5).tolist()) == {1}


def test_top_p_looks_past_the_heaviest_few_when_the_distribution_is_flat() -> None:
    tokens = draw(torch.zeros(5000), 3000, seed=4, temperature=1.0, top_p=0.5)
    assert tokens.max() < 2500
    assert tokens.max() > 2300


def test_logprobs_are_of_the_raw_logits_whatever_the_sampling() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 50).to(torch.bfloat16)
    out = sample(logits, samples(2, temperature=0.5, top_k=5, top_p=0.9, logprobs=[0, 4], seed=1), np.array([3, 3]))
    expected = torch.log_softmax(logits.float(), -1)
    assert out.logprob.tolist() == [float(expected[i, t]) for i, t in enumerate(out.token_ids)]
    best = torch.topk(expected[1], 4)
    assert out.top_logprobs.tolist() == best.values.tolist()
    assert expected[1, out.top_token_ids].tolist() == best.values.tolist()


def test_equal_logprobs_are_listed_by_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    assert sample(logits, samples(1, logprobs=4), np.zeros(1)).top_token_ids.tolist() == [1, 3, 2, 4]


def test_logprobs_keep_to_samples_that_ask() -> None:
    out = sample(torch.randn(4, 20), samples(4, logprobs=[-1, 2, -1, 0]), np.zeros(4))
    assert (len(out.logprob), len(out.top_token_ids), len(out.top_logprobs)) == (2, 2, 2)


def test_no_samples_no_tokens() -> None:
    out = sample(torch.empty(0, 10), samples(0), np.empty(0))
    assert out.token_ids.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_token_and_leave_the_others_alone(value: float, temperature: float) -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    asked = samples(3, temperature=temperature, logprobs=2)
    expected = sample(logits, asked, np.zeros(3))
    logits[1, 3] = value
    out = sample(logits, asked, np.zeros(3))
    assert out.token_ids.tolist() == [expected.token_ids[0], NO_TOKEN, expected.token_ids[2]]
    others = [0, 1, 4, 5]
    assert out.top_token_ids[others].tolist() == expected.top_token_ids[others].tolist()
    assert (len(out.logprob), len(out.top_logprobs)) == (3, 6)


def test_a_cold_temperature_is_greedy_without_overflow() -> None:
    assert draw(torch.tensor([3e4, 2.0, 3e4 + 8]), 20, temperature=1e-3, seed=9).tolist() == [2] * 20
