"""The text layer over SmolLM2's own tokenizer and chat template, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager_svc.text.model import TextModel
from block_manager_svc.text.stream import StopSet

VOCAB = 49152


@pytest.fixture(scope="module")
def model(smollm2_files: dict[str, bytes]) -> TextModel:
    model = TextModel.from_files(smollm2_files, VOCAB)
    assert model is not None
    return model


@pytest.fixture(scope="module")
def reference(smollm2_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' tokenizer, made of the same files."""
    import json

    from transformers import PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("smollm2-tokenizer")
    (folder / "tokenizer.json").write_bytes(smollm2_files["tokenizer.json"])
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=smollm2_files["chat_template.jinja"].decode(),
        **json.loads(smollm2_files["special_tokens.json"]),
    )


TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "emoji 🙂👨‍👩‍👧‍👦🏳️‍🌈 CJK 数字日本語한국어 Ελληνικά עברית",
    "def f(x):\n\treturn x ** 2  # 1234567890\n",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "a" * 3000,
]


@pytest.mark.parametrize("text", TEXTS, ids=[text[:12] for text in TEXTS])
def test_text_tokenizes_as_in_transformers(model: TextModel, reference: Any, text: str) -> None:
    assert model.encode(text).tolist() == reference(text)["input_ids"]


@pytest.mark.parametrize("system", [True, False])
def test_chat_renders_as_in_transformers(model: TextModel, reference: Any, system: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    messages += [{"role": "user", "content": text} for text in TEXTS]
    rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert model.render_chat(messages) == rendered
    ids = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert model.encode_chat(messages).tolist() == ids


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streamed_text_equals_the_decoding_of_the_whole_cut_at_a_stop(data: st.DataObject, model: TextModel) -> None:
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(0, VOCAB - 1), max_size=60),
            st.text(max_size=40).map(lambda text: model.encode(text).tolist()),
            st.lists(st.sampled_from(model.encode("🙂👨‍👩‍👧‍👦数字日本語한국어" * 3).tolist()), max_size=60),
        )
    )
    whole = model.decode(ids)
    stop = data.draw(st.one_of(st.none(), st.text(min_size=1, max_size=2), st.sampled_from(whole or "x")))
    stream = model.stream(None if stop is None else StopSet([stop]))
    released = ""
    for token_id in ids:
        text, found = stream.push(token_id)
        released += text
        assert whole.startswith(released)
        if found is not None:
            break
    else:
        released += stream.finish()[0]
    assert released == (whole if stop is None else whole.split(stop)[0])


def test_every_character_comes_out_with_its_last_token(model: TextModel) -> None:
    text = "🙂 数字 👨‍👩‍👧‍👦"
    ids = model.encode(text).tolist()
    stream = model.stream()
    released = [stream.push(token_id)[0] for token_id in ids]
    assert "".join(released) == text
    assert "\ufffd" not in "".join(released)
    assert "" in released  # some of these characters do span tokens
