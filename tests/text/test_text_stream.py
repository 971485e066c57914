from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from block_manager_svc.text.model import TextModel
from block_manager_svc.text.stream import StopSet, TextStream

BYTE_LEVEL = byte_level_tokenizer().backend_tokenizer
VOCAB = BYTE_LEVEL.get_vocab_size()
PADDED_VOCAB = VOCAB + 8  # a model's vocabulary is often larger than its tokenizer's


def text_model(tokenizer: Tokenizer, vocab_size: int) -> TextModel:
    model = TextModel.from_files({"tokenizer.json": tokenizer.to_str().encode()}, vocab_size)
    assert model is not None
    return model


MODEL = text_model(BYTE_LEVEL, PADDED_VOCAB)


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: words begin with ▁, what is not in the vocabulary falls back to byte tokens."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for token in ("▁", "a", "b", "c", "▁a", "▁b", "ab", "é", "🙂", "▁🙂"):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b"), ("a", "b")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string whose end comes first; of those that end together, before the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


def run(stream: TextStream, ids: list[int]) -> tuple[str, str | None]:
    out = []
    for token_id in ids:
        text, stop = stream.push(token_id)
        out.append(text)
        if stop is not None:
            return "".join(out), stop
    text, stop = stream.finish()
    return "".join([*out, text]), stop


token_streams = st.one_of(
    st.lists(st.integers(0, PADDED_VOCAB - 1), max_size=60),
    st.lists(st.integers(5, 270), max_size=60),  # single bytes: broken and split characters
    st.text(alphabet="ab é数🙂\U0001f468\u200d", max_size=30).map(lambda text: MODEL.encode(text).tolist()),
)


@settings(deadline=None)
@given(token_streams)
def test_streamed_text_equals_the_decoding_of_the_whole(ids: list[int]) -> None:
    assert run(MODEL.stream(), ids) == (MODEL.decode(ids), None)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_text_ends_before_the_first_stop_string(data: st.DataObject) -> None:
    ids = data.draw(token_streams)
    whole = MODEL.decode(ids)
    pieces = st.text(alphabet="ab é数🙂", min_size=1, max_size=4)
    if whole:
        at = st.integers(0, len(whole) - 1)
        pieces = st.one_of(pieces, st.builds(lambda i, n: whole[i : i + n], at, st.integers(1, 6)))
    stops = data.draw(st.lists(pieces, min_size=1, max_size=4))

    text, stop = run(MODEL.stream(StopSet(stops)), ids)

    assert text == cut(whole, stops)
    assert (stop is None) == (text == whole)
    if stop is not None:
        assert stop in stops
        assert whole.startswith(text + stop)


@settings(max_examples=500, deadline=None)
@given(
    st.text(alphabet="ab", min_size=5, max_size=20),
    st.lists(st.text(alphabet="ab", min_size=3, max_size=6), min_size=1, max_size=3),
)
def test_released_text_is_never_part_of_a_stop_string_that_could_still_come(text: str, stops: list[str]) -> None:
    stream = MODEL.stream(StopSet(stops))
    released = ""
    for end, char in enumerate(text, 1):
        piece, stop = stream.push(BYTE_LEVEL.token_to_id(char))
        released += piece
        if stop is not None:
            return
        # Whatever comes next, no stop string may begin in what is out already; and nothing else is held back.
        held = text[len(released) : end]
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((n for n in range(1, end + 1) if text[end - n : end] in beginnings), default=0)
        assert len(held) == longest


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("aaab", ["aab"], ("a", "aab")),
        ("ababac!", ["abac"], ("ab", "abac")),
        ("xabcabd", ["abcabe", "abd"], ("xabc", "abd")),
        ("abcd", ["bc", "abcx"], ("a", "bc")),
        ("abc", ["abc", "b"], ("a", "b")),
        ("abc", ["c", "bc", "abc"], ("", "abc")),
        ("aab", ["abc"], ("aab", None)),
    ],
)
def test_stop_strings_that_overlap(text: str, stops: list[str], expected: tuple[str, str | None]) -> None:
    ids = [BYTE_LEVEL.token_to_id(char) for char in text]
    assert run(MODEL.stream(StopSet(stops)), ids) == expected
    assert cut(text, stops) == expected[0]


def test_stop_string_over_token_borders_is_not_shown_in_part() -> None:
    ids = [BYTE_LEVEL.token_to_id(char) for char in "ab##a###b"]
    stream = MODEL.stream(StopSet(["###"]))
    texts = [stream.push(token_id) for token_id in ids[:-1]]
    assert texts == [
        ("a", None), ("b", None), ("", None), ("", None), ("##a", None), ("", None), ("", None), ("", "###"),
    ]  # fmt: skip


def test_a_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    stream = MODEL.stream(StopSet(["###"]))
    hash_id = BYTE_LEVEL.token_to_id("#")
    assert [stream.push(hash_id), stream.push(hash_id)] == [("", None), ("", None)]
    assert stream.finish() == ("##", None)


def test_an_unfinished_character_is_released_at_the_end() -> None:
    ids = [BYTE_LEVEL.token_to_id(char) for char in pre_tokenized("🙂")][:-1]
    stream = MODEL.stream()
    assert [stream.push(token_id) for token_id in ids] == [("", None)] * 3
    assert stream.finish() == ("\ufffd", None)


def pre_tokenized(text: str) -> str:
    """One character for each byte, as byte-level tokenizers write them."""
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))


def test_a_stop_string_may_come_out_of_an_unfinished_character() -> None:
    ids = [BYTE_LEVEL.token_to_id(char) for char in "a" + pre_tokenized("🙂")[0]]
    assert run(MODEL.stream(StopSet(["\ufffd"])), ids) == ("a", "\ufffd")


@pytest.mark.parametrize("token", ["</s>", None], ids=["special", "unknown to the tokenizer"])
def test_endless_tokens_without_text_cost_nothing_and_break_no_character(token: str | None) -> None:
    silent = VOCAB + 1 if token is None else BYTE_LEVEL.token_to_id(token)
    first, *rest = [BYTE_LEVEL.token_to_id(char) for char in pre_tokenized("🙂")]
    stream = MODEL.stream()
    texts = [stream.push(token_id)[0] for token_id in [first, *[silent] * 500, *rest]]
    assert "".join(texts) == texts[-1] == "🙂"


def test_endless_broken_bytes_are_released_with_a_bounded_delay() -> None:
    broken = BYTE_LEVEL.token_to_id(pre_tokenized("🙂")[1])  # a byte that no character begins with
    stream = MODEL.stream()
    released = 0
    for pushed in range(1, 300):
        released += len(stream.push(broken)[0])
        assert pushed - released <= 16
    assert released + len(stream.finish()[0]) == pushed


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_byte_fallback_tokens_stream_as_they_decode(data: st.DataObject) -> None:
    tokenizer = byte_fallback_tokenizer()
    model = text_model(tokenizer, tokenizer.get_vocab_size())
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=50),
            st.text(alphabet=" abcé🙂数", max_size=20).map(lambda text: model.encode(text).tolist()),
        )
    )
    text, _ = run(model.stream(), ids)  # raises for no stream of tokens
    whole = model.decode(ids)
    # Byte fallback decodes a run of bytes as a whole: a broken byte at its end spoils what was a character before.
    if "\ufffd" not in whole:
        assert text == whole


def test_a_first_words_space_is_treated_as_in_the_whole() -> None:
    tokenizer = byte_fallback_tokenizer()
    model = text_model(tokenizer, tokenizer.get_vocab_size())
    ids = model.encode("ab ab 🙂a").tolist()
    assert run(model.stream(), ids) == ("ab ab 🙂a", None)


def test_tokens_that_are_added_but_not_special_have_text() -> None:
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    model = text_model(tokenizer, tokenizer.get_vocab_size())
    ids = model.encode("a<think>b").tolist()
    assert tokenizer.token_to_id("<think>") in ids
    assert run(model.stream(), ids) == ("a<think>b", None)


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    content = json.loads(BYTE_LEVEL.to_str())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    model = TextModel.from_files({"tokenizer.json": json.dumps(content).encode()}, VOCAB)
    assert model is not None
    assert model.encode("Reading never copies.").tolist() == BYTE_LEVEL.encode("Reading never copies.").ids
