"""kvctl's commands, in text and in JSON, against the contract on a real port."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from google.rpc import code_pb2
from sdk_scripted import NO_EXECUTOR, Scripted, end, messages, refusing, row, texts
from typer.testing import CliRunner

from pagedkv.cli import app
from pagedkv.v1 import block_manager_pb2 as bm
from pagedkv.v1 import generation_pb2 as gen

HEADER = {"service_id": "svc", "epoch": 7, "revision": 41}
USAGE = {"prompt_tokens": 5, "cached_tokens": 4, "completion_tokens": 3, "preemptions": 1, "seed": 2**64 - 1}


class Result:
    """What a command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> object:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def lines(self) -> list[object]:
        assert self.code == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]


Kvctl = Callable[..., Result]


@pytest.fixture
def kvctl(service: Scripted) -> Kvctl:
    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(app, list(arguments), input=stdin, env={"PAGEDKV_ADDRESS": service.address})
        return Result(result.exit_code, result.stdout, result.stderr)

    return run


# --- generate ---


def test_generate_writes_the_text_and_a_line_end(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = texts(" Pa", "", "ris 🙂", " [bold]není[/bold]")
    result = kvctl("generate", "The capital of France is")
    assert (result.code, result.out, result.err) == (0, " Paris 🙂 [bold]není[/bold]\n", "")


def test_generate_takes_every_sampling_flag(service: Scripted, kvctl: Kvctl) -> None:
    flags = (
        "--model tiny --max-tokens 7 --temperature 0.5 --top-p 0.25 --top-k 3 --seed 9 --stop a --stop b"
        " --stop-token-id 4 --stop-token-id 5 --ignore-eos --logprobs 2 -n 1"
    )
    assert kvctl("generate", "x", *flags.split()).code == 0
    assert service.requests("Generate") == [
        gen.GenerateRequest(
            model="tiny",
            text="x",
            sampling=gen.SamplingParams(
                max_tokens=7,
                temperature=0.5,
                top_p=0.25,
                top_k=3,
                seed=9,
                stop=["a", "b"],
                stop_token_ids=[4, 5],
                ignore_eos=True,
                logprobs=2,
                n=1,
            ),
        )
    ]


def test_generate_leaves_what_was_not_given_to_the_service(service: Scripted, kvctl: Kvctl) -> None:
    kvctl("generate", "x")
    assert service.requests("Generate") == [
        gen.GenerateRequest(text="x", sampling=gen.SamplingParams(max_tokens=256, n=1))
    ]


@pytest.mark.parametrize(("stdin", "text"), [("žltý\nkôň\n", "žltý\nkôň"), ("no line end", "no line end"), ("", "")])
def test_generate_reads_stdin_for_a_dash(service: Scripted, kvctl: Kvctl, stdin: str, text: str) -> None:
    assert kvctl("generate", "-", stdin=stdin.encode()).code == 0
    assert service.requests("Generate")[0].text == text


def test_generate_takes_token_ids(service: Scripted, kvctl: Kvctl) -> None:
    assert kvctl("generate", "--token-ids", "1, 2,300").code == 0
    assert kvctl("generate", "--token-ids", "").code == 0
    first, empty = service.requests("Generate")
    assert list(first.token_ids.ids) == [1, 2, 300]
    assert empty.WhichOneof("prompt") == "token_ids"


def test_generate_shows_each_of_n_samples_under_its_heading(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = messages(
        gen.GenerateResponse(
            sample=[1, 0, 2], token_id=[4, 5, 6], text=["zwei", "ei", "drei"], finish_reason=[1, 0, 2]
        ),
        row("ns", finish=gen.FINISH_REASON_LENGTH),
        end(),
    )
    result = kvctl("generate", "x", "-n", "3")
    assert result.out.splitlines() == [
        "── sample 0, 2 tokens, length ──",
        "eins",
        "── sample 1, 1 tokens, stop ──",
        "zwei",
        "── sample 2, 1 tokens, length ──",
        "drei",
    ]


def test_generate_json_is_one_object(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = messages(
        gen.GenerateResponse(
            sample=[1, 0],
            token_id=[4, 5],
            text=["é", "🙂"],
            finish_reason=[1, 2],
            logprob=[-0.5, -1.0],
            top_token_id=[4, 5],
            top_logprob=[-0.5, -0.25],
        ),
        end(),
    )
    result = kvctl("generate", "x", "-n", "2", "-o", "json")
    assert "🙂" in result.out
    assert result.json == {
        "samples": [
            {
                "sample": 0,
                "text": "🙂",
                "token_ids": [5],
                "finish_reason": "length",
                "logprobs": [-1.0],
                "top_logprobs": [[{"token_id": 5, "logprob": -0.25}]],
            },
            {
                "sample": 1,
                "text": "é",
                "token_ids": [4],
                "finish_reason": "stop",
                "logprobs": [-0.5],
                "top_logprobs": [[{"token_id": 4, "logprob": -0.5}]],
            },
        ],
        "usage": USAGE,
    }


def test_generate_json_stream_is_a_line_a_token_and_usage(kvctl: Kvctl) -> None:
    piece = {"sample": 0, "logprob": None, "top_logprobs": []}
    assert kvctl("generate", "x", "-o", "json", "--stream").lines == [
        piece | {"token_id": 100, "text": "Paris", "finish_reason": None},
        piece | {"token_id": 101, "text": ".", "finish_reason": "stop"},
        {"usage": USAGE},
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "x", "--token-ids", "1"),
        ("generate", "--token-ids", "1,a"),
        ("generate", "x", "--max-tokens", "many"),
        ("generate", "x", "-o", "yaml"),
        ("tables", "one"),
        ("nothing",),
        ("--address", "localhost", "models"),
        ("models", "--address", "localhost"),
    ],
)
def test_wrong_usage_exits_with_2(service: Scripted, kvctl: Kvctl, arguments: tuple[str, ...]) -> None:
    result = kvctl(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "Error" in result.err
    assert service.calls == []


def test_stdin_that_is_no_utf8_is_wrong_usage(service: Scripted, kvctl: Kvctl) -> None:
    result = kvctl("generate", "-", stdin=b"ab\xff")
    assert result.code == 2
    assert "byte 2" in result.err
    assert service.calls == []


# --- chat ---


def turns(service: Scripted) -> list[list[tuple[str, str]]]:
    return [[(each.role, each.content) for each in request.chat.messages] for request in service.requests("Generate")]


def test_chat_sends_each_message_with_all_earlier_turns(service: Scripted, kvctl: Kvctl) -> None:
    result = kvctl("chat", "hi", "and?", "--system", "be brief")
    assert (result.code, result.out) == (0, "Paris.\nParis.\n")
    first = [("system", "be brief"), ("user", "hi")]
    assert turns(service) == [first, [*first, ("assistant", "Paris."), ("user", "and?")]]


def test_chat_without_a_message_reads_turns_from_stdin(service: Scripted, kvctl: Kvctl) -> None:
    result = kvctl("chat", stdin="hi\n\nand?\n")
    assert (result.code, result.out) == (0, "Paris.\nParis.\n")
    assert turns(service) == [[("user", "hi")], [("user", "hi"), ("assistant", "Paris."), ("user", "and?")]]


def test_chat_json_is_a_line_a_turn(kvctl: Kvctl) -> None:
    first, second = kvctl("chat", "hi", "and?", "-o", "json").lines
    assert first["samples"][0]["text"] == second["samples"][0]["text"] == "Paris."
    assert first["usage"] == USAGE


def test_chat_says_on_stderr_that_an_answer_was_cut(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = messages(row("Once upon", finish=gen.FINISH_REASON_LENGTH), end())
    result = kvctl("chat", "tell")
    assert (result.out, "--max-tokens" in result.err) == ("Once upon\n", True)


def test_a_piped_conversation_stops_at_the_first_error(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = refusing(
        code_pb2.FAILED_PRECONDITION, "there is no template", reason="CHAT_TEMPLATE_UNAVAILABLE"
    )
    result = kvctl("chat", stdin="hi\nand?\n")
    assert result.code == 1
    assert len(service.requests("Generate")) == 1


# --- status, sequences, tables, models, audit ---


def cells(out: str) -> list[list[str]]:
    """The rows of the tables in `out`."""
    return [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in out.splitlines()
        if line[:1] in "│┃" and line
    ]


def test_status_shows_health_model_pool_sharing_and_activity(service: Scripted, kvctl: Kvctl) -> None:
    result = kvctl("status")
    assert result.code == 0
    head, detail, *_ = result.out.splitlines()
    assert head == f"{service.address}: SERVING, model tiny"
    assert detail == "service svc, epoch 7, revision 41; a block holds 16 tokens in 4,096 bytes"
    rows = cells(result.out)
    for row_ in (
        ["state", "device", "host"],
        ["free", "90", "8"],
        ["quarantined", "6", "0"],
        ["total", "111", "8"],
        ["blocks shared", "2", "3"],
        ["longest free run", "69"],
        ["copies on write", "3"],
        ["steps", "1,000,000"],
    ):
        assert row_ in rows


def test_status_shows_no_host_pool_where_there_is_none(service: Scripted, kvctl: Kvctl) -> None:
    service.unary["GetPool"] = bm.GetPoolResponse(device=bm.BlockStates(null=1, free=9))
    assert ["total", "10"] in cells(kvctl("status").out)


def test_status_json(service: Scripted, kvctl: Kvctl) -> None:
    status = kvctl("status", "-o", "json").json
    assert (status["address"], status["healthy"]) == (service.address, True)
    assert status["models"][0]["id"] == "tiny"
    assert status["pool"]["device"]["free"] == 90
    assert status["pool"]["header"] == HEADER


@pytest.mark.parametrize("output", ["text", "json"])
def test_status_without_an_executor_is_shown_and_exits_with_1(service: Scripted, kvctl: Kvctl, output: str) -> None:
    service.serving(False)
    service.unary["ListModels"] = gen.ListModelsResponse()
    service.unary["GetPool"] = NO_EXECUTOR
    result = kvctl("status", "-o", output)
    assert (result.code, result.err) == (1, "")
    if output == "json":
        assert json.loads(result.out) == {"address": service.address, "healthy": False, "models": [], "pool": None}
    else:
        assert result.out == f"{service.address}: NOT SERVING, no executor is attached\n"


def test_sequences(kvctl: Kvctl) -> None:
    assert cells(kvctl("sequences").out)[1:] == [
        ["11", "running", "40", "39", "3", "2"],
        ["1099511627776", "waiting", "7", "0", "0", "0"],
    ]
    listed = kvctl("sequences", "-o", "json").json
    assert listed["header"] == HEADER
    assert listed["sequences"][0] == {
        "sequence": 11,
        "tokens": 40,
        "computed": 39,
        "blocks": 3,
        "shared_blocks": 2,
        "state": "running",
    }


def test_tables_mark_what_is_shared(service: Scripted, kvctl: Kvctl) -> None:
    result = kvctl("tables", "11", "1099511627776")
    assert "Sequence 11: 40 tokens in 3 blocks, 2 shared" in result.out
    assert cells(result.out)[:4] == [
        ["logical", "tokens", "block", "refcount", "shared"],
        ["0", "0..15", "5", "2", "yes"],
        ["1", "16..31", "9", "2", "yes"],
        ["2", "32..39", "6", "1", ""],
    ]
    assert list(service.requests("GetBlockTables")[0].sequence) == [11, 2**40]


def test_tables_json(kvctl: Kvctl) -> None:
    shown = kvctl("tables", "11", "-o", "json").json
    assert shown["header"] == HEADER
    assert shown["tables"][0] == {
        "sequence": 11,
        "block_size": 16,
        "tokens": 40,
        "blocks": [5, 9, 6],
        "refcounts": [2, 2, 1],
        "shared": [True, True, False],
        "last_page_len": 8,
        "revision": 41,
    }


def test_tables_of_nothing(service: Scripted, kvctl: Kvctl) -> None:
    service.unary["GetBlockTables"] = bm.GetBlockTablesResponse(block_size=16, indptr=[0])
    assert kvctl("tables").out == "no sequence is alive\n"
    assert kvctl("tables", "-o", "json").json["tables"] == []


def test_sequence_shows_everything_about_it(service: Scripted, kvctl: Kvctl) -> None:
    service.unary["GetSequence"].token_ids = b"\5\0\0\0\6\0\0\0"
    shown = kvctl("sequence", "11", "--first", "1", "--upto", "3").out
    assert "engine" in shown
    assert shown.endswith("5 6\n")
    assert service.requests("GetSequence") == [bm.GetSequenceRequest(sequence=11, first=1, upto=3)]
    assert kvctl("sequence", "11", "-o", "json").json["tokens"] == 40


def test_match_shows_what_is_cached_and_whether_it_fits(service: Scripted, kvctl: Kvctl) -> None:
    shown = kvctl("match", "1", "2", "--adapter", "a", "--generate").out
    assert "later" in shown
    assert service.requests("Match") == [
        bm.MatchRequest(counts=b"\2\0\0\0", tokens=b"\1\0\0\0\2\0\0\0", adapter="a", generate=True)
    ]
    matches = kvctl("match", "1", "-o", "json").json["matches"]
    assert matches == [{"cached_tokens": 16, "admission": "later", "shortfall": 2}]


def test_watch_shows_events_as_they_come_and_why_it_ends(service: Scripted, kvctl: Kvctl) -> None:
    told = bm.WatchEventsResponse(
        phase=bm.WATCH_PHASE_SNAPSHOT_END,
        kind=bytes([5, 3]),
        hash=b"1" * 32,
        place=b"\4\0\0\0",
        sequence=b"\7" + bytes(7),
    )
    service.watched = [told, refusing(code_pb2.ABORTED, "watch again", reason="RESYNC_NEEDED")]
    ended = kvctl("watch", "--blocks")
    assert (ended.code, "RESYNC_NEEDED" in ended.err) == (1, True)
    assert "SequenceCreated" in ended.out
    assert "snapshot end" in ended.out
    assert service.requests("WatchEvents") == [bm.WatchEventsRequest(blocks=True)]
    line = json.loads(kvctl("watch", "-o", "json").out)
    assert line["events"] == [
        {"event": "SequenceCreated", "sequence": 7},
        {"event": "BlockRemoved", "hash": "31" * 32, "place": 4},
    ]


def test_models(service: Scripted, kvctl: Kvctl) -> None:
    assert cells(kvctl("models").out)[1] == ["tiny", "512", "128", "2 3", "token ids, text, chat"]
    assert kvctl("models", "-o", "json").json["models"][0]["eos_token_ids"] == [2, 3]
    service.unary["ListModels"] = gen.ListModelsResponse()
    assert kvctl("models").out == "none: no executor is attached\n"


def test_audit_exits_with_1_when_an_invariant_is_violated(service: Scripted, kvctl: Kvctl) -> None:
    assert (kvctl("audit").code, kvctl("audit").out) == (0, "no violations at epoch 7, revision 41\n")
    assert kvctl("audit", "-o", "json").json == {"header": HEADER, "ok": True, "violations": []}
    service.unary["Audit"] = bm.AuditResponse(header=HEADER, violations=["block 3: refcount 2, 1 reference"])
    result = kvctl("audit")
    assert (result.code, result.out.splitlines()[1]) == (1, "  block 3: refcount 2, 1 reference")
    result = kvctl("audit", "-o", "json")
    assert (result.code, json.loads(result.out)["violations"]) == (1, ["block 3: refcount 2, 1 reference"])


def test_reset_cache(service: Scripted, kvctl: Kvctl) -> None:
    assert kvctl("reset-cache").out == "12 cached blocks became free at epoch 7, revision 41\n"
    assert kvctl("reset-cache", "-o", "json").json == {"header": HEADER, "freed_blocks": 12}


def test_quota(service: Scripted, kvctl: Kvctl) -> None:
    out = kvctl("quota", "red", "--floor", "4", "--quota", "0", "--host-floor", "1", "--host-quota", "9").out
    for told in ("red", "4 .. 0", "1 .. 9"):
        assert told in out
    usage = kvctl("quota", "red", "-o", "json").json["usage"]
    assert (usage["tenant"], usage["charged"], usage["quota"], usage["host_quota"]) == ("red", 7, 0, 9)
    assert kvctl("quota", "red", "--floor", "-1").code == 2
    assert "0 .." in kvctl("status").out  # the default tenant has no bound
    assert service.requests("SetQuota") == [
        bm.SetQuotaRequest(tenant="red", floor=4, quota=0, host_floor=1, host_quota=9),
        bm.SetQuotaRequest(tenant="red"),
    ]


def test_resize_and_compact(service: Scripted, kvctl: Kvctl) -> None:
    assert kvctl("resize", "1000").out == "1,000 blocks, 12 evicted at epoch 7, revision 41\n"
    assert kvctl("resize", "1000", "-o", "json").json == {"header": HEADER, "evicted_blocks": 12}
    assert kvctl("resize", "0").code == 2
    assert kvctl("compact").out == "5 blocks moved, 2 tables changed at epoch 7, revision 41\n"
    assert kvctl("compact", "--max-moves", "7", "-o", "json").json == {
        "header": HEADER,
        "moved_blocks": 5,
        "changed_tables": 2,
        "step_id": 9,
    }
    assert service.requests("Resize") == [bm.ResizeRequest(limit=1000)] * 2
    assert service.requests("Compact") == [bm.CompactRequest(max_moves=256), bm.CompactRequest(max_moves=7)]


# --- where options stand, and errors ---


@pytest.mark.parametrize("arguments", [("-o", "json", "models"), ("models", "-o", "json"), ("models", "--output=json")])
def test_the_format_may_stand_before_or_after_the_command(kvctl: Kvctl, arguments: tuple[str, ...]) -> None:
    assert "models" in kvctl(*arguments).json


def test_the_format_after_the_command_counts(kvctl: Kvctl) -> None:
    assert "models" in kvctl("-o", "text", "models", "-o", "json").json
    assert kvctl("-o", "json", "models", "-o", "text").out.lstrip().startswith("Models")


def test_the_address_comes_from_the_command_then_the_option_then_the_environment(
    service: Scripted, closed_port: str
) -> None:
    def code(*arguments: str, environment: str) -> int:
        return CliRunner().invoke(app, list(arguments), env={"PAGEDKV_ADDRESS": environment}).exit_code

    assert code("models", environment=service.address) == 0
    assert code("models", environment=closed_port) == 1
    assert code("--address", service.address, "models", environment=closed_port) == 0
    assert code("--address", closed_port, "models", "--address", service.address, environment=closed_port) == 0


REFUSAL = refusing(
    code_pb2.INVALID_ARGUMENT,
    "the prompt is\ntoo long",
    reason="PROMPT_TOO_LONG",
    prompt_tokens=9000,
    max_context=8192,
)


def test_an_error_is_one_line_with_reason_numbers_and_what_to_do(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = REFUSAL
    result = kvctl("generate", "x")
    assert (result.code, result.out) == (1, "")
    head, advice = result.err.split(" — ")
    assert head == "error: PROMPT_TOO_LONG: the prompt is too long (max_context 8192, prompt_tokens 9000)"
    assert advice == "shorten the prompt: `kvctl models` shows the context\n"


def test_an_error_in_json_mode_is_json_on_stderr(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = REFUSAL
    result = kvctl("generate", "x", "-o", "json")
    assert (result.code, result.out) == (1, "")
    assert json.loads(result.err) == {
        "error": {
            "reason": "PROMPT_TOO_LONG",
            "message": "the prompt is\ntoo long",
            "code": "INVALID_ARGUMENT",
            "numbers": {"prompt_tokens": 9000, "max_context": 8192},
            "retry_after": None,
            "advice": "shorten the prompt: `kvctl models` shows the context",
        }
    }


@pytest.mark.parametrize(
    "code",
    [value for name, value in code_pb2.Code.items() if name != "OK"],
    ids=[name for name in code_pb2.Code.keys() if name != "OK"],  # noqa: SIM118 - an enum wrapper is no dict
)
def test_every_status_gets_one_line_with_advice(service: Scripted, kvctl: Kvctl, code: int) -> None:
    service.generate = refusing(code, "no", reason="NEVER_HEARD_OF")
    result = kvctl("generate", "x")
    assert result.code == 1
    assert result.err.startswith("error: NEVER_HEARD_OF: no — ")
    assert result.err.count("\n") == 1


def test_the_service_says_when_waiting_helps(service: Scripted, kvctl: Kvctl) -> None:
    service.generate = refusing(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after=0.5)
    assert kvctl("generate", "x").err == "error: QUEUE_FULL: full — try again in 0.5 s\n"
    service.generate = refusing(code_pb2.UNAVAILABLE, "none", reason="EXECUTOR_UNAVAILABLE", retry_after=1)
    assert kvctl("generate", "x").err == (
        "error: EXECUTOR_UNAVAILABLE: none — start gpu-executor unless it is about to attach, and try again in 1 s\n"
    )


def test_nobody_there_is_one_line_that_names_the_address(closed_port: str) -> None:
    result = CliRunner().invoke(app, ["--address", closed_port, "status"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: UNREACHABLE: no service answers at {closed_port} ")
    assert result.stderr.count("\n") == 1


def test_a_failure_after_some_text_keeps_the_text(service: Scripted, kvctl: Kvctl) -> None:
    def script(request: object, context: object) -> object:
        yield row("half")
        refusing(code_pb2.ABORTED, "cut off", reason="READER_TOO_SLOW")(request, context)  # type: ignore[arg-type]

    service.generate = script  # type: ignore[assignment]
    result = kvctl("generate", "x")
    assert (result.code, result.out) == (1, "half")
    assert "error: READER_TOO_SLOW: cut off" in result.err
