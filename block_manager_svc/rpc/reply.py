"""One Generate under way: rows of tokens come in from the step loop, messages in columns wait for the reader.

    step loop ── take(rows) ──► digest: text, stop strings ──► outbox ── next_messages() ──► reader

`take` only keeps the rows. The digest runs later in the same event loop, when the next step is on its way, and
does not wait for the reader: a stop string ends its sample though nobody reads. To a reader that keeps up each
step is a message of its own; for a slow one steps that wait are joined, up to a bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from block_manager_svc.core.errors import Aborted, Refused
from block_manager_svc.scheduling.request import FinishReason, TokenRow
from block_manager_svc.text.stream import TextStream
from pagedkv.v1 import generation_pb2 as pb

# Rows in a message at most: with 20 alternatives a row, some 300 KB, far below the 4 MiB that clients take.
ROWS_PER_MESSAGE = 1024
_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}

# Messages that may wait for a reader.
MAX_WAITING = 64


class Reply:
    """What one call has to tell its caller.

    logprobs:    as in Sampling.
    streams:     the samples' texts, one a sample; None when the model has no tokenizer.
    stop_sample: ends a sample whose text met a stop string.
    usage:       asked for once, when every sample has finished.
    """

    __slots__ = (
        "_finished",
        "_logprobs",
        "_open",
        "_outbox",
        "_rows",
        "_stop_sample",
        "_streams",
        "_usage",
        "_wake",
        "_why",
        "completion_tokens",
    )

    def __init__(
        self,
        n: int,
        logprobs: int,
        streams: list[TextStream] | None,
        stop_sample: Callable[[int], None],
        usage: Callable[[], pb.Usage],
    ) -> None:
        self.completion_tokens = 0
        self._logprobs = logprobs
        self._streams = streams
        self._stop_sample = stop_sample
        self._usage = usage
        self._open = n
        self._finished = [False] * n
        self._rows: list[TokenRow] = []
        self._outbox: deque[pb.GenerateResponse] = deque()
        self._wake = asyncio.Event()
        self._why: Exception | None = None

    # --- the step loop's side -----------------------------------------------------------------------------------------

    def take(self, rows: list[TokenRow]) -> None:
        """One step's rows of this call."""
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._digest)
        self._rows.extend(rows)

    def fail(self, why: Exception) -> None:
        """No more rows come; the reader gets what waits, then this."""
        if self._why is None:
            self._why = why
        self._wake.set()

    def _digest(self) -> None:
        rows, self._rows = self._rows, []
        if self._why is not None:
            return
        try:
            self._append(rows)
        except Exception as error:  # or the reader would wait for ever; the boundary of the rpc logs it
            self.fail(error)
        self._wake.set()

    def _append(self, rows: list[TokenRow]) -> None:
        message = self._open_message()
        finished, streams, logprobs = self._finished, self._streams, self._logprobs
        for row in rows:
            sample = row.sample
            if finished[sample]:  # it met a stop string while this step was computed
                continue
            finish = row.finish
            text = ""
            if streams is not None:
                text, finish = self._text(streams[sample], row)
            if finish is not None:
                finished[sample] = True
                self._open -= 1
            self.completion_tokens += 1
            message.sample.append(sample)
            message.token_id.append(row.token_id)
            message.text.append(text)
            message.finish_reason.append(_FINISH[finish])
            if logprobs >= 0:
                assert row.logprob is not None, "logprobs were asked for"
                message.logprob.append(row.logprob)
                for token_id, logprob in row.top:
                    message.top_token_id.append(token_id)
                    message.top_logprob.append(logprob)
        if not self._open and not message.HasField("usage"):
            message.usage.CopyFrom(self._usage())

    def _text(self, stream: TextStream, row: TokenRow) -> tuple[str, FinishReason | None]:
        """The text that this row decides, and whether the sample ends with it."""
        text, stop = "", None
        if row.finish is not FinishReason.STOP:  # a stop token's own text is not sent
            text, stop = stream.push(row.token_id)
        if stop is None and row.finish is not None:
            rest, stop = stream.finish()
            text += rest
        if stop is None:
            return text, row.finish
        if row.finish is None:
            self._stop_sample(row.sample)
        return text, FinishReason.STOP

    def _open_message(self) -> pb.GenerateResponse:
        """The message at the outbox's end, if there is room in it."""
        if self._outbox and len(self._outbox[-1].sample) < ROWS_PER_MESSAGE:
            return self._outbox[-1]
        if len(self._outbox) == MAX_WAITING:
            raise reader_too_slow(f"{MAX_WAITING} messages wait for it", waiting=MAX_WAITING)
        message = pb.GenerateResponse()
        self._outbox.append(message)
        return message

    # --- the reader's side --------------------------------------------------------------------------------------------

    async def next_message(self) -> pb.GenerateResponse | None:
        """The oldest message that waits; None after the last. Raises what `fail` was given, when nothing waits."""
        while not self._outbox:
            if self._why is not None:
                raise self._why
            if not self._open:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._outbox.popleft()


def reader_too_slow(why: str, **numbers: float) -> Refused:
    return Aborted("READER_TOO_SLOW", f"the stream was not read: {why}. Call again, and read it as it comes", **numbers)
