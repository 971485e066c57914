"""SamplingParams of generation.proto, checked field by field, as the scheduler's Sampling."""

from __future__ import annotations

import secrets

from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.manager import ModelInfo
from block_manager_svc.scheduling.request import Sampling
from pagedkv.v1 import generation_pb2 as pb

MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_SAMPLES = 64


def read_sampling(params: pb.SamplingParams, model: ModelInfo) -> Sampling:
    """All defaults resolved, the seed drawn; but max_tokens is 0 when absent. Stop strings are checked only.

    Raises InvalidArgument PARAMETER_OUT_OF_RANGE or TOKEN_OUT_OF_RANGE.
    """
    if params.HasField("max_tokens"):
        _in_range("max_tokens", params.max_tokens, 1, model.max_context)
    temperature = params.temperature  # 0 when absent
    if not 0 <= temperature <= MAX_TEMPERATURE:  # NaN is in no range
        raise _out_of_range("temperature", temperature, 0, MAX_TEMPERATURE)
    top_p = params.top_p if params.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise _out_of_range("top_p", top_p, 0, 1, "above {} and at most {}")
    n = params.n if params.HasField("n") else 1
    _in_range("n", n, 1, MAX_SAMPLES)
    _in_range("logprobs", params.logprobs, 0, min(MAX_LOGPROBS, model.vocab_size))
    _in_range("stop", len(params.stop), 0, MAX_STOPS, "strings")
    for stop in params.stop:
        _in_range("stop", len(stop), 1, MAX_STOP_CHARS, "characters a string")
    _in_range("stop_token_ids", len(params.stop_token_ids), 0, MAX_STOP_TOKENS, "ids")
    for token_id in params.stop_token_ids:
        if token_id >= model.vocab_size:
            raise token_out_of_range("sampling.stop_token_ids", token_id, model.vocab_size)
    return Sampling(
        max_tokens=params.max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=min(params.top_k, model.vocab_size),
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        stop_token_ids=frozenset(params.stop_token_ids).union(() if params.ignore_eos else model.eos_token_ids),
        logprobs=params.logprobs if params.HasField("logprobs") else -1,
        n=n,
    )


def token_out_of_range(field: str, token_id: int, vocab_size: int) -> InvalidArgument:
    return InvalidArgument(
        "TOKEN_OUT_OF_RANGE",
        f"{field} has {token_id}: the model's token ids lie in [0, {vocab_size})",
        field=field,
        token_id=token_id,
        vocab_size=vocab_size,
    )


def _in_range(field: str, value: int, minimum: int, maximum: int, unit: str = "") -> None:
    if not minimum <= value <= maximum:
        raise _out_of_range(field, value, minimum, maximum, f"from {{}} to {{}} {unit}".rstrip())


def _out_of_range(
    field: str, value: float, minimum: float, maximum: float, words: str = "from {} to {}"
) -> InvalidArgument:
    return InvalidArgument(
        "PARAMETER_OUT_OF_RANGE",
        f"sampling.{field} is {value}, it must be {words.format(minimum, maximum)}",
        field=f"sampling.{field}",
        value=value,
        minimum=minimum,
        maximum=maximum,
    )
