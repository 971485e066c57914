"""Client.generate and complete, over the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from sdk_scripted import Scripted, end, endless, messages, row, silent, texts

from pagedkv import (
    Cancelled,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    FinishReason,
    Internal,
    InvalidArgument,
    TokenLogprob,
    Usage,
)
from pagedkv.v1 import generation_pb2 as gen

USAGE = Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=3, preemptions=1, seed=2**64 - 1)


def test_a_piece_is_readable_before_the_next_is_sampled(service: Scripted, client: Client) -> None:
    first_was_read = threading.Event()

    def script(request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:
        yield row("one")
        assert first_was_read.wait(10)
        yield row(" two", token=9, finish=gen.FINISH_REASON_LENGTH)
        yield end()

    service.generate = script
    stream = client.generate("x")
    piece = next(stream)
    assert (piece.text, piece.token_id, piece.sample, piece.finish_reason) == ("one", 1, 0, None)
    assert (piece.logprob, piece.top_logprobs) == (None, ())
    assert stream.usage is None
    first_was_read.set()
    assert [(piece.text, piece.finish_reason) for piece in stream] == [(" two", FinishReason.LENGTH)]
    assert stream.usage == USAGE


def test_usage_is_not_there_while_pieces_of_the_last_message_are(service: Scripted, client: Client) -> None:
    last = row("x", finish=gen.FINISH_REASON_STOP)
    last.usage.seed = 3
    service.generate = messages(last)
    stream = client.generate("x")
    next(stream)
    assert stream.usage is None
    assert list(stream) == []
    assert stream.usage is not None
    assert stream.usage.seed == 3


def test_complete_puts_interleaved_samples_together(service: Scripted, client: Client) -> None:
    service.generate = messages(
        gen.GenerateResponse(sample=[2, 0, 1], token_id=[20, 0, 10], text=["ü", "日", ""], finish_reason=[0, 0, 0]),
        gen.GenerateResponse(sample=[0, 2], token_id=[1, 21], text=["本", "🙂"], finish_reason=[1, 2]),
        gen.GenerateResponse(sample=[1], token_id=[11], text=["späť"], finish_reason=[1]),
        end(),
    )
    completion = client.complete("x", n=3)
    assert [(each.sample, each.text, each.token_ids, each.finish_reason.value) for each in completion.samples] == [
        (0, "日本", (0, 1), "stop"),
        (1, "späť", (10, 11), "stop"),
        (2, "ü🙂", (20, 21), "length"),
    ]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("日本", (0, 1), "stop")
    assert completion.usage == USAGE


def test_logprobs_belong_to_their_rows(service: Scripted, client: Client) -> None:
    service.generate = messages(
        gen.GenerateResponse(
            sample=[0, 1],
            token_id=[5, 6],
            text=["a", "b"],
            finish_reason=[1, 1],
            logprob=[-0.5, -1.5],
            top_token_id=[5, 8, 9, 6],
            top_logprob=[-0.5, -2.0, -0.25, -1.5],
        ),
        end(),
    )
    first, second = client.complete("x", n=2, logprobs=2).samples
    assert (first.logprobs, second.logprobs) == ((-0.5,), (-1.5,))
    assert first.top_logprobs == ((TokenLogprob(5, -0.5), TokenLogprob(8, -2.0)),)
    assert second.top_logprobs == ((TokenLogprob(9, -0.25), TokenLogprob(6, -1.5)),)


def test_every_option_reaches_the_service(service: Scripted, client: Client) -> None:
    client.complete(
        "čau",
        model="tiny",
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        seed=2**64 - 1,
        stop=["\n", "end"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        logprobs=0,
        n=1,
    )
    assert service.requests("Generate") == [
        gen.GenerateRequest(
            model="tiny",
            text="čau",
            sampling=gen.SamplingParams(
                max_tokens=7,
                temperature=0.5,
                top_p=0.25,
                top_k=3,
                seed=2**64 - 1,
                stop=["\n", "end"],
                stop_token_ids=[4, 5],
                ignore_eos=True,
                logprobs=0,
                n=1,
            ),
        )
    ]


def test_what_is_left_out_is_absent_on_the_wire(service: Scripted, client: Client) -> None:
    client.complete("x", temperature=None, stop=())
    client.complete("x", temperature=0.0, stop="one string")
    absent, present = service.requests("Generate")
    assert absent == gen.GenerateRequest(text="x", sampling=gen.SamplingParams())
    assert present.sampling.HasField("temperature")
    assert list(present.sampling.stop) == ["one string"]


def test_chat_and_token_ids_are_prompts_too_even_when_empty(service: Scripted, client: Client) -> None:
    client.complete(chat=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    client.complete(token_ids=(token for token in [1, 2, 3]))
    client.complete(chat=[])
    client.complete(token_ids=[])
    client.complete("")
    chat, ids, *empty = service.requests("Generate")
    assert [(each.role, each.content) for each in chat.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert list(ids.token_ids.ids) == [1, 2, 3]
    assert [each.WhichOneof("prompt") for each in empty] == ["chat", "token_ids", "text"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "PROMPT_MISSING"),
        ({"prompt": "x", "token_ids": [1]}, "PROMPT_MISSING"),
        ({"prompt": "\udcff"}, "TEXT_NOT_UNICODE"),
        ({"chat": [{"role": "user", "content": "\udcff"}]}, "TEXT_NOT_UNICODE"),
        ({"chat": [{"role": "user"}]}, "CHAT_MESSAGE_INVALID"),
        ({"token_ids": [1, -2]}, "TOKEN_OUT_OF_RANGE"),
        ({"token_ids": [2**32]}, "TOKEN_OUT_OF_RANGE"),
        ({"prompt": "x", "max_tokens": -1}, "PARAMETER_OUT_OF_RANGE"),
        ({"prompt": "x", "seed": 2**64}, "PARAMETER_OUT_OF_RANGE"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "PARAMETER_OUT_OF_RANGE"),
        ({"prompt": "x", "stop": ["\udcff"]}, "PARAMETER_OUT_OF_RANGE"),
    ],
)
def test_what_no_message_can_carry_is_refused_before_it_is_sent(
    service: Scripted, client: Client, arguments: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.generate(**arguments)  # type: ignore[arg-type]
    assert caught.value.reason == reason
    assert service.calls == []


def test_an_unknown_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="max_token"):
        client.generate("x", max_token=3)  # type: ignore[call-arg]


# --- leaving early: every way has to reach the server, which then frees the blocks ---


def test_break_cancels_the_call(service: Scripted, client: Client) -> None:
    service.generate = endless
    for piece in client.generate("x"):
        assert piece.text == "tick "
        break
    service.wait_idle()


def test_an_exception_in_the_loop_cancels_the_call(service: Scripted, client: Client) -> None:
    service.generate = endless
    with pytest.raises(ZeroDivisionError):
        [1 // 0 for _ in client.generate("x")]
    service.wait_idle()


def test_leaving_the_with_block_cancels_the_call(service: Scripted, client: Client) -> None:
    service.generate = endless
    with client.generate("x") as stream:
        next(stream)
    service.wait_idle()
    assert list(stream) == []
    assert stream.usage is None


def test_dropping_an_unread_stream_cancels_the_call(service: Scripted, client: Client) -> None:
    service.generate = silent
    stream = client.generate("x")
    service.wait_started()
    del stream
    service.wait_idle()


def test_cancel_from_another_thread_ends_a_waiting_iteration(service: Scripted, client: Client) -> None:
    service.generate = silent
    stream = client.generate("x")
    service.wait_started()
    canceller = threading.Timer(0.05, stream.cancel)
    canceller.start()
    assert list(stream) == []
    canceller.join()
    assert stream.usage is None
    service.wait_idle()


def test_ctrl_c_while_waiting_cancels_the_call(service: Scripted, client: Client) -> None:
    import _thread

    service.generate = silent
    stream = client.generate("x")
    service.wait_started()
    threading.Timer(0.05, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    service.wait_idle()


def test_closing_the_client_ends_open_streams_with_cancelled(service: Scripted) -> None:
    service.generate = endless
    client = Client(service.address)
    stream = client.generate("x")
    next(stream)
    client.close()
    with pytest.raises(Cancelled):
        for _ in stream:
            pass
    service.wait_idle()
    with pytest.raises(FailedPrecondition) as caught:
        client.generate("x")
    assert caught.value.reason == "CLIENT_CLOSED"


def test_cancel_after_the_end_changes_nothing(service: Scripted, client: Client) -> None:
    with client.generate("x") as stream:
        assert "".join(piece.text for piece in stream) == "Paris."
    stream.cancel()
    assert stream.usage == USAGE


def test_the_overall_timeout_ends_the_call(service: Scripted, client: Client) -> None:
    service.generate = endless
    with pytest.raises(DeadlineExceeded) as caught:
        client.complete("x", timeout=0.2)
    assert caught.value.numbers == {"timeout": 0.2}
    service.wait_idle()


def test_a_stream_outlives_the_timeout_of_unary_calls(service: Scripted) -> None:
    slow = threading.Event()

    def script(request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:
        slow.wait(0.4)
        yield from texts("late")(request, context)

    service.generate = script
    with Client(service.address, timeout=0.1) as client:
        assert client.complete("x").text == "late"


# --- a service that breaks its contract ---


def test_a_stream_without_usage_is_incomplete(service: Scripted, client: Client) -> None:
    service.generate = messages(row("x", finish=gen.FINISH_REASON_STOP))
    stream = client.generate("x")
    next(stream)
    with pytest.raises(Internal) as caught:
        next(stream)
    assert caught.value.reason == "STREAM_INCOMPLETE"


def test_a_missing_sample_or_finish_reason_is_incomplete(service: Scripted, client: Client) -> None:
    service.generate = messages(row("x", finish=gen.FINISH_REASON_STOP), end())
    with pytest.raises(Internal, match="STREAM_INCOMPLETE"):
        client.complete("x", n=2)
    service.generate = messages(row("x"), end())
    with pytest.raises(Internal, match="STREAM_INCOMPLETE"):
        client.complete("x")


def test_columns_that_do_not_fit_end_the_call(service: Scripted, client: Client) -> None:
    def script(request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gen.GenerateResponse]:
        yield gen.GenerateResponse(sample=[0, 1], token_id=[1, 2], text=["a"], finish_reason=[0, 0])
        yield from silent(request, context)

    service.generate = script
    with pytest.raises(Internal, match="REPLY_INVALID"):
        client.complete("x")
    service.wait_idle()


def test_a_newer_finish_reason_still_ends_a_sample(service: Scripted, client: Client) -> None:
    service.generate = messages(row("x", finish=99), end())
    assert client.complete("x").finish_reason is FinishReason.UNKNOWN
