"""The text side of the model that is served, built from the files that the executor's hello carries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument
from block_manager_svc.core.step import I32
from block_manager_svc.text.chat import ChatTemplate, TemplateBroken
from block_manager_svc.text.stream import Detokenizer, StopSet, TextStream

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens.json"


class TextModel:
    """Tokenizer and chat template of one model. Immutable; its methods may run in any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, chat: ChatTemplate | None, chat_missing: str) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._chat_missing = chat_missing
        self._silent = _silent(tokenizer, vocab_size)
        # Characters of the longest token: no text is fewer tokens than its characters divided by this.
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], vocab_size: int) -> TextModel | None:
        """None when there is no tokenizer.json: the model takes token ids only.

        Raises InvalidArgument ATTACHMENT_INVALID for a file that cannot be read. A chat template
        that does not compile is no reason to refuse the model: `encode_chat` then says why.
        """
        data = files.get(TOKENIZER)
        if data is None:
            return None
        try:
            tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # tokenizers raises no narrower type
            raise _invalid(TOKENIZER, error) from error
        # A tokenizer.json may carry the truncation and padding of its training.
        tokenizer.no_truncation()
        tokenizer.no_padding()

        chat, missing = None, "the executor sent no chat template"
        if CHAT_TEMPLATE in files:
            try:
                chat = ChatTemplate(files[CHAT_TEMPLATE].decode(), _special_tokens(files.get(SPECIAL_TOKENS, b"{}")))
            except TemplateBroken as error:
                missing = f"the model's chat template does not compile: {error}"
            except UnicodeDecodeError as error:
                raise _invalid(CHAT_TEMPLATE, error) from error
        return cls(tokenizer, vocab_size, chat, missing)

    @property
    def accepts_chat(self) -> bool:
        return self._chat is not None

    def encode(self, text: str) -> I32:
        """Token ids[n] of a text, with the tokenizer's own special tokens."""
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> I32:
        """Token ids[n] of messages (role, content), rendered by the model's template.

        Raises FailedPrecondition CHAT_TEMPLATE_UNAVAILABLE, InvalidArgument CHAT_TEMPLATE_FAILED.
        """
        rendered = self.render_chat(messages)
        return np.array(self._tokenizer.encode(rendered, add_special_tokens=False).ids, np.int32)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of messages; raises as `encode_chat`."""
        if self._chat is None:
            raise FailedPrecondition(
                "CHAT_TEMPLATE_UNAVAILABLE", f"{self._chat_missing}: send the prompt as text or token_ids"
            )
        return self._chat.render(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens skipped."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def stream(self, stops: StopSet | None = None) -> TextStream:
        """The text of one sample, as its tokens will come."""
        return TextStream(Detokenizer(self._tokenizer, self._silent), stops)


def _silent(tokenizer: Tokenizer, vocab_size: int) -> bytes:
    """For each token id 1 where it has no text: special, or in the model's vocabulary but not the tokenizer's."""
    silent = bytearray(b"\1") * vocab_size
    for token_id in tokenizer.get_vocab(with_added_tokens=True).values():
        if token_id < vocab_size:
            silent[token_id] = 0
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and token_id < vocab_size:
            silent[token_id] = 1
    return bytes(silent)


def _special_tokens(data: bytes) -> dict[str, str]:
    try:
        tokens = json.loads(data)
    except ValueError as error:
        raise _invalid(SPECIAL_TOKENS, error) from error
    if not isinstance(tokens, dict) or not all(isinstance(value, str) for value in tokens.values()):
        raise _invalid(SPECIAL_TOKENS, ValueError("not a map from names to strings"))
    return tokens


def _invalid(name: str, error: Exception) -> InvalidArgument:
    return InvalidArgument("ATTACHMENT_INVALID", f"{name} cannot be read: {error}", name=name)
