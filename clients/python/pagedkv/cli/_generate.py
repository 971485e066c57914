"""Commands that generate: one prompt, or a conversation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from pagedkv import Client, Completion, FinishReason, PagedKvError, SamplingOptions, Stream
from pagedkv.cli._app import Address, Format, Timeout, session
from pagedkv.cli._output import Output, write_error, write_json, write_text

Model = Annotated[str, typer.Option("--model", help="An id that `kvctl models` lists.", show_default="the one served")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most, at least 1.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 to 100.", show_default="0: greedy")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Above 0, to 1.", show_default="1: all")]
TopK = Annotated[int | None, typer.Option("--top-k", help="0 keeps all tokens.", show_default="0")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.", show_default="drawn")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Ends the text before this; may be given 16 times.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="Ends after this token; may be given 64 times.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past end-of-sequence tokens.")]
DEFAULT_MAX_TOKENS = 256


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; - reads it from stdin.")] = None,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", help="Instead of PROMPT: token ids, as 1,2,3.")
    ] = None,
    model: Model = "",
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenIds = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="With -o json: each token's, and the best k (to 20).")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Parallel samples, 1 to 64; they share the prompt's blocks.")] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="With -o json: one line a token, usage last.")] = False,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """Generates from PROMPT; the text is shown as it comes (with -n above 1: sample by sample, at the end)."""
    text, ids = _prompt(prompt, token_ids)
    options = SamplingOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        n=n,
    )
    with session(context, address, output, timeout) as (client, fmt):
        if fmt is Output.JSON and stream:
            with client.generate(text, token_ids=ids, model=model, timeout=timeout, **options) as running:
                for piece in running:
                    write_json(piece)
                write_json({"usage": running.usage})
        elif fmt is Output.JSON:
            _write_completion(client.complete(text, token_ids=ids, model=model, timeout=timeout, **options))
        elif n == 1:
            with client.generate(text, token_ids=ids, model=model, timeout=timeout, **options) as running:
                _write_stream(running)
        else:
            with _busy(f"generating {n} samples"):
                completion = client.complete(text, token_ids=ids, model=model, timeout=timeout, **options)
            for sample in completion.samples:
                heading = f"── sample {sample.sample}, {len(sample.token_ids)} tokens, {sample.finish_reason} ──"
                write_text(f"{heading}\n{sample.text}\n")


def chat(
    context: typer.Context,
    message: Annotated[
        list[str] | None, typer.Argument(help="What to say, one turn each; none: a conversation, until Ctrl-D.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message that comes first.")] = None,
    model: Model = "",
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenIds = None,
    ignore_eos: IgnoreEos = False,
    address: Address = None,
    output: Format = None,
    timeout: Timeout = None,
) -> None:
    """Talks with the model, which sees all earlier turns. With -o json: one line a turn.

    In a conversation Ctrl-C ends the answer that is running; at the prompt it ends the conversation.
    """
    options = SamplingOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        ignore_eos=ignore_eos,
    )
    with session(context, address, output, timeout) as (client, fmt):
        conversation = _Conversation(client, model, timeout, options, fmt)
        if system is not None:
            conversation.history.append({"role": "system", "content": system})
        if message:
            for content in message:
                conversation.say(content)
        else:
            conversation.loop()


class _Conversation:
    """Turns so far, and how the next one is asked for."""

    def __init__(
        self, client: Client, model: str, timeout: float | None, options: SamplingOptions, output: Output
    ) -> None:
        self._client = client
        self._model = model
        self._timeout = timeout
        self._options = options
        self._output = output
        self.history: list[dict[str, str]] = []

    def say(self, content: str) -> None:
        """One turn. A turn that fails leaves the history as it was; one that Ctrl-C ends keeps what was said."""
        turn = [*self.history, {"role": "user", "content": content}]
        if self._output is Output.JSON:
            completion = self._client.complete(chat=turn, model=self._model, timeout=self._timeout, **self._options)
            _write_completion(completion)
            self.history = [*turn, {"role": "assistant", "content": completion.text}]
            return
        said: list[str] = []
        try:
            with self._client.generate(chat=turn, model=self._model, timeout=self._timeout, **self._options) as running:
                finish_reason = _write_stream(running, said)
        except KeyboardInterrupt:
            self.history = [*turn, {"role": "assistant", "content": "".join(said)}]
            raise
        self.history = [*turn, {"role": "assistant", "content": "".join(said)}]
        if finish_reason is FinishReason.LENGTH:
            typer.echo("(cut: --max-tokens or the end of the context)", err=True)

    def loop(self) -> None:
        """Turns from stdin until its end."""
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - its import gives input() a history and line editing
        while True:
            try:
                content = input("> " if at_terminal else "")
            except EOFError:
                return
            if not content.strip():
                continue
            try:
                self.say(content)
            except PagedKvError as error:
                if not at_terminal:
                    raise
                write_error(error, self._output)
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                typer.echo("", err=True)


def _prompt(prompt: str | None, token_ids: str | None) -> tuple[str | None, list[int] | None]:
    """Text or token ids, whichever was given."""
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give either PROMPT or --token-ids", param_hint="PROMPT")
    if token_ids is not None:
        try:
            return None, [int(token) for token in token_ids.split(",")] if token_ids.strip() else []
        except ValueError:
            raise typer.BadParameter("write numbers, as 1,2,3", param_hint="--token-ids") from None
    if prompt != "-":
        return prompt, None
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is no UTF-8 at byte {error.start}", param_hint="PROMPT") from None
    return text.removesuffix("\n"), None  # the line end that echo adds


def _write_stream(stream: Stream, said: list[str] | None = None) -> FinishReason | None:
    """Shows text as it comes; `said` gets it too. Returns the finish reason."""
    finish_reason = None
    for piece in stream:
        finish_reason = piece.finish_reason
        if piece.text:
            if said is not None:
                said.append(piece.text)  # first: what Ctrl-C leaves on the screen is in it
            write_text(piece.text)
    write_text("\n")
    return finish_reason


def _write_completion(completion: Completion) -> None:
    write_json({"samples": completion.samples, "usage": completion.usage})


@contextlib.contextmanager
def _busy(text: str) -> Iterator[None]:
    """A spinner on a terminal's stderr; nothing elsewhere."""
    with Console(stderr=True).status(text):
        yield
