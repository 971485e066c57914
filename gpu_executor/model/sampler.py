"""From logits to tokens: greedy, temperature, top-k, top-p, and log-probabilities.

A sample is a function of its logits, its parameters and (seed, sample, position), and of nothing else: not of the batch
that it happens to be computed in, nor of what was sampled before.

One uniform number u a sample picks the token: the kept tokens' probabilities are laid side by side in order of token
id, and the one whose stretch holds u wins. Noise in the logits then changes a token only when u lies that close to a
border.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_executor.model.philox import uniform
from gpu_executor.step import I32, Outputs, Samples

NO_TOKEN = -1
"""In the place of a token: nothing could be chosen."""


def sample(
    logits: Tensor, samples: Samples, positions: NDArray[np.integer], rows: NDArray[np.integer] | None = None
) -> Outputs:
    """Samples one token for each of S samples.

    logits:    [R, V], any float dtype.
    samples:   S columns; `source` is not read.
    positions: int[S], where the sampled token will stand in its sequence.
    rows:      int[S], which row of logits each sample draws from; None: row i for sample i.

    Equal logits: the lower token id goes first, in greedy choice, top-k, top-p and the lists of best tokens.
    Where a row is not finite nothing can be chosen: the token is NO_TOKEN, its log-probabilities mean nothing.
    """
    count = len(samples.index)
    if rows is None:
        rows = np.arange(count)
    if count == 0:
        return Outputs(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32))

    best = torch.argmax(logits, dim=-1)  # the first of equals; NaN counts as the highest
    highest = logits.gather(1, best[:, None])[:, 0].cpu()
    lost = ~torch.isfinite(highest).numpy()
    if lost.any():
        logits = torch.where(torch.from_numpy(lost).to(logits.device)[:, None], 0.0, logits)
    tokens = best.cpu().numpy()[rows].astype(np.int32)

    drawn = np.flatnonzero((samples.temperature > 0) & ~lost[rows])
    if drawn.size:
        u = uniform(samples.seed[drawn], samples.index[drawn], np.asarray(positions)[drawn].astype(np.int64))
        for i, x in zip(drawn.tolist(), u.tolist(), strict=True):
            tokens[i] = _draw(
                logits[int(rows[i])], float(samples.temperature[i]), int(samples.top_k[i]), float(samples.top_p[i]), x
            )
    log_probabilities = _log_probabilities(logits, samples.logprobs, rows, tokens)
    tokens[lost[rows]] = NO_TOKEN
    return Outputs(tokens, *log_probabilities)


def _draw(logits: Tensor, temperature: float, top_k: int, top_p: float, u: float) -> int:
    scaled = logits.double() / temperature
    weight = torch.exp(scaled - scaled.max())
    vocab = weight.numel()
    if 0 < top_k < vocab:
        weight = _keep_heaviest(weight, top_k, torch.topk(weight, top_k).values)
    if top_p < 1:
        weight = _nucleus(weight, top_p)
    border = torch.cumsum(weight, 0)
    # A draw of the last bit below 1 may round up to the total: the last token of any weight is then meant.
    index = int(torch.searchsorted(border, u * float(border[-1]), right=True))
    if index >= vocab:
        index = int(torch.nonzero(weight)[-1])
    return index


def _nucleus(weight: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest heaviest tokens that hold `top_p` of the weight, at least one."""
    needed = top_p * float(weight.sum())
    size = min(256, weight.numel())
    while True:
        heaviest = torch.topk(weight, size).values
        mass = torch.cumsum(heaviest, 0)
        if float(mass[-1]) >= needed or size == weight.numel():
            break
        size = min(size * 8, weight.numel())  # a flat distribution: look further down
    count = min(int(torch.searchsorted(mass, needed)) + 1, size)
    return _keep_heaviest(weight, count, heaviest)


def _keep_heaviest(weight: Tensor, count: int, heaviest: Tensor) -> Tensor:
    """Zeroes all but the `count` heaviest; of equals the lower token ids stay. `heaviest` is sorted, at least count."""
    least = heaviest[count - 1]
    above = weight > least
    equal = torch.nonzero(weight == least)[: count - int(above.sum()), 0]
    kept = torch.where(above, weight, 0)
    kept[equal] = least
    return kept


def _log_probabilities(
    logits: Tensor, wanted: I32, rows: NDArray[np.integer], tokens: I32
) -> tuple[NDArray[np.float32], I32, NDArray[np.float32]]:
    asking = np.flatnonzero(wanted >= 0)
    if not asking.size:
        return np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32)
    distinct, place = np.unique(np.asarray(rows)[asking], return_inverse=True)
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    raw = logits[torch.from_numpy(distinct).to(logits.device)].to(exact)
    log_softmax = torch.log_softmax(raw, dim=-1).cpu().numpy()
    own = log_softmax[place, tokens[asking]].astype(np.float32)
    top_ids: list[NDArray[np.int32]] = []
    top_logprobs: list[NDArray[np.float32]] = []
    for row, k in zip(place.tolist(), wanted[asking].tolist(), strict=True):
        if k > 0:
            ids = _best(log_softmax[row], k)
            top_ids.append(ids.astype(np.int32))
            top_logprobs.append(log_softmax[row, ids].astype(np.float32))
    return (
        own,
        np.concatenate(top_ids) if top_ids else np.empty(0, np.int32),
        np.concatenate(top_logprobs) if top_logprobs else np.empty(0, np.float32),
    )


def _best(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Ids of the k highest values, highest first, lower ids first among equals."""
    k = min(k, len(values))
    least = np.partition(values, len(values) - k)[len(values) - k]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")][:k]
