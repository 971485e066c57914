"""From a stream of token ids to a stream of text that ends before the first stop string.

    token ids ──Detokenizer──► whole characters ──StopSet──► text that is decided

Text is released once and never taken back. Held back is what may still change: half a character
(its bytes spread over tokens), and the longest end of the text that is a beginning of a stop string.

The stop string that appears first is the one whose last character comes first, of those that end
together the longest; so the result does not depend on where the borders between tokens lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# What a decoder writes for bytes that are no character, or not yet.
_INCOMPLETE = "\ufffd"
# Tokens without a whole character after which they are taken as they are. A character has at most
# 4 bytes, a token that has text at least one: an unfinished character lies within the last 4.
_MAX_PENDING = 16
_LONGEST_CHARACTER = 4


class Detokenizer:
    """Incremental detokenization of one sample, special tokens skipped.

    silent: for each token id, 1 where it has no text (special or unknown).
    Over a byte-level decoder the texts, joined, equal the decoding of the whole sequence.
    """

    __slots__ = ("_context", "_pending", "_silent", "_stream", "_tokenizer", "_told")

    def __init__(self, tokenizer: Tokenizer, silent: bytes) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._stream = DecodeStream(skip_special_tokens=True)
        # decode(context + pending) is the text from somewhere on; its first `told` characters are
        # released (None: all of decode(context)). Decoders need the context: some treat a first token unlike others.
        self._context: list[int] = []
        self._told: int | None = 0
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is whole now; may be empty."""
        if self._silent[token_id]:
            return ""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the decoder rewrote text that is released (it raises no narrower type)
            return self._restart()
        if text is None:
            return self._restart() if len(self._pending) >= _MAX_PENDING else ""
        if self._told:
            text = text[self._told :]
        self._context, self._pending, self._told = self._pending, [], None
        return text

    def finish(self) -> str:
        """Text of the tokens that still wait, unfinished characters included."""
        text = self._waiting_text()
        self._context, self._pending, self._told = self._context + self._pending, [], None
        return text

    def _waiting_text(self) -> str:
        if not self._pending and self._told is None:
            return ""
        told = len(self._decode(self._context)) if self._told is None else self._told
        return self._decode(self._context + self._pending)[told:]

    def _restart(self) -> str:
        """Settles what waits, but for an unfinished character at its end, which the new stream begins with."""
        text = self._waiting_text()
        tail = (self._context + self._pending)[-_LONGEST_CHARACTER:]
        self._context, self._pending = tail, []
        self._stream = DecodeStream(ids=tail, skip_special_tokens=True)
        if text.endswith(_INCOMPLETE):
            self._told = len(self._decode(tail)) - 1
            return text[:-1]
        self._told = None
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class StopSet:
    """Stop strings as one automaton (Aho & Corasick, "Efficient string matching", CACM 1975, section 2).

    State s is a prefix of a stop string, `depth[s]` characters long: the longest that the text read
    ends with. `ends[s]` is the length of the longest stop string that the text ends with, 0 if none.
    """

    __slots__ = ("depth", "ends", "fail", "first", "goto")

    def __init__(self, stops: Sequence[str]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.ends = [0]
        self.fail = [0]
        self.first = frozenset(stop[0] for stop in stops)
        for stop in stops:
            state = 0
            for char in stop:
                following = self.goto[state].get(char)
                if following is None:
                    following = self.goto[state][char] = len(self.goto)
                    self.goto.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.ends.append(0)
                    self.fail.append(0)
                state = following
            self.ends[state] = len(stop)
        # Breadth first: a state's failure lies nearer to the root and is known already.
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.goto[state].items():
                queue.append(following)
                self.fail[following] = fail = self.step(self.fail[state], char)
                self.ends[following] = self.ends[following] or self.ends[fail]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.goto[state]:
            state = self.fail[state]
        return self.goto[state].get(char, 0)


class TextStream:
    """The text of one sample as its tokens come. `stops`: None when there are none."""

    __slots__ = ("_detokenizer", "_held", "_state", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: StopSet | None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""  # ends the text so far; a beginning of a stop string
        self._state = 0

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Text decided by this token, and the stop string that it completed, if any: the text ends before it."""
        text = self._detokenizer.push(token_id)
        if self._stops is None or not text:
            return text, None
        return self._match(self._stops, text)

    def finish(self) -> tuple[str, str | None]:
        """The text that was held back. No more tokens come; a stop string may appear in it still."""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text, None
        text, stop = self._match(self._stops, text)
        if stop is None:
            text, self._held, self._state = text + self._held, "", 0
        return text, stop

    def _match(self, stops: StopSet, text: str) -> tuple[str, str | None]:
        state = self._state
        if not state and stops.first.isdisjoint(text):
            return text, None
        held = len(self._held)
        whole = self._held + text
        for end, char in enumerate(text, held + 1):
            state = stops.step(state, char)
            if length := stops.ends[state]:
                self._held, self._state = "", 0
                return whole[: end - length], whole[end - length : end]
        released = len(whole) - stops.depth[state]
        self._held, self._state = whole[released:], state
        return whole[:released], None
