"""GenerationService: prompts in, streams of tokens out. The contract is protos/pagedkv/v1/generation.proto."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio
import numpy as np

from block_manager_svc.core.errors import ExecutorUnavailable, FailedPrecondition, InvalidArgument, ModelNotFound
from block_manager_svc.core.step import I32
from block_manager_svc.manager import Manager, ModelInfo
from block_manager_svc.rpc.authentication import caller
from block_manager_svc.rpc.offload import Offload
from block_manager_svc.rpc.reply import Reply, reader_too_slow
from block_manager_svc.rpc.sampling import read_sampling, token_out_of_range
from block_manager_svc.scheduling.request import Sampling
from block_manager_svc.text.model import TextModel
from block_manager_svc.text.stream import StopSet
from pagedkv.v1 import generation_pb2 as pb
from pagedkv.v1 import generation_pb2_grpc

# Text up to this many characters is worked on where it is, in about a millisecond; more, in a thread.
_INLINE_CHARS = 2000
_THREADS = 2  # that tokenize at once: they share the interpreter with the event loop

T = TypeVar("T")
_Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """write_timeout: seconds that a reader may leave a message unread before its call is ended."""

    def __init__(self, manager: Manager, write_timeout: float) -> None:
        self._manager = manager
        self._write_timeout = write_timeout
        self._offload = Offload(_THREADS)

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # noqa: N802
        manager = self._manager
        prompt, sampling, stops, text = await self._read(request)
        streams = None if text is None else [text.stream(stops) for _ in range(sampling.n)]
        reply = Reply(
            sampling.n,
            sampling.logprobs,
            streams,
            stop_sample=lambda sample: manager.stop_sample(call, sample),
            usage=lambda: self._usage(call, reply, sampling),
        )
        call = manager.submit(prompt, sampling, reply.take, reply.fail, caller().tenant)
        try:
            while (message := await reply.next_message()) is not None:
                await self._write(context, message)
        finally:
            manager.cancel(call)

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:  # noqa: N802
        model, text = self._manager.model, self._manager.text
        if model is None:
            return pb.ListModelsResponse()
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    id=model.id,
                    vocab_size=model.vocab_size,
                    max_context=model.max_context,
                    eos_token_ids=model.eos_token_ids,
                    accepts_text=text is not None,
                    accepts_chat=text is not None and text.accepts_chat,
                )
            ]
        )

    async def _read(self, request: pb.GenerateRequest) -> tuple[I32, Sampling, StopSet | None, TextModel | None]:
        """A request, checked whole and tokenized. Raises Refused; nothing has changed then."""
        model = self._served(request.model)
        text = self._manager.text
        sampling = read_sampling(request.sampling, model)
        stops = None
        if strings := request.sampling.stop:
            if text is None:
                raise _no_tokenizer("stop strings are text: use stop_token_ids")
            stops = await self._aside(sum(map(len, strings)), lambda: StopSet(strings))
        prompt = await self._read_prompt(request, model, text)
        if len(prompt) == 0:
            raise InvalidArgument("PROMPT_EMPTY", "the prompt has no token: send at least one")
        if self._served(request.model) != model:  # while a thread tokenized for the one before
            raise ExecutorUnavailable("another model came while the prompt was read: try again", retry_after=0.0)
        return prompt, sampling, stops, text

    async def _read_prompt(self, request: pb.GenerateRequest, model: ModelInfo, text: TextModel | None) -> I32:
        """Token ids[n] i32, each within the vocabulary. Raises Refused."""
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgument("PROMPT_MISSING", "the request has no prompt: set text, chat or token_ids")
        if kind == "token_ids":
            ids = request.token_ids.ids
            if len(ids) > model.max_context:  # before any work is done for it
                raise InvalidArgument(
                    "PROMPT_TOO_LONG",
                    f"{len(ids)} prompt tokens do not fit the model's context of {model.max_context} tokens: "
                    "shorten it",
                    prompt_tokens=len(ids),
                    max_context=model.max_context,
                )
            return _checked(np.array(ids, np.int64), model)
        if text is None:
            raise _no_tokenizer("send the prompt as token_ids")
        if kind == "text":
            _refuse_hopeless(len(request.text), model, text)
            return _checked(await self._aside(len(request.text), lambda: text.encode(request.text)), model)
        if not request.chat.messages:
            raise InvalidArgument("PROMPT_EMPTY", "the chat has no message: send at least one")
        if len(request.chat.messages) > model.max_context:
            raise InvalidArgument(
                "PROMPT_TOO_LONG",
                f"{len(request.chat.messages)} messages do not fit the model's context of {model.max_context} tokens: "
                "send fewer",
                messages=len(request.chat.messages),
                max_context=model.max_context,
            )
        messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
        _refuse_hopeless(sum(len(message["content"]) for message in messages), model, text)
        # Always in a thread: how long a template takes, its messages don't tell.
        return _checked(await self._offload.run(lambda: text.encode_chat(messages)), model)

    async def _aside(self, chars: int, work: Callable[[], T]) -> T:
        return work() if chars <= _INLINE_CHARS else await self._offload.run(work)

    def _served(self, name: str) -> ModelInfo:
        model = self._manager.served_model()
        if name and name != model.id:
            raise ModelNotFound(
                "MODEL_NOT_FOUND", f"no model {name!r} here, {model.id!r} is served", model=name, served=model.id
            )
        return model

    def _usage(self, call: int, reply: Reply, sampling: Sampling) -> pb.Usage:
        usage = self._manager.usage(call)
        return pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=reply.completion_tokens,
            preemptions=usage.preemptions,
            seed=sampling.seed,
        )

    async def _write(self, context: _Context, message: pb.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await context.write(message)
        except TimeoutError:
            raise reader_too_slow(
                f"a message waited for {self._write_timeout} s", write_timeout_s=self._write_timeout
            ) from None


def _refuse_hopeless(chars: int, model: ModelInfo, text: TextModel) -> None:
    """Before any work is done for it: a text of so many characters that its tokens cannot fit."""
    limit = model.max_context * text.longest_token
    if chars > limit:
        raise InvalidArgument(
            "PROMPT_TOO_LONG",
            f"{chars} characters are more than {model.max_context} tokens of {text.longest_token} characters, the "
            "model's longest, can be: shorten the prompt",
            chars=chars,
            max_chars=limit,
            max_context=model.max_context,
        )


def _checked(ids: np.ndarray[Any, Any], model: ModelInfo) -> I32:
    if len(ids) and (largest := int(ids.max())) >= model.vocab_size:
        raise token_out_of_range("the prompt", largest, model.vocab_size)
    return ids.astype(np.int32, copy=False)


def _no_tokenizer(remedy: str) -> FailedPrecondition:
    return FailedPrecondition("TOKENIZER_UNAVAILABLE", f"the executor sent no tokenizer: {remedy}")
